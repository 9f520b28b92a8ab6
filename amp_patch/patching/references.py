"""References to patched functions, redirected to replacements and back: what sessions do with `Search`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import pickling
from .patcher import Patcher
from .search import Functions, Search

MAX_NAMED = 10  # of what cannot be redirected


def functions_of(patcher: Patcher) -> Functions:
    """Return the replacement of each function that is patched, by the id of the function.

    Of several, the one that was put in last.
    """
    return {id(original): replacement for original, replacement in patcher.functions()}


def redirect(
    functions: Sequence[tuple[Patcher, Functions]], models: Iterable[torch.nn.Module], *, with_modules: bool = True
) -> list[str]:
    """Have what refers to one of the functions refer to its replacement: in models, and in the imported modules. Their
    patchers can undo it.

    Replacements that a copy of a model kept from an earlier session are redirected like their originals. Returns what
    could not be redirected.
    """
    models, wanted = list(models), {key: replacement for _, some in functions for key, replacement in some.items()}
    if not wanted:
        return []
    _rewrite(Search(pickling.get_originals()), models, with_modules=False)
    search = Search(wanted, _packages_of(wanted.values()))
    for model in models:
        search.search_model(model)
    if with_modules:
        search.search_modules()
    for patcher, some in functions:
        patcher.redirect([redirection for redirection in search.found if id(redirection.function) in some])
    return search.find_stuck()


def undo(patchers: Sequence[Patcher], models: Iterable[torch.nn.Module]) -> None:
    """Undo the patchers, last one first, and give the originals back to whatever took hold of a replacement while it
    was in. Interrupted, it is to be called again.
    """
    for patcher in reversed(patchers):
        patcher.undo()
    _rewrite(Search(pickling.get_originals(), pickling.get_packages()), models, with_modules=True)


def uncover(patcher: Patcher, covers: Sequence[Callable[..., Any]]) -> None:
    """Take the covers off, and give the replacements to whatever took hold of a cover. Interrupted, it is to be called
    again. The covers are kept alive by the caller.
    """
    patcher.uncover()
    replacements = {id(cover): cover.__wrapped__ for cover in covers}  # type: ignore[attr-defined]
    _rewrite(Search(replacements, _packages_of(replacements.values())), (), with_modules=True)


def describe_stuck(stuck: Sequence[str]) -> str:
    """Return the warning about what could not be redirected."""
    shown = ", ".join(stuck[:MAX_NAMED]) + (f" and {len(stuck) - MAX_NAMED} more" if len(stuck) > MAX_NAMED else "")
    return (
        f"patched functions are also held where they cannot be exchanged, and calls from there are not cast: {shown}. "
        "Look the function up when it is called (F.gelu), or make these objects after initialize."
    )


def _packages_of(replacements: Iterable[Callable[..., Any]]) -> set[str]:
    return {str(replacement.__module__ or "").partition(".")[0] for replacement in replacements} - {""}


def _rewrite(search: Search, models: Iterable[torch.nn.Module], *, with_modules: bool) -> None:
    """Write what is found, for good."""
    if search.is_idle:
        return
    for model in models:
        search.search_model(model)
    if with_modules:
        search.search_modules()
    for redirection in search.found:
        redirection.slot.write(redirection.after)
