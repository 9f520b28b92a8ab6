"""The pages of docs/ as a site, in a real browser: on a wide and a narrow screen, in light and dark, and its search."""

import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from browsing import needs_a_browser, open_browser, show

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
pytestmark = [*needs_a_browser, pytest.mark.skipif(not MKDOCS.exists(), reason="needs mkdocs: run make docs")]

FAULTS = """
const faults = [], rows = document.querySelectorAll('td, th'), blocks = document.querySelectorAll('pre > code');
const cut = (box) => box.scrollWidth > box.clientWidth + 1;
const scrolls = (box) => box && getComputedStyle(box).overflowX === 'auto';
if (cut(document.documentElement)) faults.push('the page scrolls sideways');
for (const cell of rows) if (cut(cell)) faults.push(`cell: ${cell.textContent}`);
for (const table of document.querySelectorAll('.md-typeset table'))
  if (!scrolls(table.parentElement.parentElement) && !scrolls(table)) faults.push(`table: ${table.textContent}`);
for (const code of blocks) {
  if (cut(code) && !scrolls(code)) faults.push(`cut: ${code.textContent}`);
  const button = code.parentElement.querySelector('.md-code__nav');
  if (!button || button.getBoundingClientRect().left < code.getBoundingClientRect().right)
    faults.push(`button: ${code.textContent}`);
}
return faults;
"""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site: its address, and the names of its pages."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([MKDOCS, "build", "--strict", "--quiet", "--site-dir", folder], cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        pages = sorted(path.name for path in folder.glob("*.html") if path.name != "404.html")
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.mark.parametrize("width, dark", [(1280, False), (390, True)], ids=["wide and light", "narrow and dark"])
def test_nothing_is_cut_or_covered(width, dark, browser, site):
    address, pages = site
    browser.get("about:blank")
    browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": address, "storageTypes": "all"})
    show(browser, width, dark=dark)
    browser.get(f"{address}/index.html")
    scheme = browser.execute_script("return document.body.dataset.mdColorScheme")
    assert scheme == ("slate" if dark else "default")
    first = browser.find_element("css selector", "pre > code")
    assert first.get_property("scrollWidth") <= first.get_property("clientWidth")

    found = {}
    for page in pages:
        browser.get(f"{address}/{page}")
        found[page] = browser.execute_script(FAULTS)
    assert len(pages) > 20 and {page: faults for page, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "question, answer",
    [("loss is nan", "nan.html"), ("GradScaler", "autocast.html"), ("O2 or O5", "levels.html")],
)
def test_a_search_finds_its_page_first(question, answer, browser, site):
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.wait import WebDriverWait

    show(browser, 1280)
    browser.get(f"{site[0]}/index.html")
    field = browser.find_element("css selector", "input.md-search__input")
    field.click()
    field.send_keys(question)

    def is_first(_):  # results are drawn anew with each letter
        results = browser.find_elements("css selector", "a.md-search-result__link")
        return bool(results) and results[0].get_attribute("href").partition("?")[0].endswith(f"/{answer}")

    WebDriverWait(browser, 20, ignored_exceptions=[StaleElementReferenceException]).until(is_first)
