"""Two policies at once: the error, and who keeps models alive that the user may believe deleted.

All objects of the process are looked through, on the way to that error and nowhere else; `is_in_use` looks at a few.
"""

import gc
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..config import Policy
from ..interrupts import read_locals
from .arguments import describe

HOPS = 4  # so far is a model in a list of an object's attribute from the object's name
MOST = 4  # so many holders are named
NEAR, FEW = 3, 5000

_LEADS_ANYWHERE = (types.FrameType, types.ModuleType, types.FunctionType, type, str, int, float)
_NOT_USER_MODULES = frozenset({"amp_patch", "builtins", "sys", "IPython", "ipykernel"})


def describe_conflict(in_force: Policy, asked: Policy, alive: Sequence[nn.Module], given: Sequence[nn.Module]) -> str:
    """Return why models cannot come under a policy, and what to do.

    Args:
        in_force: of the session.
        asked: the other policy, or the same on another device.
        alive: the models of the session; none: it is a block without models.
        given: the models to come under the other.
    """
    level, other = in_force.opt_level, _describe_difference(in_force, asked)
    ways = "call amp.reset() first, or pass replace=True"
    if not alive:
        return f"opt_level {level} is in force for a session block, and {other} was asked for: leave the block first"
    if any(model is one for model in given for one in alive):
        return (
            f"this {describe(given)} is initialized already, at {level}, and {other} was asked for: {ways}."
            " Calling it again with the same arguments is harmless."
        )
    told = (
        f"opt_level {level} is in force for {describe(alive)}, still in use, and {other} was asked for. Pass"
        f" all models to one initialize call, or delete the old ones, or {ways}."
    )
    holders = find_holders(alive)
    if not holders:
        return told + " No global variable holds them: look at the local variables of functions that are running."
    return f"{told} Held by: {', '.join(holders)}.{_advise(holders)}"


def _describe_difference(in_force: Policy, asked: Policy) -> str:
    """Return what of a policy is other than in the one in force: the level, or else the properties."""
    if asked.opt_level != in_force.opt_level:
        return asked.opt_level
    before, after = dict(in_force.describe()), dict(asked.describe())
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changes = [f"{name} {after.get(name, '-')} instead of {before.get(name, '-')}" for name in names]
    if asked == in_force:
        return "the same level with lists whose files have changed, or on another device,"
    return " and ".join(changes) or "the same level with other bounds of the loss scale"


def _advise(holders: Sequence[str]) -> str:
    advice = ""
    if any(name.startswith("Out[") for name in holders):
        advice += " `%reset -f out` empties Out, _ and __."
    if any(name.endswith(" of IPython") for name in holders):
        advice += " IPython keeps its last output beyond `%reset -f out`: call amp.reset()."
    if any(name.startswith("sys.") for name in holders):
        advice += " `sys.last_exc = sys.last_value = sys.last_traceback = None` lets go of the traceback."
    return advice


def is_in_use(objects: Sequence[object]) -> bool:
    """Tell whether a variable of code that runs leads to any of the objects, `NEAR` hops away at most.

    True is certain, False is not. Looks at no more than `FEW` objects, which takes a few milliseconds.
    """
    wanted = {id(one) for one in objects}
    seen: set[int] = {id(objects)}
    layer: list[object] = []
    for frame in sys._current_frames().values():
        caller: types.FrameType | None = frame
        while caller is not None:
            # variables of this package lead to all objects
            if str(caller.f_globals.get("__name__")).partition(".")[0] not in _NOT_USER_MODULES:
                layer += read_locals(caller)
            caller = caller.f_back
    layer += vars(sys.modules["__main__"]).values() if "__main__" in sys.modules else []
    for _ in range(NEAR):
        found: list[object] = []
        for one in layer:
            if id(one) in wanted:
                return True
            if id(one) not in seen and not isinstance(one, _LEADS_ANYWHERE):
                seen.add(id(one))
                found.append(one)
        layer = gc.get_referents(*found[: FEW - len(seen)])
    return any(id(one) in wanted for one in layer)


def find_holders(objects: Sequence[object]) -> list[str]:
    """Return the names of what holds any of the objects: `Out[3]`, `model`, `sys.last_value`, at most `MOST`."""
    own = {id(sys._getframe()), id(objects)}
    keepers: dict[int, object] = {id(one): one for one in objects}
    found = list(objects)
    for _ in range(HOPS):
        own |= {id(found), id(keepers)}
        referrers = [one for one in gc.get_referrers(*found) if id(one) not in own and id(one) not in keepers]
        own.add(id(referrers))
        found = []
        for one in referrers:
            keepers[id(one)] = one
            # of no interest is what refers to these: namespaces, code that runs, what holds everything
            is_namespace = isinstance(one, dict) and "__name__" in one and "__spec__" in one
            if not is_namespace and not isinstance(one, (types.FrameType, types.ModuleType, type)):
                found.append(one)
        if not found:
            break
    names = [*_in_errors(keepers), *_in_notebook(keepers), *_in_modules(keepers)]
    return list(dict.fromkeys(names))[:MOST]


def _in_errors(keepers: Mapping[int, object]) -> Iterator[str]:
    """Yield the last error of the interpreter, if the traceback of it or of its causes holds any."""
    for name in ("last_exc", "last_value"):
        last = error = getattr(sys, name, None)
        seen: set[int] = set()
        while isinstance(error, BaseException) and id(error) not in seen:
            seen.add(id(error))
            if any(id(frame) in keepers for frame, _ in traceback.walk_tb(error.__traceback__)):
                yield f"sys.{name} (the traceback of {type(last).__name__})"
                return
            error = error.__cause__ or error.__context__


def _in_notebook(keepers: Mapping[int, object]) -> Iterator[str]:
    """Yield the outputs of cells that IPython keeps; else its names for the last ones, kept beyond `%reset`."""
    names: dict[str, Any] = {}
    if "__main__" in sys.modules:
        names = vars(sys.modules["__main__"])
    outputs = names.get("Out", names.get("_oh"))
    found = []
    if isinstance(outputs, dict):
        for number, value in dict(outputs).items():
            if id(value) in keepers:
                found.append(f"Out[{number}]")
    if not found and "get_ipython" in names:
        hidden = getattr(names["get_ipython"](), "user_ns_hidden", {})
        for name in ("_", "__", "___"):
            if id(hidden.get(name)) in keepers:
                found.append(f"{name} of IPython")
    yield from found


def _in_modules(keepers: Mapping[int, object]) -> Iterator[str]:
    """Yield the global variables, those of the user's own code first."""
    modules = sorted(sys.modules.items(), key=lambda item: item[0] != "__main__")
    for name, module in modules:
        is_main_again = name != "__main__" and module is sys.modules.get("__main__")  # of multiprocessing
        if not isinstance(module, types.ModuleType) or is_main_again or name.partition(".")[0] in _NOT_USER_MODULES:
            continue
        for variable, value in list(vars(module).items()):
            if id(value) in keepers and not isinstance(value, types.ModuleType) and not _is_ipython_output(variable):
                yield f"the variable {variable}" + ("" if name == "__main__" else f" of {name}")


def _is_ipython_output(variable: str) -> bool:
    """Tell whether IPython keeps the output of a cell by this name beside `Out[n]`: `_`, `__`, `_3`; or input cells."""
    return variable in ("Out", "_oh") or not variable.strip("_") or variable.lstrip("_").isdecimal()
