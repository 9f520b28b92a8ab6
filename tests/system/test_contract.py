"""Gradient penalties, clipping, and modules that run with weights of another module do under amp what they do without
it.

Guards: training/gradient_patches, training/unscaling, casting/weight_cache, api, apex/contrib/clip_grad.
"""

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


# ---- gradient penalty ------------------------------------------------------------------------------------------------


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
    assert amp.unscale(torch.tensor(8.0, dtype=torch.float16)).dtype is torch.float16
    assert amp.scale(torch.tensor(1j)).item() == 8j
    with pytest.raises(IndexError, match="loss_id 3"):
        amp.scale(torch.ones(1), loss_id=3)


# ---- clipping --------------------------------------------------------------------------------------------------------


def clip_by_keyword(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters=parameters, max_norm=0.5)


def clip_as_apex(parameters):
    return clip_grad_norm_(parameters, 0.5)


def clip_values(parameters):
    return torch.nn.utils.clip_grad_value_(parameters, 1e-3)


@pytest.mark.parametrize(
    ("clip", "level", "has_block"),
    [(clip_by_keyword, "O5", False), (clip_as_apex, "O2", True), (clip_values, "O2", True)],
)
def test_clipping_the_models_parameters_clips_what_the_optimizer_steps_on(clip, level, has_block):
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
        norms.append(clip(choose(model, optimizer)))
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
