"""LoRA by peft, unmodified, trains adapters of models of transformers, also on weights of 4 bits by bitsandbytes
(QLoRA).

Guards: training/model, training/masters.
"""

import pytest
import torch

import amp_patch as amp

peft = pytest.importorskip("peft", reason="needs peft: make test-clients")
pytest.importorskip("transformers", reason="needs transformers: make test-clients")

from lora_samples import LEVELS, adapters_of, add_lora, base_of, make_base, make_optimizer, train  # noqa: E402


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_adapters_train_and_the_base_stays(level, tmp_path):
    plain = add_lora(make_base())
    amp.initialize(plain, optimizer := make_optimizer(plain), opt_level="O0", verbosity=0)
    expected = train(plain, optimizer)
    amp.reset()
    model = add_lora(make_base())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = amp.initialize(model, make_optimizer(model), opt_level=level, verbosity=0, **LEVELS[level])
    low = {name: value.clone() for name, value in base_of(model).items()}
    losses = train(model, optimizer)
    assert losses == pytest.approx(expected, rel=0.01) and losses[-1] < losses[0] - 0.05
    assert all(torch.equal(value, low[name]) for name, value in base_of(model).items())
    if level in ("O1", "O4"):
        assert all(torch.equal(value, before[name]) for name, value in base_of(model).items())
    assert not any(torch.equal(value, before[name]) for name, value in adapters_of(model).items())

    model.save_pretrained(tmp_path)
    saved = peft.get_peft_model_state_dict(model)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    amp.reset()
    again = peft.PeftModel.from_pretrained(make_base(), tmp_path, is_trainable=True)
    loaded = peft.get_peft_model_state_dict(again)
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    amp.initialize(again, optimizer := make_optimizer(again), opt_level=level, verbosity=0, **LEVELS[level])
    assert train(again, optimizer, 1)[0] < losses[-1]
