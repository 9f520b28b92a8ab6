"""The HTML page of a check, which compares a run with a contract: the broken promises, and the curves of the contract,
with their bands, and of the run.
"""

import os
from collections.abc import Iterator

from ...files import write_file
from ..report import Markup, Series, break_names, draw_figure, element, make_page
from .contract import Contract, StepsRecord
from .verdict import Verdict

_SHOWN = 10
"""The number of broken promises that are always shown. A click shows the others."""


def write_page(
    path: str | os.PathLike[str], contract: Contract, now: Contract, verdict: Verdict, *, command: str = ""
) -> None:
    """Write the page to a file.

    Args:
        now: the results of the check, as a contract without bands.
        command: the command line to show.
    """
    about = contract.about
    terms = [
        ("script", about.script),
        ("level", about.level),
        ("torch", about.torch if about.torch == now.about.torch else f"{about.torch}, now {now.about.torch}"),
        ("steps", str(about.steps)),
        ("command", command),
    ]
    title = "The contract holds" if verdict.holds else "The contract is broken"
    sections = [_list_breaks(verdict), *_draw_curves(contract, now)]
    write_file(path, make_page(title, terms, sections, colours=("promised", "now")))


def _list_breaks(verdict: Verdict) -> Markup:
    items: list[Markup] = []
    for broken in verdict.breaks:
        site = f" ({broken.site})" if broken.site else ""
        items.append(element("li", break_names(f"{broken.kind}: {broken.text}{site}")))
    notes = [element("li", break_names(note)) for note in verdict.notes]
    if items:
        parts = [element("h2", "Causes before effects"), element("ol", *items[:_SHOWN])]
        if len(items) > _SHOWN:
            summary = element("summary", f"{len(items) - _SHOWN} more")
            parts.append(element("details", summary, element("ol", *items[_SHOWN:], start=_SHOWN + 1)))
    elif notes:
        parts = [element("h2", "Notes")]
    else:
        return Markup("")
    if notes:
        parts.append(element("ul", *notes, class_="notes"))
    return element("section", *parts)


def _draw_curves(contract: Contract, now: Contract) -> Iterator[Markup]:
    (measured,) = now.numbers.values()  # `now` was measured on one kind of hardware
    promised = contract.numbers.get(measured.hardware.name)
    if promised is None:
        return
    figures = []
    for curve in promised.curves:
        curve_now = measured.curve(curve.name)
        if curve_now is not None and curve.values and curve.name != "skipped":
            band = ", with its band," if any(curve.bands) else ""
            caption = f"The {curve.name} of each {curve.noun}: promised{band} and now."
            figures.append(
                draw_figure([_band_of(curve), _line_of(curve_now)], caption, label=curve.name, has_keys=True)
            )
    if figures:
        yield element("section", element("h2", "Curves"), element("div", *figures, class_="pair"))


def _band_of(curve: StepsRecord) -> Series:
    pairs = list(zip(curve.values, curve.bands, strict=True))
    low = [value - (band or 0.0) for value, band in pairs]
    high = [value + (band or 0.0) for value, band in pairs]
    return Series("promised", 0, curve.values, low, high)


def _line_of(curve: StepsRecord) -> Series:
    return Series("now", 1, curve.values, curve.values, curve.values)
