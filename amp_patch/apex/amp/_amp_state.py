"""`_amp_state`: the object in which scripts read, and sometimes set, the state of amp.

As in Apex, this module and the object in it share a name. The attribute `amp._amp_state` is the object, and
`import apex.amp._amp_state` imports the module.
"""

from typing import Any

from ...reporting import find_rank, set_verbosity
from .._core import api, find_session, is_disabled
from .scaler import LossScaler

master_params = api.master_params


class AmpState:
    """The state of amp.

    As in Apex, some attributes do not exist until a call sets them. `initialize` sets `opt_properties`. `initialize`
    with `enabled=True` sets `min_loss_scale` and `max_loss_scale`. `init` and `initialize` may set `handle`.

    Attributes:
        allow_incoming_model_not_fp32: whether `initialize` accepts models that are in 16 bits already.
    """

    opt_properties: Any
    handle: Any
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.allow_incoming_model_not_fp32 = False
        self._verbosity = 1
        self._views: list[LossScaler] = []

    @property
    def verbosity(self) -> int:
        """Above 0, messages of the package are printed. Scripts may set it at any time."""
        return self._verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        # print, as Apex did, because scripts search its output
        set_verbosity(value, is_printing=True)
        self._verbosity = value

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The loss scalers. Empty if amp is disabled. Scripts may set their attributes, such as `_loss_scale`.

        Raises AttributeError if neither `initialize` nor `init` is in force.
        """
        session = find_session()
        if session is None and not is_disabled():
            raise AttributeError("loss_scalers: amp.initialize has not been called yet")
        scalers = [] if session is None else session.scalers
        # scripts set attributes of these objects, so return the same ones while the session has the same scalers
        if [view.core for view in self._views] != scalers:
            self._views = [LossScaler.of(scaler) for scaler in scalers]
        return self._views

    def clear_overflow(self, loss_id: int) -> None:
        """Forget that gradients of the loss `loss_id` overflowed. Does nothing before `loss_scalers` was read."""
        if loss_id < len(self._views):
            self._views[loss_id].clear_overflow_state()


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print `msg` if the verbosity is above 0. With `rank0`, print it only on rank 0 of a distributed run."""
    if _amp_state.verbosity > 0 and not (rank0 and find_rank()):
        print(msg)
