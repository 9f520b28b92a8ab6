"""A function that the user decorates, registers or lists runs in one dtype throughout, as under
`torch.amp.custom_fwd(cast_inputs=...)`.

Guards: functions, casting/op_patches, casting/replacement, session/torch_patches.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp

LOW, FLOAT = torch.bfloat16, torch.float32
Q, K = torch.randn(5, 6), torch.randn(6, 5)


def scores(query, key):
    """A listed product, a listed float32 op, and an op on no list."""
    product = query @ key
    return product, torch.softmax(product, -1), product.relu()


def dtypes(results):
    return [result.dtype for result in results]


DECORATORS = {"half": (amp.half_function, LOW), "float": (amp.float_function, FLOAT)}
each_decorator = pytest.mark.parametrize(("decorate", "dtype"), DECORATORS.values(), ids=list(DECORATORS))


@each_decorator
@pytest.mark.parametrize("compute", ["native", "float32"])
def test_the_body_of_a_decorated_function_runs_in_its_dtype(decorate, dtype, compute):
    with amp.session("O4", device="cpu", compute=compute):
        for given in (LOW, FLOAT):
            assert dtypes(decorate(scores)(Q.to(given), K)) == [dtype] * 3
            assert dtypes(scores(Q.to(given), K)) == [LOW, FLOAT, LOW]  # and what comes after it by the lists
    assert dtypes(decorate(scores)(Q.to(LOW), K.to(LOW))) == [LOW] * 3


def test_a_float_function_gives_what_custom_fwd_gives():
    class Attend(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, query, key):
            return scores(query, key)[1]

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError

    with torch.autocast("cpu"):
        expected = Attend.apply(Q.to(LOW), K)
    with amp.session("O4", device="cpu"):
        result = amp.float_function(scores)(Q.to(LOW), K)[1]
    assert result.dtype is expected.dtype is FLOAT and torch.equal(result, expected)


def make_function(cast_inputs, seen):
    """A product of the user's own, whose dtypes go into `seen`."""

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            result = x @ weight
            seen.append((x.dtype, weight.dtype, result.dtype))
            return result

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            result = gradient @ weight.T
            seen.append((gradient.dtype, result.dtype))
            return result, x.T @ gradient

    return Product


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "within"])
@pytest.mark.parametrize("cast_inputs", [FLOAT, torch.float16, LOW, None], ids=str)
def test_custom_fwd_does_under_amp_what_it_does_under_autocast(cast_inputs, is_late):
    seen, found = [], []
    early = make_function(cast_inputs, seen)
    before = dict(vars(early))
    for region in (torch.autocast("cpu"), amp.session("O4", device="cpu", compute="native")):
        leaves = [tensor.clone().requires_grad_() for tensor in (Q, K)]
        with region:
            function = make_function(cast_inputs, seen) if is_late else early
            result = function.apply(leaves[0].to(LOW), leaves[1])
            result.float().square().sum().backward()
        found.append([result.detach(), *[leaf.grad for leaf in leaves], list(seen)])
        seen.clear()
    (*expected, expected_dtypes), (*results, result_dtypes) = found
    assert all(map(torch.equal, results, expected)) and results[0].dtype is expected[0].dtype
    assert result_dtypes == expected_dtypes
    assert dict(vars(early)) == before


def test_custom_fwd_casts_nothing_where_casts_are_off():
    seen = []
    function = make_function(FLOAT, seen)
    with amp.session("O4", device="cpu"), amp.disable_casts():
        function.apply(Q.to(LOW), K.to(LOW))
    function.apply(Q.to(LOW), K.to(LOW))
    assert seen == [(LOW, LOW, LOW)] * 2


def test_a_function_from_an_earlier_session_casts_in_the_next():
    seen = []
    with amp.session("O4", device="cpu"):
        function = make_function(FLOAT, seen)
    with amp.session("O4", device="cpu"):
        function.apply(Q.to(LOW), K.to(LOW))
    assert seen == [(FLOAT, FLOAT, FLOAT)]


@pytest.mark.parametrize("how", ["registered", "listed"])
def test_a_function_of_another_module_runs_its_body_in_float32(how, tmp_path, monkeypatch):
    library = types.ModuleType("body_library")
    library.scores = scores
    monkeypatch.setitem(sys.modules, "body_library", library)
    path = tmp_path / "mine.yaml"
    path.write_text("extends: bfloat16\nblacklist: [body_library.scores]\n")
    if how == "registered":
        amp.register_float_function(library, "scores")
    with amp.session("O4", device="cpu", lists=path if how == "listed" else "bfloat16"):
        assert dtypes(library.scores(Q, K.to(LOW))) == [FLOAT] * 3


def test_the_innermost_function_decides():
    inner_float, inner_low = amp.float_function(scores), amp.half_function(scores)
    low = amp.half_function(lambda query, key: [inner_float(query, key)[0], query @ key])
    wide = amp.float_function(lambda query, key: [inner_low(query, key)[0], query @ key])
    with amp.session("O4", device="cpu"):
        assert dtypes(low(Q, K)) == [FLOAT, LOW]
        assert dtypes(wide(Q, K)) == [LOW, FLOAT]
        with amp.disable_casts():
            assert dtypes(low(Q, K)) == [FLOAT, FLOAT]


def test_a_call_that_names_a_dtype_or_a_result_runs_as_it_was_written():
    @amp.float_function
    def total(x, dtype=None, out=None):
        return (x @ K).dtype

    with amp.session("O4", device="cpu"):
        assert total(Q) is FLOAT
        assert total(Q, dtype=torch.float64) is total(Q, torch.float64) is total(Q, out=Q) is LOW


def test_compiled_code_runs_the_body_alike():
    decorated = amp.float_function(lambda query, key: torch.softmax(query @ key, -1) @ query)

    def run(query, key):
        return decorated(query, key), query @ key

    with amp.session("O4", device="cpu"):
        expected = run(Q, K)
        results = torch.compile(run, backend="aot_eager")(Q, K)
    assert dtypes(results) == dtypes(expected) == [FLOAT, LOW]
    assert all(map(torch.equal, results, expected))


def test_gradients_pass_through_a_region():
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    amp.float_function(F.linear)  # of torch: an op like any other
    loss = amp.float_function(lambda x: model(x).square().mean())(Q)
    assert loss.dtype is FLOAT
    loss.backward()
    (expected,) = torch.autograd.grad(amp_free(model, Q), model.weight)
    assert torch.equal(model.weight.grad, expected)


def amp_free(model, x):
    with amp.disable_casts():
        return model(x).square().mean()


@pytest.mark.parametrize("is_late", [False, True])
def test_custom_fwd_on_the_forward_of_a_module_casts_as_under_autocast(is_late):
    def make():
        class Body(torch.nn.Module):
            @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
            def forward(self, x):
                return x @ x.t()

        return Body()

    early = make()
    model = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = early(x)
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O4", verbosity=0)
    result = (make() if is_late else early)(x)
    assert result.dtype is expected.dtype is torch.float32
    assert torch.equal(result, expected)
