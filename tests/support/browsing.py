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
  const { left, right } = element.getBoundingClientRect();
  if (element.matches("svg text") && (left < 0 || right > width)) cut.push(`${name}: from ${left} to ${right}`);
  if (!element.clientWidth || element.closest("svg") || style.visibility === "hidden") continue;
  const isWide = element.scrollWidth > element.clientWidth + 1;
  if (isWide && ["hidden", "clip"].includes(style.overflowX)) cut.push(`${name}: hidden`);
  if (isWide && arguments[1] && element.matches(arguments[1])) cut.push(`${name}: scrolls`);
  if (right > width + 1 && !isIn(element)) cut.push(`${name}: outside`);
}
return cut;
"""


def find_cut_off(browser, elements, whole=""):
    """What of the elements (CSS) is hidden, or outside of the window and not in a box that scrolls; a text for each.

    `whole` are those that may not scroll either.
    """
    return browser.execute_script(_FIND_CUT_OFF, elements, whole)


_FIND_SPLIT = """
const split = [], range = document.createRange(), pattern = new RegExp(arguments[1], "gi");
const top = (node, place) => {
  range.setStart(node, place);
  range.setEnd(node, place + 1);
  return range.getBoundingClientRect();
};
for (const element of document.querySelectorAll(arguments[0])) {
  for (const node of element.childNodes) {
    if (node.nodeType !== Node.TEXT_NODE) continue;
    for (const found of node.data.matchAll(pattern)) {
      const end = found.index + found[0].length;
      const [last, first] = [top(node, end - 1), top(node, end)];
      if (last.height && first.height && first.top >= last.bottom)
        split.push(`${element.tagName} ${node.data.slice(found.index, end)}|${node.data.slice(end, end + 20)}`);
    }
  }
}
return split;
"""


def find_split(browser, elements, before):
    """Where texts of the elements (CSS) break directly after what `before` matches, a regular expression of JavaScript.

    The character after it has to be in the same text.
    """
    return browser.execute_script(_FIND_SPLIT, elements, before)


_FIND_FAINT = """
const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
const pixel = canvas.getContext("2d", { willReadFrequently: true });
const colours = new Map();
const parse = (colour) => {
  if (!colours.has(colour)) {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = colour;
    pixel.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = pixel.getImageData(0, 0, 1, 1).data;
    colours.set(colour, [red, green, blue, alpha / 255]);
  }
  return colours.get(colour);
};
const lay = (over, under) => under.map((part, n) => part * (1 - over[3]) + over[n] * over[3]);
const light = (colour) => colour.map((part) => part / 255)
  .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
const grounds = new Map();
const ground = (element) => {
  if (!element) return [255, 255, 255];
  if (!grounds.has(element))
    grounds.set(element, lay(parse(getComputedStyle(element).backgroundColor), ground(element.parentElement)));
  return grounds.get(element);
};
const faint = new Set();
for (const element of document.querySelectorAll(arguments[0])) {
  const texts = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
  const text = texts.map((node) => node.textContent).join(" ").trim();
  if (!text || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
  const style = getComputedStyle(element), under = ground(element);
  const [dark, bright] = [light(lay(parse(style.color), under)), light(under)].sort((a, b) => a - b);
  const contrast = (bright + 0.05) / (dark + 0.05), needed = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
  const name = `${element.tagName}.${element.className} ${text.slice(0, 40)}`;
  if (contrast < needed) faint.add(`${name}: contrast ${contrast.toFixed(2)}`);
}
return [...faint];
"""


def find_faint(browser, elements):
    """The texts among the elements (CSS) that have too little contrast to their ground by WCAG 2.1, level AA."""
    return browser.execute_script(_FIND_FAINT, elements)
