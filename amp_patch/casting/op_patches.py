"""Patches of ops: one for every listed spelling and registration; and replacements of what surrounds the ops."""

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..config import OpLists
from ..dtypes import CASTABLE
from ..patching import Patch, Patcher
from ..torch_private import C_NN, get_first_weight
from .mode import Switch
from .weight_cache import WeightCache
from .wrappers import OpCasts

Registration = tuple[Any, str, str]
"""Owner, name and kind of a function that the user registered."""


def plan_ops(oplists: OpLists, registered: Sequence[Registration], casts: OpCasts) -> Iterator[Patch]:
    """Yield a patch for every listed spelling, and for the user's registrations in their place."""
    overridden = {(id(owner), name) for owner, name, _ in registered}
    for spelling in oplists.spellings:
        if (id(spelling.owner), spelling.name) not in overridden:
            yield plan_op(spelling.owner, spelling.name, spelling.kind, casts, spelling.entry.place)
    for owner, name, kind in registered:
        if kind == "neutral":  # taken off whatever list it was on
            continue
        yield plan_op(owner, name, kind, casts)


def with_second_places(planned: Iterable[Patch]) -> Iterator[Patch]:
    """Yield each patch, and the same where graphs of torch.fx and nested tensors refer to a public function."""
    functional = torch.nn.functional
    for patch in planned:
        yield patch
        if patch.owner is functional and vars(functional).get(patch.name) is vars(C_NN).get(patch.name, functional):
            yield Patch(C_NN, patch.name, patch.factory, patch.note)


def plan_op(owner: Any, name: str, kind: str, casts: OpCasts, place: str = "") -> Patch:
    """Return the patch that has `owner.name` follow the rule `kind`, which stands in `place`."""
    note = f"Patched by amp_patch until amp_patch.reset(): {kind}, {place or 'registered'}."
    return Patch(owner, name, lambda original: casts.wrap(kind, original), note)


def replay_regions(original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """Make the recomputation in backward see the casts as the forward saw them, whatever region either runs in."""

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mode = switch.mode_here()

        def replayed(*inner_args: Any, **inner_kwargs: Any) -> Any:
            if switch.mode_here() is mode:
                return function(*inner_args, **inner_kwargs)
            with switch.region(mode):
                return function(*inner_args, **inner_kwargs)

        return original(replayed, *args, **kwargs)

    return checkpoint


def check_shapes_only(original: Callable[..., Any], casts: OpCasts) -> Callable[..., Any]:
    """Recurrent layers refuse an input of another dtype than their weights before the patched op can cast both."""

    def check_input(module: torch.nn.RNNBase, input: torch.Tensor, batch_sizes: torch.Tensor | None) -> None:
        weight = get_first_weight(module)
        if (
            casts.switch.is_on_here()
            and weight is not None
            and input.dtype != weight.dtype
            and {input.dtype, weight.dtype} <= CASTABLE
        ):
            input = torch.empty_like(input, dtype=weight.dtype, device="meta")
        original(module, input, batch_sizes)

    return check_input


def read_originals(original: Callable[..., Any], patcher: Patcher) -> Callable[..., Any]:
    """The TorchScript compiler reads the source of what it compiles, and that of no wrapper.

    What it compiles casts nothing.
    """

    def script(*args: Any, **kwargs: Any) -> Any:
        with patcher.suspended():
            return original(*args, **kwargs)

    return script


def trace_without_cache(original: Callable[..., Any], cache: WeightCache) -> Callable[..., Any]:
    """A trace must record the casts of the weights; a cached copy would be recorded as a constant."""

    def trace(*args: Any, **kwargs: Any) -> Any:
        with cache.bypassed():
            return original(*args, **kwargs)

    return trace


def tell_of_reload(original: Callable[..., Any], tell: Callable[[str], None]) -> Callable[..., Any]:
    """Have `tell(name)` called after `importlib.reload` of a module, which defines its functions anew."""

    def reload(module: types.ModuleType) -> types.ModuleType:
        result: types.ModuleType = original(module)
        tell(result.__name__)
        return result

    return reload
