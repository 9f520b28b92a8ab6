"""Pages in a real browser: Debian's chromium and chromium-driver, without a window."""

import shutil
from contextlib import contextmanager

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")

BROWSERS = [shutil.which(name) for name in ("chromium", "chromedriver")]
needs_a_browser = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(None in BROWSERS, reason="needs chromium and chromium-driver (apt)"),
]


@contextmanager
def open_browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSERS[0]
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(BROWSERS[1]))
    yield browser
    browser.quit()


def show(browser, width, *, dark=False):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


_FIND_CUT_OFF = """
const cut = [], width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width) cut.push(`the page: ${document.documentElement.scrollWidth} px`);
const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
const isIn = (element) => element && (scrolls(element) || isIn(element.parentElement));
for (const element of document.querySelectorAll(arguments[0])) {
  const name = `${element.tagName} ${element.textContent.trim().slice(0, 50)}`, style = getComputedStyle(element);
  if (!element.clientWidth || element.closest("svg") || style.visibility === "hidden") continue;
  const isWide = element.scrollWidth > element.clientWidth + 1;
  if (isWide && ["hidden", "clip"].includes(style.overflowX)) cut.push(`${name}: hidden`);
  if (isWide && arguments[1] && element.matches(arguments[1])) cut.push(`${name}: scrolls`);
  if (element.getBoundingClientRect().right > width + 1 && !isIn(element)) cut.push(`${name}: outside`);
}
return cut;
"""


def find_cut_off(browser, elements, whole=""):
    """What of the elements (CSS) is hidden, or outside of the window and not in a box that scrolls; a text for each.

    `whole` are those that may not scroll either.
    """
    return browser.execute_script(_FIND_CUT_OFF, elements, whole)
