"""Write docs/figures.svg: step times and peak memory, from the tables of benchmarks/README.md.

python tools/draw_figures.py            write the file
python tools/draw_figures.py --print    print it instead
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "figures.svg"
WORKLOADS = {"gpt-64": "transformer, width 64", "gpt-256": "transformer, width 256", "mlp": "MLP, width 1024"}
MODES = {"float32": "#8a8f98", "O4": "#0072b2", "O5": "#d55e00"}
WIDTH, LEFT, BAR, GAP, TOP = 780, 165, 13, 20, 64
PANEL = 280
"""Pixels: of the picture, left of the bars, of a bar, between workloads, above the bars, of a panel."""


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


def draw(text: str) -> str:
    """Return the picture of a text with these tables."""
    height = TOP + len(WORKLOADS) * (len(MODES) * BAR + GAP) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        ' font-size="12" role="img" aria-label="Step time and peak memory relative to torch.autocast">',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
    ]
    for place, (title, ratios) in enumerate(
        zip(("time of a step", "peak memory of a step"), read_tables(text), strict=True)
    ):
        lines += _panel(title, ratios, LEFT + place * (PANEL + 30), height)
    for index, (mode, colour) in enumerate(MODES.items()):
        lines.append(f'<rect x="{12 + index * 76}" y="13" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{26 + index * 76}" y="22" fill="#222">{mode}</text>')
    for index, name in enumerate(WORKLOADS.values()):
        middle = TOP + index * (len(MODES) * BAR + GAP) + 1.5 * BAR + 4
        lines.append(f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" fill="#222">{name}</text>')
    lines.append(
        f'<text x="12" y="{height - 10}" font-size="11" fill="#555">AdamW, one thread of a virtual x86 CPU with'
        " bfloat16 instructions, torch 2.13.0; dashed line: torch.autocast in bfloat16</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def _panel(title: str, ratios: dict[tuple[str, str], float], left: int, height: int) -> Iterator[str]:
    scale = (PANEL - 40) / max(ratios.values())
    x = left + scale
    yield f'<line x1="{x:.1f}" y1="54" x2="{x:.1f}" y2="{height - 30}" stroke="#222" stroke-dasharray="3 3"/>'
    yield f'<text x="{left}" y="48" font-weight="bold" fill="#222">{title}, torch.autocast = 1</text>'
    for row, workload in enumerate(WORKLOADS):
        for index, (mode, colour) in enumerate(MODES.items()):
            value, y = ratios[workload, mode], TOP + row * (len(MODES) * BAR + GAP) + index * BAR
            yield f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="{BAR - 2}" fill="{colour}"/>'
            yield (
                f'<text x="{left + value * scale + 4:.1f}" y="{y + 9.5}" font-size="11" fill="#222" stroke="#ffffff"'
                f' stroke-width="3" paint-order="stroke">{value:.2f}</text>'
            )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--print", action="store_true", dest="to_stdout")
    picture = draw((ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"))
    if arguments.parse_args().to_stdout:
        print(picture, end="")
    else:
        PICTURE.write_text(picture, encoding="utf-8")
