"""The ops that are products, and the ops without a 16-bit kernel on a CPU. A session may compute both in float32 and
round the result, whatever their rules are.
"""

import functools
from collections.abc import Iterator

from .op_names import find_spellings, get_names, inplace_twin

PRODUCTS = (
    *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    *("torch.convolution", "bilinear", "matmul", "mm", "mv", "bmm", "dot", "vdot", "vecdot", "inner", "tensordot"),
    *("addmm", "addmv", "addr", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "einsum"),
    *("torch.sparse.mm", "torch.sparse.addmm"),
    *("scaled_dot_product_attention", "torch._native_multi_head_attention", "torch._transformer_encoder_layer_fwd"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
"""Ops that are products, or call products in C++, named as in lists."""

WITHOUT_KERNEL = (
    *("avg_pool3d", "multi_margin_loss", "multilabel_margin_loss"),
    *(
        f"torch.fft.{prefix}{kind}fft{suffix}"
        for prefix in ("", "i")
        for kind in ("", "r", "h")
        for suffix in ("", "2", "n")
    ),
)
"""Ops that torch 2.13 runs in float16 on a GPU but not on a CPU. Variants with a kernel of their own, such as
`interpolate(antialias=True)` and `round(decimals=...)`, are left out: their op has a 16-bit kernel.
"""

_PRODUCT_NAMES = frozenset(name for op in PRODUCTS for name in get_names(op.rpartition(".")[2]))
_OTHER_NAMES = frozenset(name.rpartition(".")[2] for name in WITHOUT_KERNEL)


@functools.cache
def is_product(name: str) -> bool:
    """Return whether torch's function of that `__name__` is in `PRODUCTS`, or is an operator or in-place twin of one.

    Functions of torch.linalg have names such as `linalg_matmul`, functions of torch.sparse such as `_sparse_mm`.
    """
    return _is_among(_PRODUCT_NAMES, name.removeprefix("linalg_").removeprefix("_sparse_"))


@functools.cache
def is_without_kernel(name: str) -> bool:
    """Return the same for `WITHOUT_KERNEL`. Functions of torch.fft have names such as `fft_rfft`."""
    return _is_among(_OTHER_NAMES, name.removeprefix("fft_"))


def _is_among(names: frozenset[str], name: str) -> bool:
    return name in names or name.removesuffix("_") in names


def find_products(device_type: str) -> Iterator[tuple[object, str]]:
    """Yield owner and name of every spelling of a product that this torch has, and of its in-place twin. On a CPU, also
    yield the ops without a 16-bit kernel.
    """
    seen = set()
    for op in (*PRODUCTS, *(WITHOUT_KERNEL if device_type == "cpu" else ())):
        for key, owner in find_spellings(op, may_be_missing=True).items():
            for spelling in (key, inplace_twin(key)):
                if owner is not None and spelling is not None and spelling not in seen:
                    seen.add(spelling)
                    yield owner, spelling[1]
