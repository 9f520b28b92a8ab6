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
