"""timm's training parts work unmodified: its `ApexScaler` with the stand-in for apex, and its models under amp_patch.

Guards: apex/amp/*.
"""

import pytest
import torch
import torch.nn.functional as F

import amp_patch

timm = pytest.importorskip("timm", reason="needs timm: make test-clients")

from apex import amp  # noqa: E402 - the stand-in, from conftest.py
from timm.models import resume_checkpoint  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.utils import ApexScaler, CheckpointSaver, ModelEmaV3  # noqa: E402

MODELS = {
    "resnet18": {"channels": (8, 16, 16, 32)},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48},
}
NEAR = {"resnet18": 0.15, "vit_tiny_patch16_224": 0.01}
"""How near losses stay to those in float32: the last stage of the resnet has images of one pixel, and its batch norms
of four values turn a rounding into a tenth of the gradient, under torch.autocast as here.
"""
CLIPPING = {"norm": 0.5, "value": 0.01, "agc": 0.1}
SCALE = 2.0**8
"""At which nothing overflows, so that all levels take the same steps."""


def make(name, seed=0):
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=3, **MODELS[name])
    return model, create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9, weight_decay=0.01)


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    images, targets = torch.randn(4, 3, 32, 32, generator=generator), torch.randint(3, (4,), generator=generator)
    return images + targets.float().reshape(4, 1, 1, 1), targets


def loss_of(model, seed):
    images, targets = make_batch(seed)
    return F.cross_entropy(model(images), targets)


class PlainScaler:
    """What `ApexScaler` does, without amp."""

    def __call__(self, loss, optimizer, clip_grad=None, clip_mode="norm", need_update=True):
        loss.backward()
        if need_update:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            timm.utils.dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
            optimizer.step()


def train(model, optimizer, scaler, steps, clip_mode, ema=None):
    """As timm's train.py: two micro-batches for each step, clipped."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for part in (0, 1):
            loss = loss_of(model, part) / 2
            scaler(loss, optimizer, clip_grad=CLIPPING[clip_mode], clip_mode=clip_mode, need_update=part)
            losses.append(loss.item())
        if ema is not None:
            ema.update(model, step=step)
    return losses


def weights_of(model):
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("level", "clip_mode"), [("O0", "norm"), ("O1", "norm"), ("O2", "norm"), ("O1", "value"), ("O2", "agc")]
)
@pytest.mark.parametrize("name", MODELS)
def test_apex_scaler_clips_saves_and_resumes(name, level, clip_mode, tmp_path):
    def start(seed=0):
        model, optimizer = amp.initialize(*make(name, seed), opt_level=level, loss_scale=SCALE, verbosity=0)
        ema = ModelEmaV3(model, decay=0.5, foreach=False)
        return model, optimizer, ApexScaler(), ema

    model, optimizer = make(name)
    expected = train(model, optimizer, PlainScaler(), range(6), clip_mode)

    model, optimizer, scaler, ema = start()
    losses = train(model, optimizer, scaler, range(3), clip_mode, ema)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, amp_scaler=scaler, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    losses += train(model, optimizer, scaler, range(3, 6), clip_mode, ema)
    final, averages, state = weights_of(model), weights_of(ema), amp.state_dict()
    assert losses == (expected if level == "O0" else pytest.approx(expected, abs=NEAR[name]))
    assert losses[-1] < losses[0]

    amp_patch.reset()
    model, optimizer, scaler, ema = start(seed=1)
    assert resume_checkpoint(model, str(tmp_path / "last.pth.tar"), optimizer, scaler) == 1
    timm.models.load_checkpoint(ema.module, str(tmp_path / "last.pth.tar"), use_ema=True)
    again = train(model, optimizer, scaler, range(3, 6), clip_mode, ema)
    assert again == losses[6:] and amp.state_dict() == state
    assert all(map(torch.equal, weights_of(model), final)) and all(map(torch.equal, weights_of(ema), averages))


@pytest.mark.parametrize(("level", "low"), [("O1", torch.float16), ("O4", torch.bfloat16)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autocast(name, level, low):
    model, _ = make(name)
    with torch.autocast("cpu", low):
        loss = loss_of(model, 0)
    (loss * SCALE).backward()
    expected = [parameter.grad / SCALE for parameter in model.parameters()]
    model, optimizer = make(name)
    amp_patch.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, compute="native", verbosity=0)
    with amp_patch.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", MODELS)
def test_models_learn_as_in_float32(name, level):
    def run(level):
        model, optimizer = make(name)
        options = {"loss_scale": SCALE} if level in ("O1", "O2") else {}
        model, optimizer = amp_patch.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            with amp_patch.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(loss.item())
        amp_patch.reset()
        return losses

    low, plain = run(level), run("O0")
    assert low != plain and low[-1] < low[0]
    assert low == pytest.approx(plain, abs=NEAR[name])
