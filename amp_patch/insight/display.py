"""Functions that show a record in `print` and in notebooks. `notebook` registers the code for each class of records.

Records are the lowest layer of this package and `notebook` is the highest. So records call these functions, and do not
import `notebook`. The package's `__init__` imports `notebook`.
"""

import functools


@functools.singledispatch
def as_text(record: object) -> str:
    """Return the text for `print`."""
    raise NotImplementedError(f"no text for {type(record).__name__}")


@functools.singledispatch
def as_line(record: object) -> str:
    """Return one line that names the record, for `repr`."""
    raise NotImplementedError(f"no line for {type(record).__name__}")


@functools.singledispatch
def as_html(record: object) -> str:
    """Return the HTML for a notebook."""
    raise NotImplementedError(f"no HTML for {type(record).__name__}")
