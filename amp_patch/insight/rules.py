"""`RuleFinder`: finds the rule that decides in which dtype an op runs: a rule of a list, a module rule, or a property
of the opt_level.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..casting import Mode
from ..config import OpRule, op_lists
from ..session import Session
from ..torch_private import BatchNormBase
from .sites import Site

_SHORT = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", torch.bool: "bool"}
_OF_MODULES = (Mode.LOW, Mode.FLOAT32)
"""The modes of the regions that module rules open."""

_OWNERS = {
    **dict.fromkeys(("torch.nn.functional", "torch._C._nn"), "F"),
    **dict.fromkeys(("torch.Tensor", "torch._C.TensorBase"), "Tensor"),
}
"""The short names that reports use for some owners of ops."""


@functools.cache
def short(dtype: torch.dtype) -> str:
    """Return a dtype as tables show it, such as "bf16" and "i64"."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.").replace("uint", "u").replace("int", "i")


def spelled(owner: Any, name: str) -> str:
    """Return an attribute as scripts write it: `F.linear`, `Tensor.exp`, `torch.exp`."""
    owner_name = _name_owner(owner)
    return f"{_OWNERS.get(owner_name, owner_name)}.{name}"


def _name_owner(owner: Any) -> str:
    """Return the full name of a class or module; "" for an object without a name."""
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return getattr(owner, "__name__", "")


class RuleFinder:
    """Finds the rules of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        spellings: tuple[op_lists.Spelling, ...] = ()
        if session.oplists is not None and session.casts is not None:
            spellings = (*session.oplists.spellings, *session.oplists.deferred)
        self._by_key = {(spelling.owner_name, spelling.name): spelling for spelling in spellings}
        self._by_owner = {
            (id(spelling.owner), spelling.name): spelling for spelling in spellings if spelling.owner is not None
        }
        self._by_replacement: dict[int, op_lists.Spelling] = {}

    def is_op(self, owner: Any, name: str, replacement: Callable[..., Any]) -> bool:
        """Return whether a patched attribute is an op to observe.

        It is if it is on a list, is a product (such as a matrix product or a convolution), or has no 16-bit kernel on
        CPUs. Other patched attributes, such as torch.autograd.backward, are no ops to observe.
        """
        is_listed = self.find_spelling(owner, name, replacement) is not None
        return is_listed or op_lists.is_product(name) or op_lists.is_without_cpu_kernel(name)

    def find_spelling(self, owner: Any, name: str, replacement: Callable[..., Any]) -> op_lists.Spelling | None:
        """Return the `Spelling` by which a list names a patched attribute; None if no list names it.

        A list may name only one of two aliases, which have the same replacement. Then return this `Spelling` for the
        other one, too, if an earlier call has found it.
        """
        spelling = self._by_owner.get((id(owner), name)) or self._by_key.get((_name_owner(owner), name))
        spelling = spelling or self._by_replacement.get(id(replacement))  # an alias
        if spelling is not None:
            self._by_replacement.setdefault(id(replacement), spelling)
        return spelling

    def describe(self, spelling: op_lists.Spelling) -> str:
        """Return the place of the entry that lists an op, `file.yaml:line`."""
        return _describe_line(spelling.entry.path, spelling.entry.line)

    def target(self, rule: OpRule, mode: Mode) -> torch.dtype | None:
        """Return the dtype to which a rule casts in a mode; None if dtypes of arguments decide, or nothing is cast."""
        if mode is Mode.OFF or not rule.runs_in:
            return None
        if mode is Mode.LOW or (mode is Mode.BY_LISTS and rule.runs_in == "low"):
            return self._session.low_here()
        return torch.float32

    def find_module_rule(self, module: nn.Module) -> tuple[str, str]:
        """Return the module rule that covers a module, such as "run: low", and its place; "" and "" without one."""
        rule = self._session.bindings.find_rule(module)
        if rule is None:
            return "", ""
        return f"run: {rule.run}", _describe_line(rule.path, rule.line)

    def find_rule_of_unlisted(self, site: Site, module: nn.Module | None) -> tuple[str, str]:
        """Return the rule that decides for an op on no list, and its place or opt_level; "" and "" without one."""
        policy = self._session.policy
        rule = entry = ""
        if module is not None:
            rule, entry = self.find_module_rule(module)
        if site.by == "border":  # a cast of the inputs or outputs of a module
            return "border of the cast", entry or policy.opt_level or ""
        # At opt_levels that do not cast models, a module rule acts only in the region that it opens. No region is open
        # when a checkpoint that the script wrote itself runs a part of a forward pass again.
        if rule and (policy.cast_model_type is not None or self._session.switch.mode_here() in _OF_MODULES):
            return rule, entry
        if module is None or policy.cast_model_type is None:
            return "", ""
        # A layer without weights runs in the dtype of its inputs.
        own = next(module.parameters(recurse=False), None)
        if own is None:
            return "", ""
        if isinstance(module, BatchNormBase) and policy.keep_batchnorm_fp32 and own.dtype is torch.float32:
            return "keep_batchnorm_fp32", policy.opt_level or ""
        return "cast_model_type", policy.opt_level or ""


@functools.cache
def _describe_line(path: str, line: int) -> str:
    return f"{Path(path).name}:{line}"
