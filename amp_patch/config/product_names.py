"""Which ops are products, and which have no 16-bit kernel on a CPU: what a session may compute in float32 between
roundings, whatever rule the op follows.
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
"""What is a product, or made of products in C++, by names as lists have them."""

WITHOUT_KERNEL = (
    *("avg_pool3d", "multi_margin_loss", "multilabel_margin_loss"),
    *(
        f"torch.fft.{prefix}{kind}fft{suffix}"
        for prefix in ("", "i")
        for kind in ("", "r", "h")
        for suffix in ("", "2", "n")
    ),
)
"""Ops that torch 2.13 has for float16 on a GPU and not on a CPU. Forms that need another kernel, such as
`interpolate(antialias=True)` and `round(decimals=...)`, are left out: their op has one.
"""

_PRODUCT_NAMES = frozenset(name for op in PRODUCTS for name in get_names(op.rpartition(".")[2]))
_OTHER_NAMES = frozenset(name.rpartition(".")[2] for name in WITHOUT_KERNEL)


@functools.cache
def is_product(name: str) -> bool:
    """Tell whether torch's function of that name is one of `PRODUCTS`, an operator or in-place twin of one included.

    Functions of torch.linalg call themselves `linalg_matmul` and the like, those of torch.sparse `_sparse_mm`.
    """
    return _is_one_of(_PRODUCT_NAMES, name.removeprefix("linalg_").removeprefix("_sparse_"))


@functools.cache
def is_without_kernel(name: str) -> bool:
    """Tell the same of `WITHOUT_KERNEL`. Functions of torch.fft call themselves `fft_rfft` and the like."""
    return _is_one_of(_OTHER_NAMES, name.removeprefix("fft_"))


def _is_one_of(names: frozenset[str], name: str) -> bool:
    return name in names or name.removesuffix("_") in names


def find_products(device_type: str) -> Iterator[tuple[object, str]]:
    """Yield owner and name of every spelling of a product that this torch has, and on a CPU of every op without a
    kernel, with their in-place twins.
    """
    seen = set()
    for op in (*PRODUCTS, *(WITHOUT_KERNEL if device_type == "cpu" else ())):
        for key, owner in find_spellings(op, may_be_missing=True).items():
            for one in (key, inplace_twin(key)):
                if owner is not None and one is not None and one not in seen:
                    seen.add(one)
                    yield owner, one[1]
