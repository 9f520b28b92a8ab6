"""Write docs/figures.svg and docs/figures-narrow.svg: step times and peak memory, from the tables of
benchmarks/README.md. The narrow one has its panels below each other, for a telephone. Both have dark colours.

python tools/draw_figures.py            write the files
python tools/draw_figures.py --print    print the wide one instead
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "benchmarks" / "README.md"
PICTURE, NARROW = ROOT / "docs" / "figures.svg", ROOT / "docs" / "figures-narrow.svg"
WORKLOADS = {"gpt-64": "transformer, width 64", "gpt-256": "transformer, width 256", "mlp": "MLP, width 1024"}
MODES = {"float32": "plain", "O4": "first", "O5": "second"}
"""The class of each mode's bars."""
TITLES = ("time of a step", "peak memory of a step")
NOTE = (
    "AdamW, one thread of a virtual x86 CPU",
    "with bfloat16 instructions, torch 2.13.0;",
    "dashed line: torch.autocast in bfloat16",
)
STYLE = """\
<style>
.paper { fill: #fff } text { fill: #222 } .soft { fill: #555 }
.line { stroke: #222; stroke-dasharray: 3 3 }
.plain { fill: #7b818a } .first { fill: #0072b2 } .second { fill: #d55e00 }
@media (prefers-color-scheme: dark) {
.paper { fill: #1f2129 } text { fill: #e8e8e8 } .soft { fill: #b4b9c0 }
.line { stroke: #e8e8e8 } .plain { fill: #8f959e } .first { fill: #4aa8e8 } .second { fill: #f0803c }
}
</style>"""
PANEL, LABEL, BAR, GAP, HEAD, MARGIN = 340, 58, 14, 8, 26, 12
"""Pixels: width of a panel; left of its bars; heights of a bar, between workloads, of a panel's title; the margin."""


def read_tables(text: str) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Return ratios to torch.autocast by workload and mode: of step times (one micro-batch), of peak memory."""
    times, memory = {}, {}
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[:2] in (["workload", "autocast, ms"], ["workload", "mode"]):
            header = cells
        if "O4+native" in header and cells[0].removesuffix(" x1") in WORKLOADS:
            row = dict(zip(header, cells, strict=True))
            times.update({(cells[0][:-3], mode): float(row[mode].split()[0]) for mode in MODES})
        if header[-1:] == ["to autocast"] and cells[0] in WORKLOADS and cells[1] in MODES:
            memory[cells[0], cells[1]] = float(cells[-1])
        if not line.startswith("|"):
            header = []
    return times, memory


def draw(text: str, *, is_narrow: bool = False) -> str:
    """Return the picture of a text with these tables, its panels side by side or, if it is narrow, below each other."""
    panel_height = HEAD + len(WORKLOADS) * ((len(MODES) + 1) * BAR + GAP)
    width, height = 2 * PANEL + 3 * MARGIN, panel_height + 2 * MARGIN
    if is_narrow:
        width, height = PANEL + 2 * MARGIN, 2 * panel_height + 3 * MARGIN
    lines: list[str] = []
    for place, (title, ratios) in enumerate(zip(TITLES, read_tables(text), strict=True)):
        left, top = MARGIN + place * (PANEL + MARGIN), MARGIN
        if is_narrow:
            left, top = MARGIN, MARGIN + place * (panel_height + MARGIN)
        lines += _panel(title, ratios, left, top, panel_height)
    notes: tuple[str, ...] = (" ".join(NOTE),)
    if is_narrow:
        notes = NOTE
    for note in notes:
        height += 16
        lines.append(f'<text x="{MARGIN}" y="{height - MARGIN}" font-size="11" class="soft">{note}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="13" role="img" aria-label="Step time and peak memory relative to torch.autocast">'
    )
    paper = f'<rect width="{width}" height="{height}" rx="6" class="paper"/>'
    return "\n".join([head, STYLE, paper, *lines, "</svg>", ""])


def _panel(title: str, ratios: dict[tuple[str, str], float], left: int, top: int, height: int) -> Iterator[str]:
    zero = left + LABEL
    scale = (PANEL - LABEL - 36) / max(ratios.values())
    yield f'<text x="{left}" y="{top + 14}" font-weight="bold">{title}, torch.autocast = 1</text>'
    y = top + HEAD
    for workload, name in WORKLOADS.items():
        yield f'<text x="{left}" y="{y + 9}">{name}</text>'
        y += BAR
        for mode, style in MODES.items():
            length = ratios[workload, mode] * scale
            yield f'<text x="{zero - 6}" y="{y + 11}" font-size="11" text-anchor="end" class="soft">{mode}</text>'
            yield f'<rect x="{zero}" y="{y + 1}" width="{length:.1f}" height="{BAR - 2}" class="{style}"/>'
            text = f"{ratios[workload, mode]:.2f}"
            yield f'<text x="{left + PANEL}" y="{y + 11}" font-size="12" text-anchor="end">{text}</text>'
            y += BAR
        y += GAP
    x, bottom = zero + scale, top + height - GAP
    yield f'<line x1="{x:.1f}" y1="{top + HEAD}" x2="{x:.1f}" y2="{bottom}" class="line"/>'


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--print", action="store_true", dest="to_stdout")
    tables = TABLES.read_text(encoding="utf-8")
    if arguments.parse_args().to_stdout:
        print(draw(tables), end="")
    else:
        PICTURE.write_text(draw(tables), encoding="utf-8")
        NARROW.write_text(draw(tables, is_narrow=True), encoding="utf-8")
