"""Each function of `amp_C`, with `multi_tensor_applier`, computes the same as the formula written for one tensor.

Guards: apex/amp_C, apex/updates, apex/multi_tensor_apply/*.
"""

import pytest
import torch

from amp_patch.apex import amp_C, updates
from amp_patch.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from amp_patch.apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

LOW = torch.bfloat16


def make(count=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 2), (4,), (), (2, 1, 2)][:count]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def flag():
    return torch.zeros(1, dtype=torch.int32)


def apply(op, *args, noop=None):
    return multi_tensor_applier(op, flag() if noop is None else noop, *args)


def clone(tensors):
    return [tensor.clone() for tensor in tensors]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_applier_is_available_and_passes_everything_on():
    assert (
        MultiTensorApply.available and multi_tensor_applier.available and multi_tensor_applier.chunk_size == 2048 * 32
    )
    assert MultiTensorApply(7)(lambda *args: args, "flag", [[]], 1, 2) == (7, "flag", [[]], 1, 2)


def test_scale_of_tensors_of_several_dtypes_and_of_none():
    inputs = [*make(2), *make(2, LOW), *make(1, torch.float64)]
    before, noop = clone(inputs), flag()
    for dtype in (torch.float32, LOW, torch.float64):
        outputs = [torch.zeros_like(x, dtype=dtype) for x in inputs]
        apply(amp_C.multi_tensor_scale, [inputs, outputs], 0.3, noop=noop)
        assert_equal(outputs, [(0.3 * x.to(updates.full_dtype(x))).to(dtype) for x in inputs])
    assert noop.item() == 0 and all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    apply(amp_C.multi_tensor_scale, [inputs, inputs], 2.0)  # in place
    assert_equal(inputs, [2 * x for x in before])
    apply(amp_C.multi_tensor_scale, [[], []], 3.0)


@pytest.mark.parametrize("which", [-1, 0, 1])
def test_axpby(which):
    xs, ys = make(dtype=LOW), make(seed=1)
    outputs = [torch.zeros_like(x, dtype=torch.float32) for x in xs]
    apply(amp_C.multi_tensor_axpby, [xs, ys, outputs], 2.0, -0.5, which)
    assert_equal(outputs, [2 * x.float() - y / 2 for x, y in zip(xs, ys, strict=True)])
    for bad, checked_by in ((xs, (-1, 0)), (ys, (-1, 1))):
        noop, value = flag(), bad[1].clone()
        bad[1][0] = float("nan")
        apply(amp_C.multi_tensor_axpby, [xs, ys, outputs], 2.0, -0.5, which, noop=noop)
        assert noop.item() == (which in checked_by)
        bad[1].copy_(value)


@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
@pytest.mark.parametrize(
    "call",
    [
        lambda xs, noop: apply(amp_C.multi_tensor_scale, [xs, clone(xs)], 1.0, noop=noop),
        lambda xs, noop: apply(amp_C.multi_tensor_l2norm, [xs], True, noop=noop),
    ],
    ids=["scale", "l2norm"],
)
def test_the_flag_goes_up_and_stays_up(call, bad):
    xs, noop = make(dtype=torch.float16), flag()
    call(xs, noop)
    assert noop.tolist() == [0]
    spoilt = clone(xs)
    spoilt[1][2] = bad
    call(spoilt, noop)
    assert noop.tolist() == [1]
    call(xs, noop)
    assert noop.tolist() == [1]


def test_l2norm():
    xs = [x * 300 for x in make(dtype=torch.float16)]  # squares that float16 cannot hold
    total, each = apply(amp_C.multi_tensor_l2norm, [xs], True)
    expected = torch.stack([x.double().norm() for x in xs])
    assert total.shape == (1,) and each.shape == (4,) and total.dtype is each.dtype is torch.float32
    torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(total.double(), expected.norm().reshape(1), rtol=1e-5, atol=0)
    for per_tensor in ((), (False,), (None,)):
        assert apply(amp_C.multi_tensor_l2norm, [xs], *per_tensor)[1].shape == (0,)
    assert [tensor.tolist() for tensor in apply(amp_C.multi_tensor_l2norm, [[]], True)] == [[0.0], []]


ADAM = (0.01, 0.8, 0.9, 1e-3)  # lr, beta1, beta2, eps


