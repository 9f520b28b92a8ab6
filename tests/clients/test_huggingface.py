"""`AmpTrainerMixin` trains, saves and resumes under the Trainer of transformers 5, unmodified.

Guards: integrations/huggingface.
"""

import json

import pytest
import torch

import amp_patch as amp

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-clients")

from trainer_samples import Tokens, make_model, train  # noqa: E402

from amp_patch.integrations.huggingface import AmpTrainerMixin  # noqa: E402


class Trainer(AmpTrainerMixin, transformers.Trainer):
    pass


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_it_trains_evaluates_saves_and_resumes(name, level, tmp_path):
    arguments = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    _, plain, plain_logs, _ = train(transformers.Trainer, name, tmp_path / "plain", **arguments)
    options = {"opt_level": level, "amp_options": {"verbosity": 0, "loss_scale": 2.0**8 if level == "O2" else None}}
    weights, loss, logs, kind = train(Trainer, name, tmp_path, trainer_options=options, **arguments)
    assert abs(loss - plain) < 0.03 and {weight.dtype for weight in weights} == {torch.float32}
    for entry, expected in zip(logs, plain_logs, strict=True):
        assert entry["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
        assert entry["learning_rate"] == expected["learning_rate"]
    saved = kind.from_pretrained(tmp_path / "final")
    assert saved.dtype is torch.float32 and all(map(torch.equal, saved.state_dict().values(), weights))
    again, loss_again, *_ = train(
        Trainer, name, tmp_path, tmp_path / "checkpoint-3", trainer_options=options, **arguments
    )
    assert loss_again == loss and all(map(torch.equal, again, weights))


def test_a_dynamic_scale_is_in_the_checkpoint_and_schedules_wait(tmp_path):
    options = {"opt_level": "O2", "amp_options": {"verbosity": 0, "loss_scale": {"init": 2.0**40}}}
    options["amp_options"]["max_loss_scale"] = 2.0**40
    _, _, logs, _ = train(Trainer, "bert", tmp_path, trainer_options=options)
    state = torch.load(tmp_path / "checkpoint-3" / "amp.pt", weights_only=True)
    assert state["loss_scaler0"] == {"loss_scale": 2.0**37, "unskipped": 0}
    assert len({entry["learning_rate"] for entry in logs[:3]}) == 1


def test_precision_is_said_once(tmp_path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to=[])
    with pytest.raises(amp.ArgumentTypeError, match="leave fp16 and bf16 out"):
        Trainer(model=make_model("bert"), args=arguments, train_dataset=Tokens("bert"), opt_level="O4")


def test_the_config_says_the_dtype_of_the_file(tmp_path):
    train(Trainer, "bert", tmp_path, trainer_options={"opt_level": "O5", "amp_options": {"verbosity": 0}})
    assert json.loads((tmp_path / "final" / "config.json").read_text())["dtype"] == "float32"
