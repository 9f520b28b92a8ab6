"""Patching one more function while amp is in force, under the names of Apex's `apex.amp.wrap`.

It is undone with amp's own patches.
"""

from collections.abc import Callable
from typing import Any

from .._core import SessionView, api
from . import utils


def _kind_of(cast_fn: Callable[..., Any]) -> str:
    if cast_fn not in (utils.maybe_half, utils.maybe_float):
        raise ValueError(f"cast_fn={cast_fn!r} must be amp.utils.maybe_half or amp.utils.maybe_float")
    return "whitelist" if cast_fn is utils.maybe_half else "blacklist"


def _patch(module: Any, name: str, kind: str) -> None:
    SessionView.require().patch(module, name, kind)


def make_cast_wrapper(
    orig_fn: Callable[..., Any], cast_fn: Callable[..., Any], handle: object = None, try_caching: bool = False
) -> Any:
    """Return `orig_fn` with its arguments cast by `amp.utils.maybe_half` or `maybe_float` while amp is in force."""
    return api.half_function(orig_fn) if _kind_of(cast_fn) == "whitelist" else api.float_function(orig_fn)


def make_promote_wrapper(orig_fn: Callable[..., Any], cast_fn: object = None, handle: object = None) -> Any:
    """Return `orig_fn` with its arguments in their widest dtype while amp is in force."""
    return api.promote_function(orig_fn)


def cached_cast(
    mod: Any,
    fn: str,
    cast_fn: Callable[..., Any],
    handle: object = None,
    try_caching: bool = False,
    verbose: bool = False,
) -> None:
    """Have `mod.fn` cast its arguments by `amp.utils.maybe_half` or `maybe_float`."""
    _patch(mod, fn, _kind_of(cast_fn))


def promote(mod: Any, fn: str, handle: object = None, verbose: bool = False) -> None:
    """Have `mod.fn` run in the widest dtype of its arguments."""
    _patch(mod, fn, "promote")


def promote_match_arg0(mod: Any, fn: str, handle: object = None, verbose: bool = False) -> None:
    """Have `mod.fn` run in the dtype of its first argument."""
    _patch(mod, fn, "match_self")


def sequence_promote(mod: Any, fn: str, handle: object = None, verbose: bool = False) -> None:
    """Have `mod.fn` run in the widest dtype of the tensors of its first argument."""
    _patch(mod, fn, "sequence_promote")


def err_if_any_half(mod: Any, fn: str, handle: object = None, custom_err_msg: str | None = None) -> None:
    """Have `mod.fn` refuse 16-bit tensors."""
    _patch(mod, fn, "banned")


def err_if_arg0_half(mod: Any, fn: str, handle: object = None, verbose: bool = False) -> None:
    """Have `mod.fn` refuse a 16-bit first argument, and run the rest in float32."""
    _patch(mod, fn, "inplace_error")
