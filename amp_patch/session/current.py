"""The one session of the process: opens, replaces and closes it.

A session owns everything that `amp_patch.initialize` changes: models, optimizers, and patched functions of torch.
"""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..casting import Registration
from ..config import Policy
from ..errors import ModelError, OptimizerError, SessionError
from ..events import tell
from ..reporting import warn
from .arguments import (
    describe,
    device_type_of,
    find_model_problems,
    find_optimizer_problems,
    find_vanishing_eps,
    ids_of_parameters,
)
from .session import Session


class _State:
    """The session in force, and the settings that outlive sessions."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.session: Session | None = None
        self.is_disabled = False  # by initialize(enabled=False)
        self.registered: list[Registration] = []  # the functions of register_half_function and the like


state = _State()


def initialize(
    policy: Policy,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    num_losses: int,
    replace: bool,
    replace_other: bool = False,
    accept_low: bool = False,
    overflow_group: Any = None,
) -> Session:
    """Apply a policy to models and optimizers. See `amp_patch.initialize`.

    If no session is in force, open one. If the session in force has the same policy, device type and op lists, add the
    models and optimizers to it. Otherwise raise SessionError, unless the arguments say to replace it. Returns the
    session that is in force afterwards.

    Args:
        num_losses: the number of losses, each of which gets a loss scaler.
        replace: close the session in force, and open a new one, even if their policies are equal.
        replace_other: close a session in force with another policy, instead of raising SessionError.
        accept_low: accept models that have 16-bit parameters already.
        overflow_group: see `amp_patch.initialize`.
    """
    request = _Request(policy, device_type_of(models), models, optimizers, num_losses, accept_low, overflow_group)
    with state.lock:
        # before the policies are compared, because a session whose models are gone must not cause the error below
        close_if_over(models)
        session = state.session
        if session is None or replace:
            return _open(request)
        if session.fits(policy, request.device_type):
            _join(session, request)
            return session
        if replace_other:
            return _open(request)
        raise SessionError(_describe_conflict(session, policy, models))


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of one call of `initialize`, and the checks of its models and optimizers."""

    policy: Policy
    device_type: str
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    num_losses: int
    accept_low: bool
    overflow_group: Any

    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Raise ModelError for models that cannot be trained under the policy."""
        problems: list[str] = []
        for model in models:
            problems += find_model_problems(model, self.policy, self.accept_low)
        if problems:
            raise ModelError("; ".join(problems))

    def check_optimizers(self, optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
        """Raise OptimizerError for optimizers to which the policy cannot be applied.

        Warn of an `eps` that is 0 in 16 bits, and of optimizers that own no parameter of `models`.
        """
        problems = find_optimizer_problems(optimizers, self.policy)
        if problems:
            raise OptimizerError("; ".join(problems))
        for sentence in find_vanishing_eps(optimizers, self.policy):
            warn(sentence)
        if not models:
            return
        model_ids = ids_of_parameters(models)
        for optimizer in optimizers:
            optimizer_ids: set[int] = set()
            for group in optimizer.param_groups:
                optimizer_ids.update(map(id, group["params"]))
            if model_ids.isdisjoint(optimizer_ids):
                warn(
                    f"this {type(optimizer).__name__} owns none of the models' parameters: was it built before the"
                    " model was moved or copied? Create it after that, and before initialize"
                )


def _join(session: Session, request: _Request) -> None:
    """Add models and optimizers to the session in force, which has the same policy."""
    # plan
    bound = session.models()
    models = [model for model in request.models if model not in bound]
    optimizers = _find_unbound(session, request)
    # check
    request.check_models(models)
    request.check_optimizers(optimizers, request.models)
    session.check_that_no_block_runs()
    # apply
    session.make_scalers(request.num_losses)
    if not (models or optimizers or request.overflow_group is not None):
        return
    if optimizers:
        session.restart_scalers()
    session.adopt(request.models, optimizers, request.overflow_group)
    tell(session.without_casts(), "session_opened", session)


def _find_unbound(session: Session, request: _Request) -> list[Optimizer]:
    """Return the optimizers of a request that the session has not bound.

    A notebook cell that is run again passes a bound optimizer of the request's models, which is left out. A bound
    optimizer of other models is returned, so that `check_optimizers` raises an error for it.
    """
    model_ids = ids_of_parameters(request.models)
    unbound = []
    for optimizer in request.optimizers:
        binding = session.bindings.find_optimizer(optimizer)
        if binding is None or model_ids.isdisjoint(map(id, binding.groups.model_parameters())):
            unbound.append(optimizer)
    return unbound


def _open(request: _Request) -> Session:
    """Close the session in force, if there is one, and open another.

    If there is an error in the lists, or in a model that shares no parameter with the models of the session in force,
    that session stays.
    """
    # plan: load lists, and change nothing
    previous = state.session
    bound_parameters: set[int] = set()
    originals: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if previous is not None:
        bound_parameters = ids_of_parameters(previous.models())
        originals = previous.patcher.suspended()
    with originals:  # so that the lists see torch's own functions
        session = Session(request.policy, request.device_type, request.num_losses, registered=state.registered)
    # check: models of the previous session are checked after it is closed, because it may have cast them
    free: list[nn.Module] = []
    bound: list[nn.Module] = []
    for model in request.models:
        is_free = bound_parameters.isdisjoint(map(id, model.parameters()))
        (free if is_free else bound).append(model)
    request.check_models(free)
    reset()
    request.check_models(bound)
    request.check_optimizers(request.optimizers, request.models)
    # apply
    open_session(session, request.models, request.optimizers, request.overflow_group)
    return session


def _describe_conflict(session: Session, asked: Policy, given: Sequence[nn.Module]) -> str:
    """Return the error message about a session in force with another policy: the reason, and the remedies."""
    level, wanted = session.policy.opt_level, _describe_difference(session.policy, asked)
    alive = session.models()
    remedies = "call amp.reset() first, or pass replace=True"
    if not alive:
        return (
            f"opt_level {level} is in force for code without a model, and {wanted} was asked for: leave the block"
            " of its session, or call amp.reset(), first"
        )
    if any(model in alive for model in given):
        return (
            f"this {describe(given)} is initialized already, at {level}, and {wanted} was asked for: {remedies}."
            " Calling it again with the same arguments is harmless."
        )
    conflict = (
        f"opt_level {level} is in force for {describe(alive)}, still in use, and {wanted} was asked for. Pass"
        f" all models to one initialize call, or delete the old ones, or {remedies}."
    )
    if "get_ipython" in vars(sys.modules["__main__"]):
        conflict += (
            " Outputs of cells keep models alive (`%reset -f out`), and so does the last traceback"
            " (`sys.last_exc = sys.last_value = sys.last_traceback = None`)."
        )
    return conflict


def _describe_difference(in_force: Policy, asked: Policy) -> str:
    """Return as text how the policy `asked` differs from the one in force: its level, or else its other properties."""
    if asked.opt_level != in_force.opt_level:
        return asked.opt_level
    if asked == in_force:
        return "the same level with lists whose files have changed, or on another device,"
    before, after = dict(in_force.describe()), dict(asked.describe())
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changes = [f"{name} {after.get(name, '-')} instead of {before.get(name, '-')}" for name in names]
    return " and ".join(changes) or "the same level with other bounds of the loss scale"


def open_session(
    session: Session,
    models: Sequence[nn.Module] = (),
    optimizers: Sequence[Optimizer] = (),
    overflow_group: Any = None,
) -> None:
    """Open a session that the caller has made. No other session may be in force."""
    state.session = session  # before the session changes anything, so that `reset` can undo it after an interrupt
    try:
        session.open(models, optimizers, overflow_group)
        tell(session.without_casts(), "session_opened", session)
    except BaseException:
        _close()
        raise


def without_casts() -> contextlib.AbstractContextManager[None]:
    """Context manager: while the block runs, amp casts no op of this thread."""
    session = state.session
    return contextlib.nullcontext() if session is None else session.without_casts()


def check_that_none_is_in_use() -> None:
    """Close the session in force if it is over (see `close_if_over`). Raise SessionError if it is not.

    A `session` or `scope` block cannot use a session in force, because the end of the block would close it.
    """
    with state.lock:
        close_if_over()
        if state.session is not None:
            raise SessionError(
                f"opt_level {state.session.policy.opt_level} is in force already: call amp.reset() first, or leave the"
                " block you are in"
            )


def open_without_model(policy: Policy, device_type: str) -> Session:
    """Open a session without models, which lasts until `reset`. Raises SessionError if a session is in use."""
    with state.lock:
        check_that_none_is_in_use()
        session = Session(policy, device_type, 1, registered=state.registered, has_models=False)
        open_session(session)
        return session


@contextlib.contextmanager
def without_model(policy: Policy, device_type: str) -> Iterator[Session]:
    """Context manager: open a session without models for the block, and yield it. See `amp_patch.session`."""
    session = open_without_model(policy, device_type)
    try:
        yield session
    finally:
        close(session)


def close(session: Session) -> None:
    """Close a session if it is the one in force."""
    with state.lock:
        if state.session is session:
            reset()


def end_scope(session: Session | None, *, was_disabled: bool) -> None:
    """End a `scope`: close its session, if it opened one. Unless a session is still in force, restore `is_disabled`."""
    with state.lock:
        if session is not None:
            close(session)
        if state.session is None:
            state.is_disabled = was_disabled


def close_if_over(given: Sequence[nn.Module] = ()) -> None:
    """Close the session in force if it is over.

    A session is over if its models were freed, if an interrupt cut its `open` or `close` short, if this process
    inherited it by a fork, or if any other session may replace it (`Session.gives_way`). To find out whether the models
    were freed, this collects garbage, unless one of them is in `given`.
    """
    session = state.session
    if session is not None and not _is_in_use(session, given):
        reset()


def _is_in_use(session: Session, given: Sequence[nn.Module]) -> bool:
    if session.gives_way or not session.is_whole or session.process_id != os.getpid():
        return False
    if not session.has_models:
        return True
    models = session.models()
    if any(model in models for model in given):
        return True
    if models:
        models.clear()  # this list would keep the models alive
        gc.collect()
    return bool(session.models())


def reset() -> None:
    """Close the session in force, if there is one, and end the effect of `disable`. See `amp_patch.reset`.

    Raises SessionError while a block of the session runs.
    """
    with state.lock:
        # a session that an interrupt has cut short is closed even inside a block
        if state.session is not None and state.session.is_whole:
            state.session.check_that_no_block_runs()
        state.is_disabled = False
        _close()


def _close() -> None:
    """Close the session in force. If an interrupt leaves changes to undo, the session stays, for another `reset`."""
    session = state.session
    if session is None:
        return
    try:
        tell(session.without_casts(), "session_closing", session)
        session.close()
    finally:
        if not session.undo:
            state.session = None


def disable() -> None:
    """Disable amp, for `initialize(enabled=False)`. Raises SessionError while a session is in use."""
    with state.lock:
        close_if_over()
        if state.session is not None:
            level, alive = state.session.policy.opt_level, state.session.models()
            if not alive:
                raise SessionError(
                    f"opt_level {level} is in force for code without a model: leave the block of its session, or"
                    " call amp.reset(), before initialize(enabled=False)"
                )
            raise SessionError(
                f"opt_level {level} is in force for {describe(alive)}, still in use: call amp.reset() before"
                " initialize(enabled=False)"
            )
        state.is_disabled = True


NOT_INITIALIZED = "amp.initialize has not been called yet, or amp.reset() has undone it: call amp.initialize first"


def require() -> Session:
    """Return the session in force. Raises SessionError if there is none, or if an interrupt has cut its `open` or
    `close` short. Such a session is closed.
    """
    if state.session is not None and not state.session.is_whole:
        reset()
    if state.session is None:
        raise SessionError(NOT_INITIALIZED)
    return state.session


def require_own() -> Session:
    """Like `require`, but also raises SessionError for a session that the script did not open (`Session.gives_way`)."""
    session = require()
    if session.gives_way:
        raise SessionError(NOT_INITIALIZED)
    return session