def step_of(cls, **options):
    """The values of parameters and state after each of two steps of an optimizer."""
    params = [torch.nn.Parameter(p) for p in make()]
    optimizer = cls(params, **options)
    for seed in (1, 2):
        for p, g in zip(params, make(seed=seed), strict=True):
            p.grad = g
        optimizer.step()
    return [[p.detach() for p in params], *zip(*(tuple(optimizer.state[p].values()) for p in params), strict=True)]


@pytest.mark.parametrize(("mode", "decay"), [(0, 0.1), (1, 0.1)])
def test_adam(mode, decay):
    lists = [make(), [torch.zeros_like(p) for p in make()], [torch.zeros_like(p) for p in make()]]
    for step in (1, 2):
        apply(amp_C.multi_tensor_adam, [make(seed=step), *lists], *ADAM, step, mode, 1, decay)
    expected = step_of(FusedAdam, lr=0.01, betas=(0.8, 0.9), eps=1e-3, adam_w_mode=bool(mode), weight_decay=decay)
    for found, values in zip(lists, expected, strict=True):
        assert_equal(found, values)


@pytest.mark.parametrize(("mode", "nvlamb"), [(0, ()), (1, (None,)), (1, (True,))])
def test_lamb(mode, nvlamb):
    lists = [make(), [torch.zeros_like(p) for p in make()], [torch.zeros_like(p) for p in make()]]
    for step in (1, 2):
        gradients = make(seed=step)
        norm = apply(amp_C.multi_tensor_l2norm, [gradients])[0]
        apply(amp_C.multi_tensor_lamb, [gradients, *lists], *ADAM, step, 1, 0.0, 1, mode, norm, 0.5, *nvlamb)
        assert all(torch.equal(a, b) for a, b in zip(gradients, make(seed=step), strict=True))
    options = {"adam_w_mode": bool(mode), "use_nvlamb": nvlamb == (True,), "weight_decay": 0.0, "max_grad_norm": 0.5}
    expected = step_of(FusedLAMB, lr=0.01, betas=(0.8, 0.9), eps=1e-3, **options)
    for found, values in zip(lists, expected, strict=True):
        assert_equal(found, values)


