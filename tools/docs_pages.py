"""A hook of mkdocs: pages that lie elsewhere in the repository join those of docs/, and links follow them.

Links are written as they work in the repository, relative to the file that they stand in.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "lists/README.md": "list-format.md",
}
"""Where a file of the repository is in the documentation."""

BOOST = {
    "index.md": 0.5,
    "which.md": 2,
    "levels.md": 4,
    "autocast.md": 2,
    "nan.md": 2,
    "quiet.md": 2,
    "changelog.md": 0,
}
"""How much more a search weighs what it finds in a page; 0 leaves the page out."""

_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_TAG = re.compile(r"(<[^>]*>)")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
_sources = {page: source for source, page in PAGES.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages, and the lists themselves, which pages link to."""
    lists = {
        path.relative_to(ROOT).as_posix() for pattern in ("*.yaml", "*.json") for path in ROOT.glob(f"lists/{pattern}")
    }
    for source, page in {**PAGES, **{name: name for name in lists}, "LICENSE": "LICENSE.txt"}.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Have links of a page lead to where their targets are in the documentation, and searches weigh the page."""
    name = page.file.src_uri
    boost = BOOST.get(name, 1)
    page.meta["search"] = {"boost": boost, "exclude": boost == 0}
    folder = posixpath.dirname(_sources.get(name, f"docs/{name}"))

    def follow(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if not (ROOT / target).exists():  # mkdocs tells of it, or it is code
            return link[1]
        moved = PAGES.get(target, "LICENSE.txt" if target == "LICENSE" else target.removeprefix("docs/"))
        return posixpath.relpath(moved, posixpath.dirname(name) or ".")

    return _LINK.sub(follow, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Mark the options of commands, so that the style can keep each on one line."""
    parts = _TAG.split(html)
    parts[::2] = [_OPTION.sub(r'<span class="option">\g<0></span>', text) for text in parts[::2]]
    return "".join(parts)
