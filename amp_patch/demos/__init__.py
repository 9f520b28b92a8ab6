"""Techniques that people train with, as runs on real data: each prints a table and, if asked for, draws a picture.

`amp-patch demo NAME` starts one. The names and what each shows are in `DEMOS`; a demo is the module of its name.
"""

from .catalogue import DEMOS, LEVELS, Demo, Options, find_demo, require_packages

__all__ = ["DEMOS", "LEVELS", "Demo", "Options", "find_demo", "require_packages"]
