"""The one session of the process: opening, replacing and closing it. The only mutable module state of the package."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Sequence
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
from .holders import describe_conflict, is_in_use
from .session import Session


class _State:
    """The session in force, and what outlives sessions."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.session: Session | None = None
        self.is_disabled = False  # initialize(enabled=False) was the last word
        self.registered: list[Registration] = []


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
    """Open a session for these objects, or bring them under the open one if its policy is the same. See
    `amp_patch.initialize`.

    `replace_other` closes a session of another policy, as `replace` closes any. With `accept_low`, models may hold
    16-bit parameters already.
    """
    with state.lock:
        device_type = device_type_of(models)
        close_if_over()
        session = state.session
        fits = session is not None and session.fits(policy, device_type)
        if session is not None and not fits and not (replace or replace_other):
            raise SessionError(describe_conflict(session.policy, policy, session.models(), models))
        if session is not None and fits and not replace:
            known = ids_of_parameters(models)
            unbound = []
            for optimizer in optimizers:
                binding = session.bindings.find_optimizer(optimizer)
                # a cell that is run again passes an optimizer that is bound, and has parameters of these models
                if binding is None or known.isdisjoint(map(id, binding.groups.model_parameters())):
                    unbound.append(optimizer)
            added = [model for model in models if model not in session.models()]
            _check_models(policy, added, accept_low)
            _check_optimizers(policy, added, unbound)
            session.check_that_no_block_runs()
            session.add_scalers(num_losses)
            if not (added or unbound or overflow_group is not None):
                return session
            if unbound:
                session.restart_scalers()
            session.adopt(models, unbound, overflow_group)
            tell(session.without_casts(), "session_opened", session)
            return session

        known = set[int]()
        originals: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if session is not None:
            known = ids_of_parameters(session.models())
            originals = session.patcher.suspended()
        with originals:  # names are looked up as torch has them
            # raises before anything is closed
            session = Session(policy, device_type, num_losses, registered=state.registered)

        # models of which the session in force holds nothing can be judged before it is closed
        strangers, others = [], []
        for model in models:
            if known.isdisjoint(map(id, model.parameters())):
                strangers.append(model)
            else:
                others.append(model)
        _check_models(policy, strangers, accept_low)
        reset()
        _check_models(policy, others, accept_low)
        _check_optimizers(policy, models, optimizers)
        open_session(session, models, optimizers, overflow_group)
        return session


def open_session(
    session: Session,
    models: Sequence[nn.Module] = (),
    optimizers: Sequence[Optimizer] = (),
    overflow_group: Any = None,
) -> None:
    """Put a session into force. There must be none."""
    state.session = session  # before it changes anything, so that no interrupt leaves changes without an owner
    try:
        session.open(models, optimizers, overflow_group)
        tell(session.without_casts(), "session_opened", session)
    except BaseException:
        _close()
        raise


def without_casts() -> contextlib.AbstractContextManager[None]:
    """Return a block in which the casts of the session in force are off in this thread."""
    session = state.session
    return contextlib.nullcontext() if session is None else session.without_casts()


def refuse_second() -> None:
    """Raise SessionError if a session is in force: what a block undoes at its end must be its own."""
    with state.lock:
        close_if_over()
        if state.session is not None:
            raise SessionError(
                f"opt_level {state.session.policy.opt_level} is in force already: call amp.reset() first, or leave the"
                " block you are in"
            )


def open_without_model(policy: Policy, device_type: str) -> Session:
    """Open a session that belongs to no model and lasts until `reset`. Raises SessionError if one is in force."""
    with state.lock:
        refuse_second()
        session = Session(policy, device_type, 1, registered=state.registered, has_models=False)
        open_session(session)
        return session


@contextlib.contextmanager
def without_model(policy: Policy, device_type: str) -> Iterator[Session]:
    """A session that belongs to no model and lasts as long as the block. See `amp_patch.session`."""
    session = open_without_model(policy, device_type)
    try:
        yield session
    finally:
        close(session)


def close(session: Session) -> None:
    """Undo what a session has done, if it is the one in force."""
    with state.lock:
        if state.session is session:
            reset()


def end_scope(session: Session | None, *, was_disabled: bool) -> None:
    """Undo what a block has done: its session, or without one, that it made the API a no-op."""
    with state.lock:
        if session is not None:
            close(session)
        if state.session is None:
            state.is_disabled = was_disabled


def _check_models(policy: Policy, models: Sequence[nn.Module], accept_low: bool) -> None:
    problems: list[str] = []
    for model in models:
        problems += find_model_problems(model, policy, accept_low)
    if problems:
        raise ModelError("; ".join(problems))


def _check_optimizers(policy: Policy, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    problems = find_optimizer_problems(optimizers, policy)
    if problems:
        raise OptimizerError("; ".join(problems))
    for sentence in find_vanishing_eps(optimizers, policy):
        warn(sentence)
    if not models:
        return
    known = ids_of_parameters(models)
    for optimizer in optimizers:
        own: set[int] = set()
        for group in optimizer.param_groups:
            own.update(map(id, group["params"]))
        if known.isdisjoint(own):
            warn(
                f"this {type(optimizer).__name__} owns none of the models' parameters: was it built before the model"
                " was moved or copied? Create it after that, and before initialize"
            )


def close_if_over() -> None:
    """Close the session in force if all its models are gone, or it came through a fork, or is not whole."""
    session = state.session
    if session is None:
        return
    if session.gives_way:
        reset()
        return
    if session.process_id == os.getpid() and session.is_whole:
        models = session.models()
        if models and not is_in_use(models):
            models.clear()
            gc.collect()  # a model in a reference cycle is only gone after this
        if session.models() or not session.has_models:
            return
    reset()


def reset() -> None:
    """Close the session in force, if there is one. See `amp_patch.reset`."""
    with state.lock:
        if state.session is not None and state.session.is_whole:
            state.session.check_that_no_block_runs()
        state.is_disabled = False
        _close()


def _close() -> None:
    """Close the session in force, which stays known until nothing of it is left to undo."""
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
    """Make the API a no-op, for `initialize(enabled=False)`. Raises SessionError while a session is in use."""
    with state.lock:
        close_if_over()
        if state.session is not None:
            raise SessionError(
                f"opt_level {state.session.policy.opt_level} is in force for {describe(state.session.models())}, which"
                " is still alive: call amp.reset() before initialize(enabled=False)"
            )
        state.is_disabled = True


NOT_INITIALIZED = "amp.initialize has not been called yet, or amp.reset() has undone it: call amp.initialize first"


def require() -> Session:
    """Return the session in force; raises SessionError without one."""
    if state.session is not None and not state.session.is_whole:
        reset()  # an interrupt cut one short
    if state.session is None:
        raise SessionError(NOT_INITIALIZED)
    return state.session
