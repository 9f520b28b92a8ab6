"""`WatchingMode`: base class of the dispatch modes that only watch ops, and change nothing."""

from typing import Any

from ..events import add_watching_modes
from ..torch_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):
    """A dispatch mode that `events.count_watching_modes` counts while it is on: some code reacts to all other modes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        add_watching_modes(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        add_watching_modes(-1)
