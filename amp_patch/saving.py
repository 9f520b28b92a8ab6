"""`state_dict` and `load_state_dict`: amp's own state in a checkpoint."""

from collections.abc import Mapping, MutableMapping
from typing import Any

from .errors import ArgumentTypeError, CheckpointError
from .session import current as _current
from .tables import count_of

ROUNDING = "stochastic_rounding"
"""The name of the entry with the state of stochastic rounding."""


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return amp's state for a checkpoint: the loss scales. If amp is disabled, there are no entries.

    The result is `{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}`, with an entry for each loss scale.
    The entry of a scale with a `hysteresis` above 1 also holds `hysteresis_tracker`. If optimizers keep their state in
    bfloat16, there is also `{"stochastic_rounding": {"steps": int}}`. `torch.load` can read the result with
    weights_only=True. Waits for the device.

    Args:
        destination: a dictionary to add the entries to, and to return. None makes a new one.

    Raises ArgumentTypeError if `destination` is not a dictionary, and SessionError before `initialize`.

    Examples:
        >>> model = amp.initialize(torch.nn.Linear(4, 1), opt_level="O1", verbosity=0)
        >>> amp.state_dict()
        {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    if destination is not None and not isinstance(destination, MutableMapping):
        raise ArgumentTypeError(
            f"destination must be a dictionary, not {type(destination).__name__}: pass one to add entries to it, or"
            " leave it out"
        )
    result = {} if destination is None else destination
    if not _current.state.is_disabled:
        session = _current.require_own()
        for index, scaler in enumerate(session.scalers):
            result[f"loss_scaler{index}"] = scaler.state_dict()
        rounding = session.bindings.rounding
        if rounding is not None:
            result[ROUNDING] = rounding.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load the result of `state_dict`, of this package or of Apex. Does nothing if amp is disabled.

    The result of a session that keeps optimizer state in another dtype can be loaded, too.

    Raises ArgumentTypeError if `state_dict` is not a mapping, CheckpointError if it does not fit the loss scales or
    cannot be read, and SessionError before `initialize`. After an error, the loss scales are as they were before.

    Examples:
        >>> model = amp.initialize(torch.nn.Linear(4, 1), opt_level="O1", verbosity=0)
        >>> amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
        >>> amp.stats().loss_scales
        (128.0,)
    """
    if _current.state.is_disabled:
        return
    session = _current.require_own()
    scalers, rounding = session.scalers, session.bindings.rounding
    if not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(
            f"load_state_dict takes the result of amp.state_dict(), not {type(state_dict).__name__}: save it as"
            " {'amp': amp.state_dict(), ...}, and pass torch.load(path)['amp']"
        )
    expected = [f"loss_scaler{index}" for index in range(len(scalers))]
    if set(state_dict) - {ROUNDING} != set(expected):
        raise CheckpointError(
            f"the saved amp state holds {', '.join(map(str, state_dict)) or 'nothing'}, but this session has"
            f" {count_of(len(scalers), 'loss scaler')} ({', '.join(expected)}): {_advise(state_dict, expected)}"
        )
    before = [scaler.state_dict() for scaler in scalers]
    try:
        for name, scaler in zip(expected, scalers, strict=True):
            scaler.load_state_dict(_check_entry(name, state_dict[name]))
        if rounding is not None and ROUNDING in state_dict:
            rounding.load_state_dict(state_dict[ROUNDING])
    except (TypeError, ValueError) as error:
        # all or nothing: restore the scalers whose entries were loaded before the faulty one
        for scaler, saved in zip(scalers, before, strict=True):
            scaler.load_state_dict(saved)
        raise CheckpointError(
            f"the saved amp state cannot be read: {error}; pass entries such as"
            " {'loss_scale': 65536.0, 'unskipped': 0}"
        ) from error


def _advise(state_dict: Mapping[str, Any], expected: list[str]) -> str:
    """Return the remedy for a state whose keys do not fit the loss scales, which have the keys `expected`."""
    if set(expected) <= set(state_dict):
        others = [str(key) for key in state_dict if key not in (*expected, ROUNDING)]
        if not any(other.startswith("loss_scaler") for other in others):
            return f"pass its entries without {', '.join(others)}"
    for name, value in state_dict.items():
        if isinstance(value, Mapping) and any(str(key).startswith("loss_scaler") for key in value):
            return f"pass the entry {name!r} of this checkpoint"
    if any(str(key).startswith("loss_scaler") for key in state_dict):
        return "pass the same num_losses to initialize"
    return "pass the result of amp.state_dict()"


def _check_entry(name: str, entry: Any) -> dict[str, Any]:
    """Return the entry of a scaler as a dictionary. Raises ValueError if it is not an entry."""
    missing = [key for key in ("loss_scale", "unskipped") if not isinstance(entry, Mapping) or key not in entry]
    if missing:
        raise ValueError(f"{name} is {entry!r}, without {' and '.join(missing)}")
    return dict(entry)
