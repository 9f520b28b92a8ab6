"""Op lists: which torch functions run in the low dtype, which in float32, which in the widest type of their arguments.

A list is a YAML file with these keys, all optional:

    description        free text
    extends            a shipped list, a path relative to this file, or a list of those; read first, so this file wins
    whitelist          ops that run in the low dtype
    blacklist          ops that run in float32
    promote            ops that run in the widest dtype among their arguments
    sequence_promote   the same for ops whose first argument is a sequence of tensors
    banned             ops that refuse 16-bit arguments
    neutral            ops that come off whatever list an earlier file put them on
    modules            rules for parts of a model, by name or by type: see `module_rules`
    inplace_blacklist  what the in-place twin of a blacklisted op does to a 16-bit tensor: `match` (default) computes in
                       the tensor's own dtype, `error` refuses

An entry is a name or `{op: name, why: reason, since: "2.12", until: "2.14", optional: true}`: `since` is the first
torch version the entry applies to, `until` the first it no longer applies to, `optional` lets torch lack the op.

A bare name (`softmax`) means every spelling of the op, a dotted name that one spelling; `op_names` finds them. In-place
twins (`exp_` of `exp`) follow by rule. Reading a list imports nothing and runs nothing.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import OpListError
from .diagnostics import Diagnostics
from .diagnostics import Finding as Finding
from .list_file import OpEntry as OpEntry
from .op_names import find_deferred, inplace_twin
from .op_names import find_spellings as find_spellings
from .overlay import OpLists as OpLists
from .overlay import Overlay
from .overlay import Spelling as Spelling
from .overlay import locate as locate
from .products import find_products as find_products
from .products import is_product as is_product
from .products import is_without_kernel as is_without_kernel
from .rules import MEANINGS as MEANINGS
from .rules import RULES as RULES
from .rules import Rule as Rule
from .shipped import shipped_names
from .yaml_nodes import read_bytes


def load_oplists(spec: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> OpLists:
    """Return the lists that `spec` names: a shipped name, a path, or a sequence of those, of which later ones win.

    Raises OpListError, with its place where the fault is in a file, before anything has been changed anywhere.
    """
    specs = [spec] if isinstance(spec, (str, os.PathLike)) else list(spec) if isinstance(spec, (list, tuple)) else []
    if not specs or not all(isinstance(one, (str, os.PathLike)) for one in specs):
        raise OpListError(
            f"op lists {spec!r}: give a shipped name ({', '.join(shipped_names())}), a path, or a non-empty list of"
            " those"
        )
    names = tuple(str(os.fspath(one)) for one in specs)
    paths = []
    for one in specs:
        try:
            paths.append(locate(one, Path()))
        except OpListError as error:
            raise OpListError(f"op list {os.fspath(one)!r}: {error}") from None
    key = (names, tuple(map(str, paths)), torch.__version__)
    loaded = _loaded.pop(key, None)
    if loaded is None or not loaded.is_current():
        loaded = _Loaded(names, paths)
    if not loaded.has_warned:  # a warning comes each time
        _loaded[key] = loaded
    while len(_loaded) > MAX_LOADED:
        del _loaded[next(iter(_loaded))]
    return loaded.lists


class _Loaded:
    """Resolved lists, and what they were made of: an edit of a file or an import of a package makes others of them."""

    def __init__(self, names: tuple[str, ...], paths: Sequence[Path]) -> None:
        diagnostics = Diagnostics()
        overlay = Overlay(diagnostics)
        for path in paths:
            overlay.add(path)
        self.lists = overlay.resolve(names)
        self.has_warned = diagnostics.has_warned
        self._files = overlay.files
        self._found = overlay.found
        self._twins = overlay.twins

    def is_current(self) -> bool:
        """Tell whether reading the files again would give the same: they are unchanged, and each op is found where it
        was, and nowhere else.
        """
        try:
            return (
                all(read_bytes(path, OpListError) == content for path, content in self._files.items())
                and all(find_spellings(op, may_be_missing=True) == found for op, found in self._found.items())
                and all(inplace_twin(key) == twin for key, twin in self._twins.items())
                and all(rule.find_problem() is None for rule in self.lists.modules)
            )
        except OpListError:
            return False


MAX_LOADED = 16
_loaded: dict[object, _Loaded] = {}  # the one that was asked for last comes last


def check_oplists(path: Path) -> Diagnostics:
    """Return all faults of a list file and of those it extends, and what is no fault but has no effect.

    Raises nothing.
    """
    diagnostics = Diagnostics(is_collecting=True)
    with diagnostics:
        Overlay(diagnostics).add(path)
    return diagnostics


def find_owner(spelling: Spelling, complete: str) -> object | None:
    """Return who owns a deferred op, now that the module `complete` has run, or None while it may still be imported.

    Raises OpListError, with the place of the entry, if it cannot be.
    """
    entry = spelling.entry
    try:
        return find_deferred(entry.op, complete)
    except OpListError as error:
        raise OpListError(str(error), entry.path, entry.line, entry.column) from None