@pytest.mark.parametrize(("decay", "nvlamb"), [(0.1, False), (0.0, False), (0.0, True)])
def test_the_two_stages_of_lamb_are_lamb(decay, nvlamb):
    """As BERT's optimizer runs them: the update, its norms, and the step."""
    lists = [make(), [torch.zeros_like(p) for p in make()], [torch.zeros_like(p) for p in make()]]
    together = [clone(tensors) for tensors in lists]
    for step in (0, 1):
        gradients, directions = make(seed=step + 1, dtype=LOW), make(seed=9)
        norm = apply(amp_C.multi_tensor_l2norm, [gradients])[0]
        decays = torch.full((len(gradients),), decay)
        stage1 = [gradients, *lists, directions]
        apply(amp_C.multi_tensor_lamb_stage1_cuda, stage1, decays, step, *ADAM[1:], norm, 0.5)
        own = apply(amp_C.multi_tensor_l2norm, [lists[0]], True)[1]
        other = apply(amp_C.multi_tensor_l2norm, [directions], True)[1]
        apply(amp_C.multi_tensor_lamb_stage2_cuda, [lists[0], directions], own, other, ADAM[0], decay, nvlamb)
        apply(amp_C.multi_tensor_lamb, [gradients, *together], *ADAM, step + 1, 1, decay, 1, 1, norm, 0.5, nvlamb)
    for found, values in zip(lists, together, strict=True):
        assert_equal(found, values)
    gradients, decays = make(seed=3), torch.tensor([0.0, 0.1, 0.2, 0.3])
    apply(amp_C.multi_tensor_lamb_stage1_cuda, [gradients, *lists, directions], decays, 2, *ADAM[1:], norm, 1e9)
    for p, m, v, update, one in zip(*lists, directions, decays, strict=True):
        direction = m / (1 - 0.8**3) / ((v / (1 - 0.9**3)).sqrt() + 1e-3)
        torch.testing.assert_close(update, direction + one * p)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_divides_by_the_scale_writes_copies_and_obeys_the_flag(nesterov):
    lists = [make(), [torch.full_like(p, 7.0) for p in make()]]
    copies = make(dtype=torch.float16)
    for step in (1, 2):
        gradients = [g * 128 for g in make(seed=step)]
        args = (0.1, 0.9, 0.0, 0.05, nesterov, step == 1, False, 1 / 128)  # wd, momentum, dampening, lr, ...
        apply(amp_C.multi_tensor_sgd, [gradients, *lists, copies], *args)
    expected = step_of(FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    for found, values in zip(lists, expected, strict=True):
        assert_equal(found, values)
    assert all(torch.equal(a, b.half()) for a, b in zip(copies, lists[0], strict=True))
    before = clone(lists[0])
    apply(amp_C.multi_tensor_sgd, [gradients, *lists], *args, noop=torch.ones(1, dtype=torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(before, lists[0], strict=True))
    apply(amp_C.multi_tensor_sgd, [gradients, *lists], 0.0, 0.0, 0.0, 0.5, False, False, False, 1 / 128)
    assert_equal(lists[0], [p - 0.5 * g / 128 for p, g in zip(before, gradients, strict=True)])


def test_sixteen_bit_lists_are_rounded_once():
    gradients, lists = make(dtype=LOW, seed=1), [make(dtype=LOW), make(), make()]
    wide = [[tensor.float().clone() for tensor in tensors] for tensors in lists]
    wide[2] = lists[2] = [tensor.abs() for tensor in lists[2]]
    wide[2] = clone(wide[2])
    apply(amp_C.multi_tensor_adam, [gradients, *lists], *ADAM, 3, 1, 1, 0.1)
    apply(amp_C.multi_tensor_adam, [[g.float() for g in gradients], *wide], *ADAM, 3, 1, 1, 0.1)
    for found, expected in zip(lists, wide, strict=True):
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.float64])
def test_lists_in_float32_and_float64_together(gradient_dtype):
    other_dtype = torch.float32 if gradient_dtype is torch.float64 else torch.float64
    sgd_args = (0.1, 0.9, 0.0, 0.05, True, False, False, 1.0)
    for op, args, count in ((amp_C.multi_tensor_adam, (*ADAM, 3, 1, 1, 0.1), 3), (amp_C.multi_tensor_sgd, sgd_args, 2)):
        lists = [[tensor.abs() for tensor in make(dtype=other_dtype, seed=seed)] for seed in range(count)]
        expected = [[tensor.double() for tensor in tensors] for tensors in lists]
        gradients = make(dtype=gradient_dtype, seed=9)
        apply(op, [gradients, *lists], *args)
        apply(op, [[g.double() for g in gradients], *expected], *args)
        for found, values in zip(lists, expected, strict=True):
            assert_equal(found, [value.to(other_dtype) for value in values])


# ---- update_scale_hysteresis -----------------------------------------------------------------------------------------


def hysteresis_by_hand(state, found_inf, growth, backoff, interval, hysteresis):
    scale, good, left = state
    if found_inf:
        left -= 1
        return (scale, 0, left) if left > 0 else (scale * backoff, 0, left)
    good += 1
    if good == interval:
        scale, good = scale * growth if scale * growth < 3.4e38 else scale, 0
    return scale, good, hysteresis


@pytest.mark.parametrize(("start", "hysteresis", "interval"), [(65536.0, 1, 3), (2.0**126, 3, 1)])
def test_hysteresis_follows_the_rule(start, hysteresis, interval):
    events = torch.rand(200, generator=torch.Generator().manual_seed(hysteresis)) < 0.4
    state = (start, 0, hysteresis)
    tensors = [torch.tensor([start]), torch.zeros(1, dtype=torch.int32), torch.tensor([hysteresis], dtype=torch.int32)]
    for found in events.tolist():
        state = hysteresis_by_hand(state, found, 2.0, 0.5, interval, hysteresis)
        result = amp_C.update_scale_hysteresis(*tensors, torch.tensor([float(found)]), 2.0, 0.5, interval, hysteresis)
        assert result is tensors[0]
        assert tuple(tensor.item() for tensor in tensors) == state


def test_a_scale_below_the_smallest_normal_number_becomes_0():
    """Apex's kernel did not keep such numbers either."""
    tensors = [torch.tensor([2.0**-126]), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)]
    assert amp_C.update_scale_hysteresis(*tensors, torch.ones(1), 2.0, 0.5, 10, 1).item() == 0.0
