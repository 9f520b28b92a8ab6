"""The version of apex.amp that this package stands in for."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
