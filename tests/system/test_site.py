"""No text of the site is cut off, faint, or broken inside a value, on a screen of 1280 pixels or on a telephone: in a
real browser.

Guards: tools/docs_pages.py, docs/pages.css.
"""

import os
import subprocess
from pathlib import Path

import pytest
from browsing import find_cut_off, find_faint, find_split, needs_a_browser, open_browser, show

ROOT = Path(__file__).resolve().parent.parent.parent
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
WHOLE = "pre > code"
"""What shows all of its width on a large screen."""
CONTENT = ".md-content *, .md-footer *"
UNBROKEN = {"main code, main code *": r"\S-(?=\S)", "main *": r"\S-(?=\d)|\d-(?=\S)|(?<!\S)-(?=\S)"}
"""Texts, and the hyphens in them after which no line may break: all of code; of prose, those of numbers and options."""
BROKEN = """
const all = (selector) => [...document.querySelectorAll(`main ${selector}`)];
const words = all(".whole").filter((word) => word.getClientRects().length > 1);
const before = (element) => element.previousSibling?.textContent ?? "";
const starts = all("wbr").filter((element) => /(^|\\s)[^a-z0-9\\s]+$/i.test(before(element)));
const unknown = all("*").filter((element) => element instanceof HTMLUnknownElement);
const bases = all(".doc-class-bases code").filter((base) => base.textContent.startsWith("_"));
return [...words, ...bases, ...all("pre:has(wbr)"), ...starts.map((start) => start.parentElement), ...unknown]
  .map((broken) => broken.textContent.slice(0, 50));
"""
"""Finds words that are broken, or may break after a sign with which they begin, elements that HTML does not have, and
private bases of classes.
"""

pytestmark = [*needs_a_browser, pytest.mark.skipif(not MKDOCS.exists(), reason="needs .venv-docs: make docs")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [MKDOCS, "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return sorted(folder.glob("*.html"))


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


def test_no_page_is_cut_off_or_faint(browser, pages):
    """Light and 1280 pixels wide, and dark on a telephone."""
    wrong = {}
    for page in pages:
        show(browser, 1280)
        browser.get(page.as_uri())
        cut = find_cut_off(browser, f"{CONTENT}, .md-sidebar--primary *", WHOLE)
        wrong[page.name, 1280] = cut + find_faint(browser, "*") + find_broken(browser)
        show(browser, 390, dark=True)
        browser.get(page.as_uri())
        wrong[page.name, 390] = find_cut_off(browser, CONTENT) + find_faint(browser, "*") + find_broken(browser)
        errors = [entry["message"] for entry in browser.get_log("browser")]
        if page.name != "404.html":  # which has the addresses of a server
            wrong[page.name, "console"] = errors
    assert len(pages) > 25 and {place: texts for place, texts in wrong.items() if texts} == {}


def find_broken(browser):
    broken = browser.execute_script(BROKEN)
    for elements, before in UNBROKEN.items():
        broken += find_split(browser, elements, before)
    return broken


@pytest.mark.parametrize(
    "style, whole, said",
    [
        ("overflow: hidden", "", "hidden"),
        ("overflow: auto", "pre", "scrolls"),
        ("overflow: auto", "", None),
        ("overflow: visible", "", "the page"),
    ],
)
def test_the_check_finds_what_is_cut_off(browser, style, whole, said, tmp_path):
    show(browser, 390)
    page = tmp_path / "page.html"
    page.write_text(f'<meta name=viewport content="width=device-width"><pre style="{style}">{"wide " * 40}</pre>')
    browser.get(page.as_uri())
    cut = find_cut_off(browser, "pre", whole)
    if said is None:
        assert cut == []
    else:
        assert any(said in text for text in cut)


@pytest.mark.parametrize("text, is_split", [("some-thing", True), ("-something", True), ("something-", False)])
def test_the_check_finds_what_is_split(browser, text, is_split, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f'<p style="width: 1px">{text}</p>')
    browser.get(page.as_uri())
    assert bool(find_split(browser, "p", r"-(?=\S)")) is is_split


@pytest.mark.parametrize(
    "style, is_found",
    [
        ("color: #777", True),
        ("color: #767676", False),
        ("color: #000c; background: #777", True),
        ("color: #999; font-size: 30px", True),
        ("color: #777; font-size: 30px", False),
        ("color: #999; visibility: hidden", False),
    ],
)
def test_the_check_finds_what_is_faint(browser, style, is_found, tmp_path):
    show(browser, 390)
    page = tmp_path / "page.html"
    page.write_text(f'<body style="background: #fff"><p style="{style}">text</p>')
    browser.get(page.as_uri())
    assert bool(find_faint(browser, "p")) is is_found
