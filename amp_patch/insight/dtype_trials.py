"""Repeats a call that raised an exception, with its operands in other dtypes, to find dtypes in which it works."""

import contextlib
import functools
import warnings
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..dtypes import CASTABLE, LOW_DTYPES
from .failing_call import FailingCall
from .ops import random_numbers_kept

_ERRORS = (RuntimeError, TypeError, ValueError, AssertionError)


class Trial(Enum):
    """The dtype to which a trial casts the floating operands."""

    WIDEST = "widest"  # those up to float32, if they have several dtypes, to the dtype to which torch promotes them
    FLOAT32 = "float32"  # all to float32
    WRITTEN = "written"  # all to the dtype of the operand that the call writes to, else of the first operand
    SINGLE = "single"  # all, also float64, to the dtype to which torch promotes the operands that are not float64
    WEIGHT = "weight"  # all to the dtype that all weights among the operands have
    MODEL = "model"  # all to the dtype of a 16-bit model
    LOW = "low"  # float32 to 16 bits


@dataclass(frozen=True)
class Lows:
    """The 16-bit dtypes to try.

    Attributes:
        model: the dtype of the model if it is in 16 bits, else None.
        run: the low dtype of the run; float16 if it has none.
    """

    model: torch.dtype | None
    run: torch.dtype


@dataclass(frozen=True)
class Trials:
    """The trials that worked, each with the dtypes to which it cast the operands.

    Attributes:
        is_mixed: whether the operands have several floating dtypes.
        targets: for each trial that worked, the dtypes of the operands in this trial.
        results: for each trial that worked, the dtype of the result; None if it is not one tensor.
        low: the dtype of the model if it is in 16 bits, else None.
    """

    is_mixed: bool
    targets: dict[Trial, list[torch.dtype]]
    results: dict[Trial, torch.dtype | None]
    low: torch.dtype | None


def is_of_dtypes(error: BaseException) -> bool:
    """Return whether dtypes may be the reason for an exception of this class."""
    return isinstance(error, _ERRORS) and type(error) not in (torch.OutOfMemoryError, RecursionError)


def try_dtypes(call: FailingCall, error: BaseException, weights: list[bool], lows: Lows) -> Trials | None:
    """Run a call again in other dtypes. Return the trials that work; None if dtypes are not why the call raised.

    Dtypes are the reason if the call raises the same exception again with the same dtypes, and works in one of the
    trials. Every call runs on copies of its tensor arguments, without autograd. If no operand is floating, or all
    floating operands are float64, nothing runs, and the result is None.

    Args:
        error: the exception.
        weights: for each operand, whether it is a parameter, a buffer or a gradient of a model.
        lows: the 16-bit dtypes to try.
    """
    tensors = [tensor for _, tensor in call.operands]
    floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    kinds = list(dict.fromkeys(floating))
    if not kinds or kinds == [torch.float64]:
        return None
    with torch.no_grad(), random_numbers_kept(tensors), warnings.catch_warnings(action="ignore"):
        if not _raises_again(call, error):
            return None
        targets: dict[Trial, list[torch.dtype]] = {}
        results: dict[Trial, torch.dtype | None] = {}
        for trial, dtypes in _plan(call, kinds, weights, lows).items():
            with contextlib.suppress(Exception):  # a trial that raises has not worked, whatever it raises
                result = call.run(functools.partial(cast, dtypes))
                results[trial] = result.dtype if isinstance(result, Tensor) else None
                targets[trial] = [dtypes.get(tensor.dtype, tensor.dtype) for tensor in tensors]
    return Trials(len(kinds) > 1, targets, results, lows.model) if targets else None


def runs_under_autocast(call: FailingCall, device_type: str, low: torch.dtype) -> bool:
    """Return whether a call works in a region of torch.autocast with copies of the same operands."""
    tensors = [tensor for _, tensor in call.operands]
    with torch.no_grad(), random_numbers_kept(tensors), torch.autocast(device_type, low):
        try:
            call.run(clone)
        except Exception:  # whatever the call raises
            return False
    return True


Dtypes = dict[torch.dtype, torch.dtype]
"""The dtype to which each dtype is cast."""


def _plan(call: FailingCall, kinds: list[torch.dtype], weights: list[bool], lows: Lows) -> dict[Trial, Dtypes]:
    """Return the trials that change the dtype of an operand. `kinds`: the floating dtypes of the operands."""
    plan: dict[Trial, Dtypes] = {}
    tensors = [tensor for _, tensor in call.operands]
    castable = [kind for kind in kinds if kind in CASTABLE]
    widest = functools.reduce(torch.promote_types, castable) if castable else torch.float64
    if len(castable) > 1:
        plan[Trial.WIDEST] = dict.fromkeys(castable, widest)
    elif castable and castable[0] in LOW_DTYPES:
        plan[Trial.FLOAT32] = {castable[0]: torch.float32}
    if torch.float64 in kinds and torch.float32 not in kinds:
        plan[Trial.FLOAT32] = dict.fromkeys(kinds, torch.float32)
    if castable and torch.float64 in kinds:
        plan[Trial.SINGLE] = dict.fromkeys([*castable, torch.float64], widest)
    target = tensors[0] if call.written is None else call.written
    if len(kinds) > 1 and target.dtype in kinds:
        plan[Trial.WRITTEN] = dict.fromkeys(kinds, target.dtype)
    of_weights = {tensor.dtype for tensor, is_weight in zip(tensors, weights, strict=True) if is_weight}
    if len(kinds) > 1 and len(of_weights) == 1:
        plan[Trial.WEIGHT] = dict.fromkeys(kinds, of_weights.pop())
    if len(kinds) > 1 and lows.model in kinds:
        plan[Trial.MODEL] = dict.fromkeys(kinds, lows.model)
    if kinds == [torch.float32]:
        plan[Trial.LOW] = {torch.float32: lows.model or lows.run}
    return plan


def clone(tensor: Tensor) -> Tensor:
    """Return a copy, so that a call in place changes no tensor of the script."""
    return tensor.detach().clone()


def cast(dtypes: Dtypes, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, in the dtype to which `dtypes` maps its dtype. A dtype that is not in `dtypes`
    stays.
    """
    return tensor.detach().to(dtypes.get(tensor.dtype, tensor.dtype), copy=True)


def _raises_again(call: FailingCall, error: BaseException) -> bool:
    """Return whether a call raises the same exception with the same operands.

    For a check of the script, such as an `assert`, any exception counts.
    """
    try:
        call.run(clone)
    except Exception as raised:  # whatever the call raises
        return call.is_check or (type(raised) is type(error) and str(raised) == str(error))
    return False
