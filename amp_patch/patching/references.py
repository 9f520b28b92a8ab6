"""Redirects references to patched functions to their replacements, and back to the originals.

A patch replaces `torch.nn.functional.gelu`. A reference is another position that holds the function, such as
`from torch.nn.functional import gelu` in a module, or `self.act = F.gelu` in a model. `Search` finds references.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from . import pickling
from .exchanges import Replacements
from .patcher import Patcher
from .search import Search

MAX_NAMED = 10
"""The largest number of objects that a warning about unreplaced references names."""


def functions_of(patcher: Patcher) -> Replacements:
    """Return the replacement of each patched function, by the id of the function.

    If several patches replace a function, this is the replacement of the last patch.
    """
    return {id(original): replacement for original, replacement in patcher.functions()}


def redirect(
    functions: Sequence[tuple[Patcher, Replacements]], models: Iterable[nn.Module], *, with_modules: bool = True
) -> list[str]:
    """Redirect references to functions to their replacements: in models, and with `with_modules` in imported modules.

    A copy of a model may still hold replacements of an earlier session. Such references are redirected, too.

    Args:
        functions: pairs of a patcher and the replacements of functions that it has patched (see `functions_of`). The
            patcher's `undo` also restores the references that are redirected here.

    Returns the objects found that hold a function where it cannot be replaced, such as "mylib.ACTIVATIONS (deque)".
    """
    models = list(models)
    replacements: dict[int, Callable[..., Any]] = {}
    for _, patched in functions:
        replacements.update(patched)
    if not replacements:
        return []
    # replacements of an earlier session become originals first, so that the search below finds them
    _rewrite(_search_for_retired(), models, with_modules=False)
    search = Search(replacements, _packages_of(replacements.values()))
    search.run(models, with_modules=with_modules)
    for patcher, patched in functions:
        patcher.redirect([exchange for function, exchange in search.result.exchanges if function in patched])
    return search.find_unreplaced()


def undo(patchers: Sequence[Patcher], models: Iterable[nn.Module]) -> None:
    """Undo the patchers, last one first. Then replace references to replacements, in `models` and in imported modules,
    by references to the originals.

    The program has made these references while functions were patched: by `from torch import exp`, or by copying a
    model. If Ctrl-C interrupts this, call it again.
    """
    for patcher in reversed(patchers):
        patcher.undo()
    _rewrite(_search_for_retired(), models, with_modules=True)


def uncover(patcher: Patcher, covers: Sequence[Callable[..., Any]]) -> None:
    """Remove the covers of a patcher (see `Patcher.cover`). Redirect references to a cover to the replacement under it.

    The caller must keep the covers alive meanwhile. If Ctrl-C interrupts this, call it again.
    """
    patcher.uncover()
    replacements = {id(cover): cover.__wrapped__ for cover in covers}  # type: ignore[attr-defined]
    _rewrite(Search(replacements, _packages_of(replacements.values())), (), with_modules=True)


def describe_unreplaced(unreplaced: Sequence[str]) -> str:
    """Return the warning about objects that cannot be redirected."""
    shown = ", ".join(unreplaced[:MAX_NAMED])
    if len(unreplaced) > MAX_NAMED:
        shown += f" and {len(unreplaced) - MAX_NAMED} more"
    return (
        f"some objects hold patched functions where they cannot be replaced, so their calls are not cast: {shown}. "
        "Look the function up when it is called (F.gelu), or create these objects after initialize."
    )


def _search_for_retired() -> Search:
    """Return a search for replacements of closed sessions that something still refers to."""
    return Search(pickling.get_originals(), pickling.get_packages())


def _packages_of(functions: Iterable[Callable[..., Any]]) -> set[str]:
    """Return the top-level packages of functions, by their `__module__`."""
    return {str(function.__module__ or "").partition(".")[0] for function in functions} - {""}


def _rewrite(search: Search, models: Iterable[nn.Module], *, with_modules: bool) -> None:
    """Replace references for good: no patcher records these exchanges, so nothing undoes them."""
    if search.result.replacements:
        search.run(models, with_modules=with_modules)
    for _, exchange in search.result.exchanges:
        exchange.slot.write(exchange.after)
