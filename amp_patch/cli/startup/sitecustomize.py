"""Sets up a script for `amp-patch run` and the other commands that run scripts.

Python imports a module named `sitecustomize` when it starts. A command that runs a script puts the folder of this file
at the front of PYTHONPATH. So the script's Python imports this file, and so can the Pythons that the script starts.

This module can install amp_patch's stand-in for `apex`, redirect the files that the script writes, apply op lists to
its use of torch.autocast, and start a recording. Then it runs the `sitecustomize` that Python would have imported
otherwise.

A script may also start a Python of another installation, of any version, even 2.7, without this package or its
requirements. There, this module must neither fail nor print anything. So annotations are comments, which Python 2
accepts.
"""

import json
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _start():  # type: () -> None
    """Set up this Python for the command that started it, directly or through the script.

    Do nothing in a Python that neither a command of amp-patch nor its script started, in one that is too old for this
    package, and in one of another installation that lacks this package.
    """
    settings = json.loads(os.environ.get("AMP_PATCH_RUN", "null"))
    if settings is None or sys.version_info < (3, 11):
        return
    from importlib.util import find_spec

    is_found = find_spec("amp_patch") is not None
    if settings["python"] == [sys.prefix, sys.version_info[0], sys.version_info[1]]:
        if not is_found:
            # the command imported the package from its working directory, and the script runs in another one
            sys.path.append(settings["root"])
        _install(settings)
    elif is_found:
        # A Python of another installation. The version of the package there may not fit the settings, and may raise
        # any exception. Then forget the modules that were imported.
        modules_before = set(sys.modules)
        try:
            _install(settings)
        except Exception:
            for name in set(sys.modules) - modules_before:
                if name.partition(".")[0] == "amp_patch":
                    del sys.modules[name]


def _install(settings):  # type: (dict) -> None  # type: ignore[type-arg]
    """Do what the settings ask for. If `_watch` raises an error, remove the stand-in again."""
    if "scratch" in settings:
        from amp_patch.scratch.redirect import redirect

        redirect(**settings["scratch"])
    from amp_patch.apex import install

    installed = install(**settings["options"])
    try:
        _watch(settings)
    except Exception:
        installed.remove()
        raise


def _watch(settings):  # type: (dict) -> None  # type: ignore[type-arg]
    """Start the takeover of torch.autocast and the recording, if the settings ask for them."""
    if "native" in settings:
        from amp_patch.cli.recording import remove_marker_at_exit, take_over

        is_first = settings["is_first"]
        # the Pythons that this one starts read this variable, and must not take themselves for the first
        os.environ["AMP_PATCH_RUN"] = json.dumps(dict(settings, is_first=False))
        take_over(is_first=is_first, **settings["native"])
        if is_first and settings["native"]["marker"] is not None:
            remove_marker_at_exit(settings["native"]["marker"])
    if "watch" in settings:
        from amp_patch.cli.recording import record

        record(**settings["watch"])


def _run_next_sitecustomize():  # type: () -> None
    """Import the `sitecustomize` that this module hides, if there is one."""
    if sys.version_info < (3,):  # noqa: UP036
        import imp

        try:
            location = imp.find_module("sitecustomize")
        except ImportError:
            return
        imp.load_module("sitecustomize", *location)
        return
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# remove this folder from the path, so that `_run_next_sitecustomize` does not find this module again
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
try:
    _start()
finally:
    _run_next_sitecustomize()
