"""The Trainer of transformers 4, unmodified, trains with `half_precision_backend="apex"`.

Guards: apex/amp/*.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers 4.57: make test-clients")
if not transformers.__version__.startswith("4."):
    pytest.skip("transformers 5 has no apex backend", allow_module_level=True)

from trainer_samples import train  # noqa: E402

LEVELS = {"none": {}} | {
    level: {"fp16": True, "half_precision_backend": "apex", "fp16_opt_level": level} for level in ("O0", "O1", "O2")
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_it_trains_evaluates_saves_and_resumes(name, level, tmp_path):
    weights, loss, logs, kind = train(transformers.Trainer, name, tmp_path, **LEVELS[level])
    assert {weight.dtype for weight in weights} == {torch.float32} and len(logs) == 6
    _, plain, *_ = train(transformers.Trainer, name, tmp_path / "plain")
    assert loss == plain if level in ("none", "O0") else abs(loss - plain) < 0.06
    saved = kind.from_pretrained(tmp_path / "final").state_dict().values()
    assert all(map(torch.equal, saved, weights))
    again, loss_again, *_ = train(transformers.Trainer, name, tmp_path, tmp_path / "checkpoint-3", **LEVELS[level])
    if level == "O2" and name != "gpt2":
        # the first step overflows at 2**16, and this Trainer does not save amp's state: the resumed run overflows again
        assert abs(loss_again - loss) < 0.06
    else:
        assert loss_again == loss and all(map(torch.equal, again, weights))
