"""The lists `autocast-cuda` and `autocast-cpu` do what torch.autocast does, and the list `apex` does what Apex is known
to have done.

Autocast on the CPU runs as it is. Autocast on CUDA runs on CPU tensors through `emulated_autocast`, which puts CUDA's
rules into the dispatcher. The dtypes in torch's own test tables for CUDA are a second witness.

Guards: casting/wrappers, config/op_namespaces, lists/apex.yaml, lists/autocast-cpu.yaml, lists/autocast-cuda.yaml.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_autocast import emulated_autocast
from hand_casts import each, is_same, lows, tensors_of
from torch import Tensor, nn
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.testing._internal.common_methods_invocations import op_db
from torch_state import VERSION

import amp_patch
from amp_patch.config.op_lists import Spelling, load_oplists
from amp_patch.errors import BannedOpError

Op = Callable[..., Any]
devices = pytest.mark.parametrize("device_type", ["cpu", "cuda"])


def open_session(lists: str, low: torch.dtype) -> None:
    """Products by kernels of the low dtype: results are compared bitwise."""
    options = {"lists": lists, "patch_torch_functions_type": low, "compute": "native"}
    amp_patch.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0, **options)


def cast(value: Any, dtype: torch.dtype) -> Any:
    return each(value, lambda tensor: tensor.to(dtype))


# ---- torch's own tables ----------------------------------------------------------------------------------------------


NO_CPU_KERNEL = {"cudnn_convolution": "cuDNN's own kernel", "cudnn_convolution_transpose": "cuDNN's own kernel"}
NOT_IN_PYTHON = {"reflection_pad1d": "reached by F.pad alone, which has no one rule"}
PYTHON_NAMES = {"nll_loss2d": "nll_loss", "linalg_vecdot": "vecdot", "linalg_multi_dot": "multi_dot"}
# Attribute of the tables: the owners of its ops, and the dtype that autocast runs them in; None is the low one.
ATTRIBUTES: dict[str, tuple[tuple[Any, ...], torch.dtype | None]] = {
    "torch_fp16": ((torch, torch.Tensor), None),
    "torch_16": ((torch, torch.Tensor), None),
    "nn_fp16": ((F,), None),
    "nn_16": ((F,), None),
    "linalg_fp16": ((torch.linalg,), None),
    "methods_fp16": ((torch.Tensor,), None),
    "torch_fp32": ((torch, torch.Tensor), torch.float32),
    "nn_fp32": ((F,), torch.float32),
    "methods_fp32": ((torch.Tensor,), torch.float32),
    "torch_need_autocast_promote": ((torch, torch.Tensor), torch.float32),
    "torch_expect_builtin_promote": ((torch, torch.Tensor), torch.float32),
    "methods_expect_builtin_promote": ((torch.Tensor,), torch.float32),
}
TABLES = {"cuda": AutocastTestLists, "cpu": AutocastCPUTestLists}


@dataclass(frozen=True)
class Row:
    """One spelling of one row: where its op is found, the arguments, and the dtype of the result where the table says
    another than the common one.
    """

    owner: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result_dtype: torch.dtype | None

    def __call__(self, args: Any = None, kwargs: Any = None) -> Any:
        return getattr(self.owner, self.name)(
            *(self.args if args is None else args), **(self.kwargs if kwargs is None else kwargs)
        )


def rows(device_type: str, attribute: str, low: torch.dtype) -> Iterator[Row]:
    """The rows of a table, in every spelling that Python has, with CPU tensors that are float32 or low."""
    for name, args, *rest in getattr(TABLES[device_type](torch.device("cpu")), attribute):
        if name in NO_CPU_KERNEL or name in NOT_IN_PYTHON:
            continue
        if name == "einsum":  # the table has its arguments in the wrong places, so that torch's own tests pass it over
            args, rest = ("ij,jk->ik", torch.rand(4, 4), torch.rand(4, 4)), []
        if name == "conv_transpose3d":  # 134 million products, which take float16 half a minute on a CPU
            args = tuple(tensor[:2, :2, :3, :3, :3] for tensor in args)
        args = each(args, lambda tensor: tensor if tensor.dtype is torch.float32 else tensor.to(low))
        kwargs = next((value for value in rest if isinstance(value, dict)), {})
        result_dtype = next((value for value in rest if isinstance(value, torch.dtype)), None)
        name = PYTHON_NAMES.get(name, name)
        owners = [owner for owner in ATTRIBUTES[attribute][0] if hasattr(owner, name)]
        assert owners, name
        yield from (Row(owner, name, args, kwargs, result_dtype) for owner in owners)


@lows
@pytest.mark.parametrize(
    ("device_type", "attribute"),
    [
        (device_type, attribute)
        for device_type in TABLES
        for attribute in ATTRIBUTES
        if hasattr(TABLES[device_type](torch.device("cpu")), attribute)
    ],
)
@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
def test_every_row_of_torch_s_tables_runs_as_autocast_runs_it(
    device_type: str, attribute: str, low: torch.dtype
) -> None:
    dtype = ATTRIBUTES[attribute][1] or low
    calls = list(rows(device_type, attribute, low))
    expected = [call(*cast((call.args, call.kwargs), dtype)) for call in calls]
    open_session(f"autocast-{device_type}", low)
    results = [call() for call in calls]
    amp_patch.reset()
    assert calls
    for call, result, wanted in zip(calls, results, expected, strict=True):
        dtypes = {tensor.dtype for tensor in tensors_of(result)}
        assert dtypes <= {call.result_dtype or dtype}, f"{call.name} gave {dtypes}"  # `equal` gives no tensor at all
        assert is_same(result, wanted), f"{call.name} differs from the cast by hand"


@lows
@devices
def test_binary_cross_entropy_is_refused_on_cuda_and_runs_in_float32_on_the_cpu(
    device_type: str, low: torch.dtype
) -> None:
    probabilities, target = torch.rand(4), torch.rand(4)
    open_session(f"autocast-{device_type}", low)
    if device_type == "cuda":
        with pytest.raises(BannedOpError):
            F.binary_cross_entropy(probabilities.to(low), target)
        result = F.binary_cross_entropy(probabilities, target)  # autocast refuses float32 as well
    else:
        result = F.binary_cross_entropy(probabilities.to(low), target.to(low))
        probabilities, target = probabilities.to(low).float(), target.to(low).float()
    amp_patch.reset()
    assert torch.equal(result, F.binary_cross_entropy(probabilities, target))


# ---- autocast itself, on all of torch --------------------------------------------------------------------------------

# Ops whose result has no fixed value, or that no list can name.
EXCLUDED = {
    **dict.fromkeys(
        ["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"],
        "memory that nobody clears",
    ),
    "linalg.lstsq": "the default driver's result varies from call to call",
    "torch.ops.aten._safe_softmax.default": "not a Python name of torch's",
    "_unsafe_masked_index_put_accumulate": "private",
    "_upsample_bilinear2d_aa": "private",
}
EARLY = "float32 as under autocast, which rounds to the dtype of the arguments on the way there"
PARTS = "autocast casts a product inside"
ARGUMENT = "which rule autocast applies depends on an argument"
# The ops whose result under the list has other bits than under autocast, but its dtype; and those that differ in the
# dtype too.
OTHER_BITS = {
    "cuda": {
        **dict.fromkeys(["mvlgamma", "trapezoid", "trapz", "cumulative_trapezoid"], EARLY),
        **dict.fromkeys(["nn.functional.cross_entropy", "nn.functional.linear_cross_entropy"], EARLY),
        **dict.fromkeys(["nn.functional.pairwise_distance", "nn.functional.triplet_margin_with_distance_loss"], EARLY),
    },
    "cpu": {"nn.functional.bilinear": PARTS},
}
OTHER_DTYPE = {
    "cuda": {
        **dict.fromkeys(
            ["cov", "corrcoef", "linalg.matrix_power", "linalg.pinv", "pinverse", "ldexp", "matrix_exp"], PARTS
        ),
        "nn.functional.interpolate": ARGUMENT,
    },
    "cpu": {
        **dict.fromkeys(["cov", "corrcoef", "linalg.matrix_power", "linalg.pinv"], PARTS),
        **dict.fromkeys(["nn.functional.pad", "einsum", "tensordot"], ARGUMENT),
    },
}
# the lists are of torch 2.13
if VERSION < (2, 7):
    OTHER_DTYPE["cpu"]["inner"] = OTHER_DTYPE["cpu"].pop("tensordot")
    OTHER_DTYPE["cuda"]["nn.functional.rms_norm"] = "autocast leaves it alone"
    OTHER_BITS["cpu"]["nn.functional.fractional_max_pool3d"] = "its samples are drawn in the dtype of the input"
    del OTHER_BITS["cuda"]["nn.functional.linear_cross_entropy"]
if VERSION >= (2, 14):
    OTHER_BITS["cuda"]["linalg.polar"] = PARTS
    OTHER_DTYPE["cpu"]["linalg.polar"] = PARTS


@dataclass(frozen=True)
class Call:
    """One call of an op of torch's database: looked up when it is made, as a user's code looks it up."""

    name: str
    look_up: Callable[[], Op]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_owner(op: Any) -> Callable[[], Op]:
    """Where the op of a database entry lives; an entry that is a function of its own calls what it tests by name."""
    path = op.name.split(".")
    owners = [
        functools.reduce(lambda owner, part: getattr(owner, part, None), path[:-1], torch),
        F,
        torch.special,
        torch.linalg,
        torch.fft,
    ]
    for owner in owners:
        if owner is not None and getattr(owner, path[-1], None) is op.op:
            return lambda: getattr(owner, path[-1])
    return lambda: op.op


@functools.cache
def database(low: torch.dtype) -> tuple[Call, ...]:
    """Two small samples of each op of torch's database, as function and as method, in float32, in low, and with every
    other tensor in low.
    """
    calls = []
    for op in op_db:
        if op.name in EXCLUDED or torch.float32 not in op.dtypes:
            continue
        # not op.sample_inputs, which walks the stack of the caller for each op
        samples = list(
            zip(range(2), op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=False), strict=False)
        )
        methods = (
            [lambda name=op.name: getattr(torch.Tensor, name)]
            if op.method_variant is not None and hasattr(torch.Tensor, op.name)
            else []
        )
        for _, sample in samples:
            values = ((sample.input, *sample.args), sample.kwargs)
            if sum(tensor.numel() for tensor in tensors_of(values[0])) > 5000:
                continue
            count = iter(range(1000))
            given = {
                "float32": each(values, lambda tensor: tensor.detach()),
                "low": each(values, lambda tensor: tensor.detach().to(low)),
                "mixed": each(
                    values,
                    lambda tensor, count=count: tensor.detach().to(low if next(count) % 2 == 0 else tensor.dtype),
                ),
            }
            calls += [
                Call(op.name, look_up, *arguments)
                for arguments in given.values()
                for look_up in (find_owner(op), *methods)
            ]
    return tuple(calls)


def outcome(call: Call) -> Any:
    """The tensors that a call returns, or its error."""
    torch.random.default_generator.manual_seed(0)
    try:
        return list(tensors_of(call.look_up()(*each(call.args, torch.clone), **each(call.kwargs, torch.clone))))
    except Exception as error:
        return error


def dtypes_of(result: Any) -> Any:
    return result if isinstance(result, Exception) else [tensor.dtype for tensor in result]


@pytest.mark.filterwarnings("ignore")
@lows
@devices
def test_autocast_and_its_list_give_the_same_results_on_all_of_torch(device_type: str, low: torch.dtype) -> None:
    calls = database(low)
    with (
        emulated_autocast("cuda") if device_type == "cuda" else contextlib.nullcontext(),
        torch.autocast("cpu", dtype=low),
    ):
        expected = [outcome(call) for call in calls]
    open_session(f"autocast-{device_type}", low)
    results = [outcome(call) for call in calls]
    amp_patch.reset()
    # Where autocast fails, a list may succeed.
    pairs = [
        (call, result, wanted)
        for call, result, wanted in zip(calls, results, expected, strict=True)
        if not isinstance(wanted, Exception)
    ]
    other_dtype = {call.name for call, result, wanted in pairs if dtypes_of(result) != dtypes_of(wanted)}
    other_bits = {call.name for call, result, wanted in pairs if not is_same(result, wanted)} - other_dtype
    assert len(pairs) > 3000
    assert other_dtype == set(OTHER_DTYPE[device_type])
    assert other_bits == set(OTHER_BITS[device_type])


@pytest.mark.filterwarnings("ignore")
def test_emulated_autocast_of_the_cpu_is_the_cpu_s_own() -> None:
    calls = database(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = [outcome(call) for call in calls]
        with emulated_autocast("cpu"):
            results = [outcome(call) for call in calls]
    pairs = list(zip(calls, results, expected, strict=True))
    assert {
        call.name
        for call, result, wanted in pairs
        if isinstance(result, Exception) is not isinstance(wanted, Exception)
    } == set()
    assert {
        call.name for call, result, wanted in pairs if not isinstance(wanted, Exception) and not is_same(result, wanted)
    } == set()


# ---- autocast itself, on layers --------------------------------------------------------------------------------------

SEQUENCE = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


class SelfAttention(nn.MultiheadAttention):
    def forward(self, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(value, value, value)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 4, 3),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
        nn.LayerNorm(3),
        nn.Softmax(-1),
    )


# Layer: how to make it, its input, and the (device, mode, dtype of the input) in which a list cannot say what autocast
# does.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor, set[tuple[str, str, str]]]] = {
    "convolutions": (convolutions, SEQUENCE, set()),
    "PReLU": (nn.PReLU, SEQUENCE, set()),
    "SelfAttention": (lambda: SelfAttention(8, 2, batch_first=True), SEQUENCE, set()),
    "RNN": (lambda: nn.RNN(8, 4), SEQUENCE, set()),
    "RNNCell": (lambda: nn.RNNCell(8, 4), SEQUENCE[0], set()),
    # float32 input: autocast on the CPU keeps the state in float32. On CUDA these are cuDNN's, or one op each, and low.
    "LSTMCell": (lambda: nn.LSTMCell(8, 4), SEQUENCE[0], {("cpu", mode, "float32") for mode in ("train", "no_grad")}),
    "GRUCell": (lambda: nn.GRUCell(8, 4), SEQUENCE[0], {("cpu", mode, "float32") for mode in ("train", "no_grad")}),
    "GRU": (
        lambda: nn.GRU(8, 4),
        SEQUENCE,
        {(device, mode, "float32") for device in ("cpu", "cuda") for mode in ("train", "no_grad")},
    ),
    # The fused path computes in one dtype throughout; autocast on the CPU casts inside it, and on CUDA it is not taken.
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        SEQUENCE,
        {("cpu", "no_grad", "float32"), ("cuda", "no_grad", "float32"), ("cuda", "no_grad", "low")},
    ),
}


@pytest.mark.filterwarnings("ignore")
@devices
@pytest.mark.parametrize("name", LAYERS)
def test_autocast_and_its_list_give_the_same_results_on_layers(name: str, device_type: str) -> None:
    make, value, excepted = LAYERS[name]
    torch.manual_seed(0)
    module = make()
    low = torch.bfloat16
    cases = [(mode, given) for mode in ("train", "no_grad") for given in ("float32", "low")]

    def run(mode: str, given: str) -> Tensor:
        own = copy.deepcopy(module).train(mode == "train")  # running statistics change
        with torch.set_grad_enabled(mode == "train"):
            return next(tensors_of(own(value.to(low) if given == "low" else value))).detach()

    with (
        emulated_autocast("cuda") if device_type == "cuda" else contextlib.nullcontext(),
        torch.autocast("cpu", dtype=low),
    ):
        expected = {case: run(*case) for case in cases}
    open_session(f"autocast-{device_type}", low)
    results = {case: run(*case) for case in cases}
    amp_patch.reset()
    differing = {(device_type, *case) for case in cases if not is_same(results[case], expected[case])}
    assert differing == {one for one in excepted if one[0] == device_type}


# ---- sparse matrices -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("compute", ["native", "float32"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("lists", ["bfloat16", "autocast-cpu"])
def test_sparse_products_that_plain_torch_knows_do_not_fail(lists: str, layout: torch.layout, compute: str) -> None:
    generator = torch.Generator().manual_seed(3)
    adjacency = torch.rand(7, 7, generator=generator)
    given = torch.where(adjacency < 0.6, 0.0, adjacency).to_sparse(layout=layout)
    dense, bias = torch.randn(2, 7, 3, generator=generator)

    def run() -> list[Tensor]:
        low = torch.mm(dense, torch.eye(3))  # a product of dense matrices
        products = [torch.spmm(given, low), torch.dsmm(given, low), given @ low, torch.addmm(bias, given, low)]
        products += [torch.sparse.mm(given, low), torch.sparse.addmm(bias, given, low)]
        return [*products, torch.mv(given, low[:, 0]), F.linear(dense.t(), given)]

    expected = run()
    with amp_patch.session("O4", device="cpu", lists=lists, compute=compute):
        results = run()
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.float(), wanted, rtol=0.05, atol=0.05)  # some roundings to 8 bits


# ---- Apex ------------------------------------------------------------------------------------------------------------

NAMESPACES = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": torch.Tensor, "torch._VF": torch._VF}
# Rule, namespace, and what Apex patched there; indented lines belong to the one above. Ops that
# write to their first argument keep its dtype, where Apex raised errors, or rebound the name.
APEX = """
whitelist torch.nn.functional conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
    linear
