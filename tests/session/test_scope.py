"""`scope` is `initialize` for the length of a block.

Guards: session/current, api.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from torch_state import find_changes
from training import take_step

import amp_patch as amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def make():
    model = make_model(0)
    return model, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def step(model, optimizer, images, targets):
    take_step(F.cross_entropy(model(images), targets), optimizer)


def describe(model, optimizer):
    return (
        [(id(p), p.dtype) for p in (*model.parameters(), *model.buffers())],
        [(name, len(hooks)) for name, hooks in sorted(vars(model).items()) if name.endswith("_hooks")],
        sorted(vars(optimizer)),
        [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        {id(p): {name: value.dtype for name, value in state.items()} for p, state in optimizer.state.items()},
    )


@pytest.mark.parametrize(
    ("level", "error"),
    [("O1", None), ("O1", KeyboardInterrupt), ("O2", None), ("O2", ValueError), ("O3", None)],
    ids=str,
)
def test_a_scope_undoes_itself_and_keeps_what_was_trained(level, error):
    model, optimizer = make()
    for batch in make_batches(2):  # has states
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    before, batches = describe(model, optimizer), make_batches(4)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    twin, twin_optimizer = amp.initialize(twin, twin_optimizer, opt_level=level, verbosity=0)
    for batch in batches:
        step(twin, twin_optimizer, *batch)
    amp.reset()
    try:
        with amp.scope(model, optimizer, opt_level=level, verbosity=0) as (inner, inner_optimizer):
            assert inner is model and inner_optimizer is optimizer and amp.stats().opt_level == level
            for batch in batches:
                step(model, optimizer, *batch)
            if error is not None:
                raise error
    except BaseException as raised:
        assert type(raised) is error
    assert find_changes() == [] and describe(model, optimizer) == before and amp.stats().opt_level is None
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(optimizer.state.values(), twin_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("dtype", "end"), [(torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, amp.reset)])
def test_models_that_came_in_16_bits_go_so_after_o3(dtype, end):
    model = nn.Linear(4, 4).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    with amp.scope(model, optimizer, opt_level="O3", verbosity=0):
        assert model.weight.dtype is torch.float16 and optimizer.state[model.weight]["exp_avg"].dtype is torch.float16
        model(torch.ones(1, 4)).sum().backward()
        if end is not None:
            end()
    assert model.weight.dtype is dtype is model.weight.grad.dtype
    assert optimizer.state[model.weight]["exp_avg"].dtype is dtype


def test_scopes_follow_one_another_on_the_same_objects_and_decorate():
    model, optimizer = make()
    for level in (*LEVELS, "O1"):
        with amp.scope(model, optimizer, opt_level=level, verbosity=0):
            step(model, optimizer, *make_batches(1)[0])
        assert find_changes() == []

    @amp.scope(model, optimizer, opt_level="O4", verbosity=0)
    def train():
        assert amp.is_patched(torch, "matmul")
        step(model, optimizer, *make_batches(1)[0])

    train()
    train()
    assert find_changes() == []


def test_scopes_do_not_nest_and_leave_what_is_in_force_alone():
    model, optimizer = make()
    with amp.scope(model, optimizer, opt_level="O1", verbosity=0):
        with (
            pytest.raises(amp.SessionError, match="O1 is in force already.*leave the block"),
            amp.scope(model, optimizer, opt_level="O1", verbosity=0),
        ):
            pytest.fail("nested")
        assert amp.is_patched(torch, "matmul")
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)  # a cell run again
    assert find_changes() == []
    other = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
    with pytest.raises(amp.SessionError, match="O4 is in force already"), amp.scope(model, opt_level="O1"):
        pytest.fail("beside another session")
    assert amp.stats().opt_level == "O4" and other.weight.dtype is torch.float32


def test_a_session_that_took_over_inside_of_a_scope_stays():
    model, optimizer = make()
    with amp.scope(model, optimizer, opt_level="O1", verbosity=0):
        amp.reset()
        other = amp.initialize(nn.Linear(2, 2), opt_level="O5", verbosity=0)
    assert amp.stats().opt_level == "O5" and other.weight.dtype is torch.bfloat16


def test_amp_is_not_disabled_inside_a_session_block():
    with amp.session("O4", device="cpu"), pytest.raises(amp.SessionError, match="leave the block of its session"):
        amp.initialize(make_model(), enabled=False)


def test_a_disabled_scope_does_nothing_and_ends():
    model, optimizer = make()
    before = describe(model, optimizer)
    loss = torch.ones((), requires_grad=True)
    optimizers = iter([optimizer])
    with amp.scope(model, optimizers, enabled=False, opt_level="O1"), amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert describe(model, optimizer) == before
    with pytest.raises(amp.SessionError, match="has not been called yet"):
        amp.state_dict()
