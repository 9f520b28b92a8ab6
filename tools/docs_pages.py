"""A hook of mkdocs: pages that lie elsewhere in the repository join those of docs/, and links follow them.

Links are written as they work in the repository, relative to the file that they stand in.
"""

import posixpath
import re
from html import unescape
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

SHORT, LONG, TEXT = 17, 48, 160
"""The most characters of a cell or word of code that stays on one line, of a cell that needs no wide column, and of a
cell that is not a text of several sentences.
"""

WHOLE = 40
"""The most characters of code that fit into a line of a telephone: a longer word may break at its hyphens."""

# in prose, what does not break at its hyphen: a word that begins with it, such as an option or -inf; a word with a
# digit, such as 2e-5, a date or gpt-256; and the name of the command
_HYPHENATED = re.compile(r"(?<![\w.-])(?:-+\w[\w.-]*|(?=[\w.+-]*\d)\w[\w.+]*-[\w.+-]*|amp-patch)(?<![.-])(?![\w-])")
_HYPHENATED_IN_BLOCK = re.compile(rf"(?<!\S)(?=\S*-\w)\S{{1,{WHOLE}}}(?!\S)")
# code in a line, not a block; and the names of functions in headings
_CODE = re.compile(r"(?<=<code>)(?<!<pre><span></span><code>)[^<]+(?=</code>)|(?<=function-name\">)[^<]+")
_WORD = re.compile(r"\S+")
# where a long word may break: not after what it begins with, such as an underscore, nor before the suffix of a file
_JOINT = re.compile(r"(?<=[^\s._/(=,][._/(=,])(?!(?:py|ya?ml|md|json)\b)(?=[a-z0-9&\[{])", re.IGNORECASE)
_CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
_TAG = re.compile(r"(<[^>]*>)")
_PRIVATE_BASE = re.compile(r"<code><\w+ [^>]*>_\w+</\w+></code>, ")  # in the list of a class
_SPACE_BEFORE_PARENTHESIS = re.compile(r"(?<=</code>)\s+(?=\)\s)")  # in the type and default of an argument
_WHOLE = '<span class="whole">'
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
    """Return the page with links that lead to their targets in the documentation. Set its weight in searches."""
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
    """Return the page with marks for the style: words that stay whole, where others break, short and long cells."""
    html = _SPACE_BEFORE_PARENTHESIS.sub("", _PRIVATE_BASE.sub("", html))
    html = _CODE.sub(lambda code: _WORD.sub(_mark_word, code[0]), html)
    parts = _TAG.split(html)
    pattern = _HYPHENATED
    for place in range(1, len(parts), 2):
        tag, text = parts[place], parts[place + 1]
        pattern = {"<pre>": _HYPHENATED_IN_BLOCK, "</pre>": _HYPHENATED}.get(tag, pattern)
        if tag != _WHOLE:
            parts[place + 1] = pattern.sub(lambda word: _keep(word[0]), text)
    return _CELL.sub(_measure_cell, "".join(parts))


def _keep(text: str) -> str:
    return f"{_WHOLE}{text}</span>"


def _mark_word(word: re.Match[str]) -> str:
    """Return a word of code that may break at dots and underscores if it is long. Its parts break at no hyphen."""
    pieces = [word[0]]
    if len(unescape(word[0])) > SHORT:
        pieces = _JOINT.split(word[0])
    return "<wbr>".join(_keep(piece) if "-" in piece and len(piece) <= WHOLE else piece for piece in pieces)


def _measure_cell(cell: re.Match[str]) -> str:
    """Return a cell of a table with a class for the length of its text."""
    attributes, content = cell.groups()
    length = len(unescape(_TAG.sub("", content)))
    sizes = {SHORT: "short", LONG: "medium", TEXT: "long"}
    size = next((size for most, size in sizes.items() if length <= most), "text")
    return f'<td class="{size}"{attributes}>{content}</td>'