whitelist torch conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm
    addmv addr matmul mm mv addbmm baddbmm bmm
whitelist torch.Tensor __matmul__ prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm
whitelist torch._VF rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell
blacklist torch.nn.functional interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm
    group_norm local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss
    cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
    multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss
    soft_margin_loss triplet_margin_loss ctc_loss
blacklist torch acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist
    norm prod std sum var renorm
blacklist torch.Tensor __pow__ __rpow__ cpu acos asin cosh erfinv exp expm1 log log10 log2 reciprocal
    rsqrt sinh tan pow cumprod cumsum dist norm prod std sum var renorm
promote torch addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne
promote torch.Tensor addcdiv addcmul atan2 cross dot add div mul eq equal ge gt le lt ne __add__ __eq__ __ge__
    __gt__ __le__ __lt__ __mul__ __ne__ __radd__ __rmul__
    __rsub__ __sub__ __truediv__ __div__
sequence_promote torch cat stack
banned torch.nn.functional binary_cross_entropy
match_self torch acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_
match_self torch.Tensor acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ erfinv_
    pow_ cumprod_ cumsum_ renorm_ __ipow__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__
match_self torch.Tensor addmm_ addmv_ addr_ addbmm_ baddbmm_ addcdiv_ addcmul_ atan2_ add_ div_ mul_ eq_ ge_ gt_
    le_ lt_ ne_
