"""No text of the site is cut off, on a screen of 1280 pixels or on a telephone: in a real browser.

Guards: tools/docs_pages.py, docs/pages.css.
"""

import os
import subprocess
from pathlib import Path

import pytest
from browsing import find_cut_off, needs_a_browser, open_browser, show

ROOT = Path(__file__).resolve().parent.parent.parent
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
WHOLE = "pre > code"
"""What shows all of its width on a large screen."""

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


def test_no_page_is_cut_off(browser, pages):
    cut = {}
    for page in pages:
        show(browser, 1280)
        browser.get(page.as_uri())
        cut[page.name, 1280] = find_cut_off(browser, ".md-content *, .md-footer *, .md-sidebar--primary *", WHOLE)
        show(browser, 390)
        cut[page.name, 390] = find_cut_off(browser, ".md-content *, .md-footer *")
    assert len(pages) > 25 and {place: texts for place, texts in cut.items() if texts} == {}


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
