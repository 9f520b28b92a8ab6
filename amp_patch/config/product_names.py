"""The ops that are products (matrix products, convolutions, attention, ...), and the ops without a 16-bit CPU kernel.

A session that computes products in float32 (see `Policy.computes_in_float32`) also computes the ops without such a
kernel in float32 on a CPU. It rounds the results of both to 16 bits.
"""

import functools
from collections.abc import Iterator

from .op_names import find_spellings, get_names, inplace_twins

PRODUCTS = (
    *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    *("torch.convolution", "bilinear", "matmul", "mm", "mv", "bmm", "dot", "vdot", "vecdot", "inner", "tensordot"),
    *("addmm", "addmv", "addr", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "einsum", "grouped_mm"),
    *("torch.sparse.mm", "torch.sparse.addmm"),
    *("scaled_dot_product_attention", "torch._native_multi_head_attention", "torch._transformer_encoder_layer_fwd"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
"""Names, as in op lists, of the ops that are products, or that call products in C++."""

WITHOUT_CPU_KERNEL = (
    *("avg_pool3d", "multi_margin_loss", "multilabel_margin_loss"),
    *(
        f"torch.fft.{prefix}{kind}fft{suffix}"
        for prefix in ("", "i")
        for kind in ("", "r", "h")
        for suffix in ("", "2", "n")
    ),
)
"""Ops that torch 2.13 runs in float16 on a GPU but not on a CPU.

Ops that lack the CPU kernel only for some arguments, such as `interpolate(antialias=True)` and `round(decimals=...)`,
are left out, because their usual calls have a 16-bit kernel.
"""

_PRODUCT_NAMES = frozenset(name for op in PRODUCTS for name in get_names(op.rpartition(".")[2]))
_NAMES_WITHOUT_CPU_KERNEL = frozenset(name.rpartition(".")[2] for name in WITHOUT_CPU_KERNEL)


@functools.cache
def is_product(name: str) -> bool:
    """Return whether a function of torch with the `__name__` `name` is a product.

    Operators such as `__matmul__` and in-place twins such as `addmm_` count. The `__name__` of functions of
    torch.linalg and torch.sparse has a prefix, as in `linalg_matmul` and `_sparse_mm`.
    """
    return _is_among(_PRODUCT_NAMES, name.removeprefix("linalg_").removeprefix("_sparse_"))


@functools.cache
def is_without_cpu_kernel(name: str) -> bool:
    """Return whether a function of torch with the `__name__` `name` is one of `WITHOUT_CPU_KERNEL`.

    The `__name__` of functions of torch.fft has a prefix, as in `fft_rfft`.
    """
    return _is_among(_NAMES_WITHOUT_CPU_KERNEL, name.removeprefix("fft_"))


def _is_among(names: frozenset[str], name: str) -> bool:
    """Return whether a name is one of `names`, or the in-place twin of one: "addmm_" of "addmm"."""
    return name in names or name.removesuffix("_") in names


def find_float32_spellings(device_type: str) -> Iterator[tuple[object, str]]:
    """Yield each function that a session may have to compute in float32, as its owner and its name: (torch, "addmm").

    These are the products, on a CPU also the ops without a 16-bit kernel, and the in-place twins of both. Ops that the
    running torch does not have are left out.
    """
    seen = set()
    for op in (*PRODUCTS, *(WITHOUT_CPU_KERNEL if device_type == "cpu" else ())):
        for key, owner in find_spellings(op, may_be_missing=True).items():
            for spelling in (key, *inplace_twins(key)):
                if owner is not None and spelling not in seen:
                    seen.add(spelling)
                    yield owner, spelling[1]