"""
IN_APEX = []
for entry in APEX.strip().replace("\n    ", " ").splitlines():
    kind, owner, *names = entry.split()
    IN_APEX += [Spelling(NAMESPACES[owner], owner, name, kind, None) for name in names]  # type: ignore[arg-type]


def test_the_list_apex_names_what_apex_patched_and_nothing_else() -> None:
    lists = load_oplists("apex")
    listed = {(one.owner_name, one.name): one.rule for one in lists.spellings}
    without_sample = {("torch.Tensor", name): "promote" for name in ("__rdiv__", "__rtruediv__")}
    assert listed == {(one.owner_name, one.name): one.rule for one in IN_APEX} | without_sample
    assert lists.missing == ()


@lows
@pytest.mark.parametrize("operator", ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"])
def test_augmented_operators_write_to_their_target_under_the_list_apex_too(low: torch.dtype, operator: str) -> None:
    wide = torch.rand(4) + 1
    target, expected = wide.to(low), wide.to(low)
    expected = getattr(expected, operator)(wide.to(low))
    open_session("apex", low)
    assert getattr(target, operator)(wide) is target
    assert target.dtype is low and torch.equal(target, expected)


# ---- the default lists -----------------------------------------------------------------------------------------------

NO_KERNEL = {
    torch.float16: {"nn.functional.rrelu"},
    torch.bfloat16: set(),
}  # of the CPU; such a layer must be given float32
# Joined or scaled with tensors of several dtypes at once, as no layer does; and the functions below the ones that
# layers call.
NOT_MIXED = {
    "cartesian_prod",
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
    "grid_sampler_2d",
    "grid_sampler_3d",
}


@pytest.mark.filterwarnings("ignore")
@lows
def test_what_works_in_float32_works_under_the_default_lists(low: torch.dtype) -> None:
    """Whichever of an op's inputs come out of a low op: no missing kernel, no clash of dtypes."""
    calls = [call for call in database(low) if not call.name.rpartition(".")[2].startswith(("_", "native_"))]
    works = [
        not isinstance(
            outcome(Call(call.name, call.look_up, *cast((call.args, call.kwargs), torch.float32))), Exception
        )
        for call in calls
    ]
    open_session(str(low).removeprefix("torch."), low)
    failed = {
        (
            call.name,
            len({t.dtype for t in tensors_of([*call.args, *call.kwargs.values()]) if t.is_floating_point()}) > 1,
        )
        for call, worked in zip(calls, works, strict=True)
        if worked and isinstance(outcome(call), Exception)
    }
    amp_patch.reset()
    assert {name for name, is_mixed in failed if not is_mixed} == NO_KERNEL[low]
    assert {name for name, is_mixed in failed if is_mixed} <= NOT_MIXED
