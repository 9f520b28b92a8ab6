"""What real training scripts do: GANs, penalties, nested losses, clipping, transforms of modules, Apex's files."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from training import backward, take_step

import amp_patch as amp
from amp_patch.apex.contrib.clip_grad import clip_grad_norm_

LEVELS = ["O1", "O5"]  # casts of calls in float16; casts of the model, with masters, in bfloat16


def weights(*models):
    return [value.clone() for model in models for value in model.state_dict().values()]


def assert_equal(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


# ---- several losses --------------------------------------------------------------------------------------------------


def train_gan(scaled, steps=5, **options):
    """The usual loop: the discriminator on real, on fake, then the generator through the discriminator.

    `scaled` opens the backward passes.
    """
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, eps=1e-4)  # 1e-8 is 0 in float16
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01, eps=1e-4)
    amp.initialize(
        [generator, discriminator], [generator_optimizer, discriminator_optimizer], verbosity=0, num_losses=3, **options
    )
    noise = torch.Generator().manual_seed(1)
    for _ in range(steps):
        discriminator.zero_grad()
        real, z = torch.randn(8, 8, generator=noise), torch.randn(8, 4, generator=noise)
        fake = generator(z)
        with scaled(F.softplus(-discriminator(real)).mean(), discriminator_optimizer, 0) as loss:
            loss.backward()
        with scaled(F.softplus(discriminator(fake.detach())).mean(), discriminator_optimizer, 1) as loss:
            loss.backward()
        discriminator_optimizer.step()
        generator.zero_grad()
        with scaled(F.softplus(-discriminator(fake)).mean(), generator_optimizer, 2) as loss:
            loss.backward()
        generator_optimizer.step()
    result = weights(generator, discriminator)
    amp.reset()
    return result


@pytest.mark.parametrize("level", LEVELS)
def test_a_gan_does_not_depend_on_the_scale(level):
    expected = train_gan(amp.scale_loss, opt_level=level, loss_scale=1.0)
    scaled = train_gan(amp.scale_loss, opt_level=level, loss_scale=256.0)
    if level == "O1":  # without a scale, some gradients of these vanish in float16
        torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-5)
    else:
        assert_equal(scaled, expected)
    # 2**16 is more than float16 can hold
    assert_equal(train_gan(amp.scale_loss, opt_level=level, loss_scale="dynamic", max_loss_scale=1024.0), scaled)


# ---- gradient penalty ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1024.0, "dynamic"], ids=str)
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_gradient_penalty_does_not_depend_on_the_scale(level, scale):
    results = []
    for loss_scale in (1.0, scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options = {"loss_scale": loss_scale, "max_loss_scale": 1024.0}  # float16 gradients stay finite
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        for seed in range(3):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            output = model(x).float().sum()
            (gradient,) = amp.unscale(torch.autograd.grad(amp.scale(output), (x,), create_graph=True))
            loss = output + (gradient.norm(dim=1) - 1).pow(2).mean()
            take_step(loss, optimizer)
        results.append(weights(model))
        amp.reset()
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_a_gradient_penalty_recovers_from_an_overflow():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp.initialize(model, optimizer, opt_level="O1", patch_torch_functions_type="float16", verbosity=0)
    skipped = []
    for _ in range(16):
        x = torch.full((2, 3), 8.0, requires_grad=True)
        output = model(x).float().sum() * 10
        (gradient,) = amp.unscale(torch.autograd.grad(amp.scale(output), (x,), create_graph=True))
        take_step(output + gradient.pow(2).sum(), optimizer)
        skipped.append(optimizer.step_was_skipped)
    assert skipped[0] and not skipped[-1] and sorted(skipped, reverse=True) == skipped
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_scale_and_unscale_take_containers_and_none():
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", loss_scale=8.0, verbosity=0)
    assert amp.scale({"a": torch.ones(1)})["a"].item() == 8
    assert amp.unscale((torch.full((1,), 8.0), None)) == (torch.ones(1), None)
    with pytest.raises(IndexError, match="loss_id 3"):
        amp.scale(torch.ones(1), loss_id=3)


# ---- clipping --------------------------------------------------------------------------------------------------------


CLIPS = {
    "norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
    "norm, by keyword": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters=parameters, max_norm=0.5),
    "largest": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=math.inf),
    "value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1e-3),
    "apex": lambda parameters: clip_grad_norm_(parameters, 0.5),
}


@pytest.mark.parametrize(("level", "has_block"), [("O2", True), ("O5", False)])
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_the_models_parameters_clips_what_the_optimizer_steps_on(level, name, has_block):
    norms, gradients = [], []
    for choose in (lambda model, _: model.parameters(), lambda _, optimizer: amp.master_params(optimizer)):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
        images, targets = make_batches(1)[0]
        loss = F.cross_entropy(model(images), targets)
        if has_block:
            backward(loss, optimizer)
        else:
            loss.backward()
            if norms:  # the masters get their gradients at the step, or when somebody clips
                torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        norms.append(CLIPS[name](choose(model, optimizer)))
        gradients.append([master.grad.clone() for master in amp.master_params(optimizer)])
        before = [master.detach().clone() for master in amp.master_params(optimizer)]
        optimizer.step()
        for master, start, gradient in zip(amp.master_params(optimizer), before, gradients[-1], strict=True):
            assert torch.equal(master, torch.add(start, gradient, alpha=-0.1))
        amp.reset()
    assert norms[0] == norms[1] and (norms[0] is None or norms[0] > 0)
    assert all(map(torch.equal, *gradients)) and any(gradient.any() for gradient in gradients[0])


def test_clipping_inside_the_block_is_warned_of():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    images, targets = make_batches(1)[0]
    with amp.scale_loss(F.cross_entropy(model(images), targets), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.warns(UserWarning, match="clip after the block"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


# ---- modules that compute their weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_functional_call_and_replicas_run_the_weights_they_are_given(level):
    model = make_model()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    model.eval()
    images = make_batches(1)[0][0]
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters() if name.startswith("fc")}
    expected = model(images)
    assert torch.count_nonzero(torch.func.functional_call(model, zeros, (images,))) == 0
    replica = model._replicate_for_data_parallel()
    replica._modules = dict(model._modules)
    replica._modules["fc"] = copy.deepcopy(model.fc)
    with torch.no_grad():
        for p in replica._modules["fc"].parameters():
            p.zero_()
        assert torch.count_nonzero(replica(images)) == 0
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_averaged_model_follows_and_swaps(level):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    by_hand = [p.detach().clone() for p in model.parameters()]
    for count, (images, targets) in enumerate(make_batches(4)):
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
        average.update_parameters(model)
        by_hand = [
            p.detach().clone() if count == 0 else torch.lerp(a, p.detach(), 0.5)
            for a, p in zip(by_hand, model.parameters(), strict=True)
        ]
        for mean, expected in zip(average.module.parameters(), by_hand, strict=True):
            torch.testing.assert_close(mean, expected)
    model.eval()
    average.eval()
    own, images = [p.detach().clone() for p in model.parameters()], make_batches(1)[0][0]
    expected = average(images)
    for p, mean in zip(model.parameters(), average.module.parameters(), strict=True):
        p.data.copy_(mean.data)  # an edit that torch does not see
    amp.refresh()
    with torch.no_grad():
        model.bn1.load_state_dict(average.module.bn1.state_dict())
        model.bn2.load_state_dict(average.module.bn2.state_dict())
        assert torch.equal(model(images), expected)
    for p, saved in zip(model.parameters(), own, strict=True):
        p.data.copy_(saved)
    with torch.no_grad():
        assert not torch.equal(model(images), expected)
