"""Every Python below `amp-patch run` imports this module, because the command puts this folder on PYTHONPATH.

It installs the stand-in for `apex`, the takeover of torch.autocast, and the recording of steps. Then it runs the
`sitecustomize` that Python would have imported without it.

A Python of another installation may have any version, even 2.7, and may lack this package or its requirements. Nothing
is installed or printed there.
"""

import json
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _start():  # type: () -> None
    settings = json.loads(os.environ.get("AMP_PATCH_RUN", "null"))
    if settings is None or sys.version_info < (3, 11):
        return
    from importlib.util import find_spec

    is_found = find_spec("amp_patch") is not None
    if settings["python"] == [sys.prefix, sys.version_info[0], sys.version_info[1]]:
        if not is_found:
            sys.path.append(settings["root"])  # the package was in the working directory of the command
        _install(settings)
    elif is_found:
        before = set(sys.modules)
        try:
            _install(settings)
        except Exception:  # another version of Python or of the package may raise anything
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == "amp_patch":
                    del sys.modules[name]


def _install(settings):  # type: (dict) -> None  # type: ignore[type-arg]
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
    if "native" in settings:
        from amp_patch.cli.recording import forget_told, take_over

        is_first = settings["is_first"]
        os.environ["AMP_PATCH_RUN"] = json.dumps(dict(settings, is_first=False))  # for the Pythons that this one starts
        take_over(is_first=is_first, **settings["native"])
        if is_first and settings["native"]["told"] is not None:
            forget_told(settings["native"]["told"])
    if "watch" in settings:
        from amp_patch.cli.recording import record

        record(**settings["watch"])


def _run_the_next():  # type: () -> None
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


# otherwise `_run_the_next` would find this module
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
try:
    _start()
finally:
    _run_the_next()
