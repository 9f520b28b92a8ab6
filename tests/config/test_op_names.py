"""The name of an op finds its aliases and in-place variants, also while the op is patched; other names are refused.

Guards: config/op_names, config/op_namespaces.
"""

from typing import Any

import torch

from amp_patch.config import op_namespaces
from amp_patch.config.op_names import find_spellings, get_op, inplace_twins
from amp_patch.patching.patcher import Patch, Patcher

# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_name_means_the_same_while_it_is_patched() -> None:
    for name in [
        *("conv2d", "softmax", "norm", "max_pool3d", "torch.nn.functional.linear", "torch.Tensor.__pow__", "stft"),
    ]:
        before = find_spellings(name, may_be_missing=False)
        patcher = Patcher()
        patcher.install(
            Patch(owner, attribute, lambda original: lambda *args: original(*args))
            for (_, attribute), owner in before.items()
        )
        try:
            assert find_spellings(name, may_be_missing=False) == before
        finally:
            patcher.undo()


# ---- aliases ---------------------------------------------------------------------------------------------------------


# the groups of ops that the running torch has: torch 2.6 has no grouped_mm
GROUPS = [group for group in op_namespaces.ALIAS_GROUPS if find_spellings(group.split()[0], may_be_missing=True)]


def test_any_name_of_an_alias_group_means_the_whole_group() -> None:
    for group in GROUPS:
        meanings = [find_spellings(name, may_be_missing=False) for name in group.split()]
        assert all(meaning == meanings[0] for meaning in meanings)
        assert {name for _, name in meanings[0]} >= {name for name in group.split() if hasattr(torch, name)}


X, Y = (torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1 for seed in (1, 2))
OPERANDS = {"clamp": (X, 0.3, 0.5), "acosh": (X + 1,), "mvlgamma": (X + 2, 2), "orgqr": (X, X[0])}
OPERANDS |= {"outer": (X[0], Y[0]), "cat": ([X, Y],), "vstack": ([X, Y],)}
OPERANDS["grouped_mm"] = (torch.ones(1, 4, 4), torch.ones(1, 4, 4))
OPERANDS |= {"hspmm": (X.to_sparse(), Y), "sspaddmm": (X.to_sparse(), Y.to_sparse(), X)}
BINARY = {
    *("add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "matmul", "mm", "eq", "ne", "gt", "ge"),
    *("lt", "le", "atan2", "igamma", "igammac"),
}
SWAPPED = {"rsub", "__rsub__", "__rdiv__", "__rtruediv__", "__rfloordiv__", "__rmod__", "__rpow__", "__rmatmul__"}


def get_function(name: str) -> Any:
    owners = (torch.Tensor,) if name.startswith("__") else (torch, torch.special, torch.linalg, torch.nn.functional)
    return next(getattr(owner, name) for owner in owners if hasattr(owner, name))


def test_the_names_of_an_alias_group_compute_the_same() -> None:
    for group in GROUPS:
        first, *rest = group.split()
        if op_namespaces.SET_ITEM in rest:
            continue  # it returns nothing: tests/casting/test_writes.py
        operands = OPERANDS.get(first, (X, Y) if first in BINARY else (X,))
        expected = get_function(first)(*operands)
        for name in rest:
            function = get_function(name)
            arguments = [operand.clone() if isinstance(operand, torch.Tensor) else operand for operand in operands]
            result = function(*(reversed(arguments) if name in SWAPPED else arguments))
            torch.testing.assert_close(result, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_the_op_of_a_spelling() -> None:
    for spelling, op in [
        ("torch.softmax", "softmax"),
        ("torch.nn.functional.softmax", "softmax"),
        ("torch.arccos", "acos"),
        ("torch.Tensor.__rpow__", "pow"),
        ("torch.Tensor.__ipow__", "pow"),
        ("torch.Tensor.exp_", "exp"),
        ("torch.Tensor.index_put_", "index_put"),
        ("torch.Tensor.__setitem__", "index_put"),
        ("torch.nn.functional.relu_", "relu"),
        ("torch.Tensor.zero_", "zero_"),  # there is no zero
        ("torch._VF.lstm", "lstm"),
        ("torch.fft.fft", "torch.fft.fft"),  # a bare fft would not reach it
        ("torch.linalg.solve", "solve"),
        ("torch._VF.conv1d", "torch._VF.conv1d"),
        ("lib.ops.f_", "lib.ops.f_"),
    ]:
        owner_name, _, name = spelling.rpartition(".")
        assert get_op((owner_name, name)) == op


def test_the_op_of_a_spelling_means_it() -> None:
    keys = [
        (owner_name, name)
        for owner_name in op_namespaces.NAMESPACES
        for name in dir(op_namespaces.NAMESPACES[owner_name])
        if not name.startswith("_") and name not in op_namespaces.ACCESSORS
    ]
    for key in keys:
        op = get_op(key)
        if "." not in op:
            spellings = find_spellings(op, may_be_missing=False)
            assert key in spellings or any(key in inplace_twins(spelling) for spelling in spellings)
