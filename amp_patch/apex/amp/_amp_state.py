"""`_amp_state`: the object through which scripts look into amp, and now and then reach in.

As in Apex, this module and the object in it share a name: `amp._amp_state` is the object, `apex.amp._amp_state` in an
import the module.
"""

from typing import Any

from ...reporting import say, say_on_every_rank, set_verbosity
from .._core import api, find_session, is_disabled
from .scaler import LossScaler

master_params = api.master_params


class AmpState:
    """The state of amp.

    `opt_properties`, `handle` and the bounds of the loss scale are there from the first `initialize` on.

    Attributes:
        allow_incoming_model_not_fp32: accept models that are in 16 bits already.
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
        """0 prints nothing, from now on."""
        return self._verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        # Apex printed to stdout, and scripts search its output
        set_verbosity(value, is_printing=True)
        self._verbosity = value

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The loss scalers, empty when amp is disabled. Scripts may set their attributes, such as `_loss_scale`.

        AttributeError before `initialize`.
        """
        session = find_session()
        if session is None and not is_disabled():
            raise AttributeError("loss_scalers: amp.initialize has not been called yet")
        scalers = [] if session is None else session.scalers
        # a view holds attributes that the script has set, so it lasts as long as its scaler
        if [view.core for view in self._views] != scalers:
            self._views = [LossScaler.of(scaler) for scaler in scalers]
        return self._views

    def clear_overflow(self, loss_id: int) -> None:
        """Forget the overflow of a loss, as each `scale_loss` block does at its end."""
        if loss_id < len(self._views):
            self._views[loss_id].clear_overflow_state()


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print `msg` if the verbosity is above 0; with `rank0`, in a distributed run on rank 0 only."""
    if _amp_state.verbosity > 0:
        (say if rank0 else say_on_every_rank)("%s", msg)
