"""Apex's `apex.amp.amp`: decorators such as `half_function`, functions such as `register_half_function`, and `init`.

The module also exports the public names of `frontend`. The arguments of a registered function are cast in every later
session that patches functions.
"""

from dataclasses import replace

import torch

from ...reporting import warn
from ...script_settings import in_force
from .._core import (
    Registration,
    api,
    find_living_session,
    make_policy,
    open_session_without_models,
    parse_loss_scale,
    patch_again,
    replace_registered,
)
from ._amp_state import _amp_state
from .frontend import *  # noqa: F403
from .handle import AmpHandle, NoOpHandle
from .handle import disable_casts as disable_casts
from .handle import scale_loss as scale_loss
from .lists import register_edits

float_function = api.float_function
half_function = api.half_function
promote_function = api.promote_function
register_float_function = api.register_float_function
register_half_function = api.register_half_function
register_promote_function = api.register_promote_function


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Patch torch's functions as O1 does, without a model, and return a handle. It is Apex's interface from before
    `initialize`.

    The functions stay patched until the handle's `_deactivate()`, `amp_patch.reset()`, `initialize` or the next `init`.
    If there is an accelerator, the functions cast its tensors, otherwise tensors on the CPU.

    After `initialize`, while its models are alive, `init` ignores all arguments but `enabled`. At a level that patches
    functions, it returns a handle of the session of `initialize`, and patches functions that were registered since, or
    that `_deactivate` restored. At other levels it warns, and returns a handle without effect.

    Args:
        enabled: False returns a handle without effect.
        loss_scale: the loss scale of the handle's `wrap_optimizer`.
        enable_caching, verbose: without effect.
        allow_banned: run `binary_cross_entropy` in float32 instead of refusing it.
    """
    if not enabled:
        _amp_state.handle = no_op_handle = NoOpHandle()
        return no_op_handle
    session = find_living_session()
    if session is not None and session.has_models:
        if session.casts is None:
            warn(
                "amp.init patches nothing: the opt_level that amp.initialize was given casts models and no functions."
                " Use O1 for functions, or call amp_patch.reset() first"
            )
            return NoOpHandle()  # not stored: at such a level, `initialize` stores no handle either
        patch_again(session)
        _amp_state.handle = handle = AmpHandle(session)
        return handle
    if session is not None:  # such as the session of an earlier `init`
        api.reset()
    # the lists of a command (`amp-patch run --lists`), or of `amp_patch.apex.install`, are added after the list `apex`
    overrides = {"lists": ("apex", *in_force.settings.lists), "loss_scale": parse_loss_scale(loss_scale)}
    # casts_inside=False: as in Apex, a registered function's rule casts its arguments, and not the ops in its body
    policy = replace(make_policy("O1", overrides), casts_inside=False)
    register_edits()
    allowed = [Registration(torch.nn.functional, "binary_cross_entropy", "blacklist")] if allow_banned else []
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        # a session copies the registrations when it opens, so `allowed` holds for this session alone
        replace_registered(removed=[], added=allowed)
        session = open_session_without_models(policy, "cpu" if device is None else device.type)
    finally:
        replace_registered(removed=allowed, added=[])
    _amp_state.handle = handle = AmpHandle(session)
    return handle
