"""`amp-patch run`: a script written for NVIDIA Apex, unmodified, with the stand-in for `apex` in place.

The script runs as `python script.py` would run it: as `__main__`, with its own `sys.argv` and `sys.path[0]`, its exit
code, and its traceback below a few frames of this module. Processes that it spawns through multiprocessing get the
stand-in as well.
"""

import argparse
import builtins
import importlib.util
import multiprocessing.spawn
import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any, NoReturn

from ..apex import install
from ..config import load_oplists, make_policy, shipped
from ..errors import AmpError

SUMMARY = "run a script written for NVIDIA Apex, unmodified"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own options; what follows the script's name, or `-m`'s module, is the script's."""
    parser.usage = "%(prog)s [--opt-level LEVEL] [--lists LIST] [--force] [--] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    parser.add_argument(
        "--opt-level", type=_opt_level, metavar="LEVEL", help="the level to use, whatever the script says: O0 to O5"
    )
    parser.add_argument(
        "--lists",
        type=_oplist,
        action="append",
        default=[],
        metavar="LIST",
        help=(
            "an op list (a shipped name or a .yaml file) to lay over the list apex at O1 and O4; may be repeated, and"
            " later ones win"
        ),
    )
    parser.add_argument("--force", action="store_true", help="take the stand-in even where an installed apex has amp")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")


def _opt_level(text: str) -> str:
    try:
        make_policy(text, {})
    except AmpError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _oplist(text: str) -> str:
    """Return a shipped name, or an absolute path: scripts change their working directory."""
    try:
        load_oplists(("apex", text))
    except AmpError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text if text in shipped.shipped_names() else os.path.abspath(text)


def run(arguments: argparse.Namespace) -> None:
    """Run the script. Whatever it raises passes through, `SystemExit` and KeyboardInterrupt included."""
    script = arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script
    command = arguments.module if arguments.module is not None else script
    if not command:
        arguments.parser.error("name a script, or a module with -m")
    if arguments.module is None and not os.path.exists(command[0]):
        arguments.parser.error(f"can't open file {os.path.abspath(command[0])!r}: no such file")
    options = {"opt_level": arguments.opt_level, "lists": tuple(arguments.lists), "force": arguments.force}
    sys.argv[:] = command
    start, folder = _choose_start(command[0], is_module=arguments.module is not None)
    if not getattr(sys.flags, "safe_path", False):  # then Python had put nothing there
        sys.path[0] = folder
    install(**options)
    _pass_on_to_children(options)
    start(command[0])


def _choose_start(target: str, *, is_module: bool) -> tuple[Callable[[str], None], str]:
    """Return what runs the target, and its `sys.path[0]`."""
    if is_module:
        return _run_module, os.getcwd()
    if os.path.isdir(target) or PathFinder.find_spec("__main__", [target]) is not None:
        return _run_folder, os.path.abspath(target)
    return _run_file, os.path.dirname(os.path.realpath(target))


def _run_file(script: str) -> None:
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    _run_as_main(loader.source_to_code(loader.get_data(path), path), {"__file__": path, "__loader__": loader})


def _run_folder(folder: str) -> None:
    """Run the `__main__` in a folder or a zip file."""
    spec = PathFinder.find_spec("__main__", [os.path.abspath(folder)])
    if spec is None or not _run_spec(spec):
        _refuse(f"can't find '__main__' module in {folder!r}")


def _run_module(name: str) -> None:
    spec = _find_module(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_module(f"{name}.__main__")
        if spec is None:
            _refuse(f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed")
    if spec is not None:
        sys.argv[0] = str(spec.origin)
    if spec is None or not _run_spec(spec):
        _refuse(f"No module named {name}")


def _run_spec(spec: ModuleSpec) -> bool:
    """Run a module as `__main__`; return False if it has no code."""
    loader: Any = spec.loader
    code = None if loader is None else loader.get_code(spec.name)
    if code is not None:
        _run_as_main(
            code,
            {
                "__file__": spec.origin,
                "__loader__": loader,
                "__spec__": spec,
                "__package__": spec.parent,
                "__cached__": spec.cached,
            },
        )
    return code is not None


def _find_module(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            return None
        raise  # a package on the way needs something that is missing


def _refuse(message: str) -> NoReturn:
    sys.exit(f"amp-patch run: {message}")


def _run_as_main(code: types.CodeType, attributes: dict[str, Any]) -> None:
    """Run code in a new `__main__`, which stays: exit handlers, threads and pickles look for it until the end."""
    module = types.ModuleType("__main__")
    vars(module).update({"__builtins__": builtins, **attributes})
    sys.modules["__main__"] = module
    exec(code, vars(module))


# ---- processes that the script spawns --------------------------------------------------------------------------------


class _Installation:
    """Unpickled in a spawned process, before that imports the script: installs the stand-in there."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def __reduce__(self) -> tuple[Callable[..., None], tuple[dict[str, Any]]]:
        return _install_in_child, (self._options,)


def _install_in_child(options: dict[str, Any]) -> None:
    install(**options)
    _pass_on_to_children(options)


def _pass_on_to_children(options: dict[str, Any]) -> None:
    original = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "amp_patch": _Installation(options)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
