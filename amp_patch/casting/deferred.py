"""Listed ops of packages built on torch: patched when their package is imported, and again when it is reloaded."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from ..config import OpLists, op_lists
from ..errors import OpListError
from ..patching import ImportWatch, Patcher, references
from ..reporting import logger
from .op_patches import plan_op
from .wrappers import OpCasts


class DeferredOps:
    """The ops outside torch of one session, patched through its patcher as their packages come, until this is closed.

    Args:
        oplists: the lists of the session.
        overridden: owner and name of the functions that the user registered, to which the lists do not apply.
        casts: makes the replacements.
        patcher: takes the patches.
        lock: held while the patcher is at work. Imports happen in any thread.
    """

    def __init__(
        self,
        oplists: OpLists,
        overridden: Iterable[tuple[Any, str]],
        casts: OpCasts,
        patcher: Patcher,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._deferred = oplists.deferred
        self._spellings = (
            *oplists.deferred,
            *(spelling for spelling in oplists.spellings if spelling.is_outside_torch),
        )
        self._overridden = tuple(overridden)
        self._casts = casts
        self._patcher = patcher
        self._lock = lock
        self._process_id = os.getpid()
        self._is_closed = False
        self._warned: set[op_lists.Spelling] = set()
        self._watch = ImportWatch(self.look_again)

    def __len__(self) -> int:
        return len(self._spellings)

    def open(self) -> None:
        """Wait for the packages that are not imported yet."""
        for spelling in self._deferred:
            path = spelling.owner_name.split(".")
            self._watch.add(".".join(path[:length]) for length in range(1, len(path) + 1))

    def close(self) -> None:
        """Patch nothing any more. Harmless twice."""
        self._watch.close()
        with self._lock:
            self._is_closed = True

    def look_again(self, module_name: str) -> None:
        """Patch what is not patched yet under a module that was imported or reloaded.

        Raises nothing, since it runs inside of somebody's import: what cannot be patched, or turns out not to exist, is
        warned of once.
        """
        if os.getpid() != self._process_id:
            return  # a forked child imports for itself
        functions: dict[int, Callable[..., Any]] = {}
        problems: list[tuple[op_lists.Spelling, str]] = []
        with self._lock:
            concerned = (
                []
                if self._is_closed
                else [one for one in self._spellings if f"{one.owner_name}.".startswith(f"{module_name}.")]
            )
            for spelling in concerned:
                try:
                    functions |= self._patch(spelling, module_name)
                except OpListError as exc:
                    problems.append((spelling, str(exc)))
                except Exception as exc:
                    at = f"{spelling.entry.place}: {spelling.entry.op!r}"
                    problems.append((spelling, f"{at} cannot be patched ({type(exc).__name__}: {exc})"))
            if functions and (stuck := references.redirect([(self._patcher, functions)], ())):
                problems.append((concerned[0], references.describe_stuck(stuck)))
        for spelling, message in problems:  # without the lock: whoever shows warnings may import something
            self._warn(spelling, message)

    def _patch(self, spelling: op_lists.Spelling, complete: str) -> dict[int, Callable[..., Any]]:
        """Patch an op if it is there and not patched yet. Returns its replacement, by the id of the original."""
        owner, name = op_lists.find_owner(spelling, complete), spelling.name
        if (
            owner is None
            or self._patcher.is_in_place(owner, name)
            or any(owner is other and name == taken for other, taken in self._overridden)
        ):
            return {}
        self._patcher.forget(owner, name)
        originals = {id(replacement): original for original, replacement in self._patcher.functions()}
        held = vars(owner).get(name)
        if id(held) in originals:
            # the module imported another patched function by this name: it gets one wrapper, not two
            setattr(owner, name, originals[id(held)])
        self._patcher.install([plan_op(owner, name, spelling.kind, self._casts, spelling.entry.place)])
        return {id(self._patcher.get_original(owner, name)): vars(owner)[name]}

    def _warn(self, spelling: op_lists.Spelling, message: str) -> None:
        if spelling in self._warned:
            return
        self._warned.add(spelling)
        try:
            warnings.warn_explicit(message, UserWarning, spelling.entry.path, spelling.entry.line)
        except UserWarning:  # the user turns warnings into errors; this one would be an error of the import
            logger.warning("%s", message)
