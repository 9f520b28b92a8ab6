"""Imported by every Python that starts below `amp-patch run`, which puts this folder on PYTHONPATH: installs the
stand-in for `apex`, what lays lists over torch.autocast, and what records steps, then runs the `sitecustomize` that
would have been imported without it.
"""

import importlib.util
import json
import os
import sys
from importlib.machinery import PathFinder

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    settings = json.loads(os.environ.get("AMP_PATCH_RUN", "null"))
    if settings is None:
        return
    if importlib.util.find_spec("amp_patch") is None:
        sys.path.append(settings["root"])  # it was found in the working directory
    os.environ["AMP_PATCH_RUN"] = json.dumps({**settings, "is_first": False})  # for those that this one starts
    from amp_patch.apex import install

    install(**settings["options"])
    if "native" in settings:
        from amp_patch.cli.recording import take_over

        take_over(is_first=settings["is_first"], **settings["native"])
    if "watch" in settings:
        from amp_patch.cli.recording import record

        record(**settings["watch"])


def _run_the_next() -> None:
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
_install()
_run_the_next()
