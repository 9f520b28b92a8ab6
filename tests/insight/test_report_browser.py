"""The controls of the report work in a real browser: Debian's chromium and chromium-driver, without a window.

Guards: insight/report/tables, insight/report/charts, insight/checking/page, amp_patch/insight/report/report.js.
"""

import math
from dataclasses import replace

import pytest
from browsing import find_cut_off, find_faint, find_split, needs_a_browser, open_browser, show
from compared import HOSTILE, make_comparison, make_op

from amp_patch.insight.checking.contract import Contract, ContractRecord, HardwareRecord, Numbers, StepsRecord
from amp_patch.insight.checking.page import write_page
from amp_patch.insight.checking.verdict import Verdict
from amp_patch.insight.comparing import exponents
from amp_patch.insight.fault_record import Cause, FaultRecord, Origin, Phase, Value
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import ComparedRecord, CurveRecord, RunRecord
from amp_patch.insight.report import write_report

pytestmark = needs_a_browser
LAYERS = tuple(f"blocks.{number}.{part}" for number in range(4) for part in ("norm", "attention", "up")) + (HOSTILE,)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    found = make_comparison(layers=LAYERS, extra=[make_op("blocks.0"), make_op("head", "F.softmax", "blacklist")])
    path = tmp_path_factory.mktemp("report") / "report.html"
    found.save_html(path)
    return path, found


def write_check(path):
    """The page of a check: losses within a factor of ten, far from 1."""
    about = ContractRecord(1, "train.py", "O1", (), False, 3, 0, "1", "2", "O1", "f16", "cpu")
    lines = [((1.2341e-7, 1.2342e-7, 1.2349e-7), (1e-10,) * 3), ((1.2341e-7, 1.2342e-7, math.nan), (None,) * 3)]
    contracts = [
        Contract(about, [], [], {"a CPU": Numbers(HardwareRecord("a CPU", 1), [], [StepsRecord("loss", *line)])})
        for line in lines
    ]
    write_page(path, *contracts, Verdict(notes=["loss: 1.2e-07, and not 2e-5"]), command="amp-patch check a-b.py")


def write_lost(path):
    """The page of a comparison of which a run is NaN throughout, and names and values have hyphens."""
    comparison = make_comparison(layers=("layers-of-a.net-work.0.self-attention", "head"), steps=3)
    records = list(comparison.recording.records)
    for number, record in enumerate(records):
        if isinstance(record, ComparedRecord) and record.run == "O1":
            records[number] = replace(
                record, kept=0.1, kept_worst="exp_avg_sq of layers-of-a.net-work.0.self-attention"
            )
        if isinstance(record, CurveRecord):
            losses = (math.nan,) * 3 if record.run == "O1" else tuple(1.2341e-5 + 1e-8 * loss for loss in record.losses)
            records[number] = replace(record, losses=losses)
    write_report(Recording(comparison.recording.run, records), path)


def write_ops(path):
    run = RunRecord("2", "cpu", "O1", "f16", ("float16",), "0123456789abcdef", 0)
    write_report(Recording(run, [make_op("layers-of-a.net-work.0.self-attention")]), path)


def write_trace(path):
    run = RunRecord("2", "cpu", "O1", "f16", ("float16",), "0123456789abcdef", 0)
    origin = Origin(module="head", op="F.linear", rule="whitelist", entry="float16.yaml:3", site="train.py:9")
    write_report(Recording(run, [FaultRecord(3, Phase.FORWARD, Value.INF, Cause.PRECISION, origin=origin)]), path)


@pytest.fixture
def page(browser, written):
    """The report, opened from its file. When the test is over, nothing may have been written to the console."""
    show(browser, 1200)
    browser.get(written[0].as_uri())
    yield browser
    assert browser.get_log("browser") == []


def read_column(page, table, column):
    """The texts of a column, of the rows that are shown."""
    return page.execute_script(
        "return [...document.getElementById(arguments[0]).tBodies[0].rows].filter(row => row.offsetParent)"
        ".map(row => row.cells[arguments[1]].textContent)",
        table,
        column,
    )


def press(page, text, *keys):
    """Press keys on the element that CSS finds: as somebody without a mouse does."""
    element = page.find_element("css selector", text)
    element.send_keys(*keys)
    return element


def test_headings_sort_by_number_and_back_by_key(page):
    heading = "#runs thead th:nth-child(5)"  # ms/step
    assert read_column(page, "runs", 0) == ["O0", "O1", "O4", "O5"]
    press(page, f"{heading} button", "\n")
    assert read_column(page, "runs", 0) == ["O1", "O0", "O4", "O5"]
    assert page.find_element("css selector", heading).get_attribute("aria-sort") == "ascending"
    press(page, f"{heading} button", "\n")
    assert read_column(page, "runs", 0) == ["O4", "O0", "O1", "O5"]  # what has no time stays last
    press(page, "#layers thead th:nth-child(5) button", "\n")  # O4, of which one is inf
    assert read_column(page, "layers", 4) == ["1.0e-02"] * (len(LAYERS) - 1) + ["inf"]
    press(page, "#runs thead th:nth-child(1) button", "\n")
    sorts = [one.get_attribute("aria-sort") for one in page.find_elements("css selector", "#runs thead th")]
    assert sorts[0] == "ascending" and set(sorts[1:]) == {"none"}


def test_a_filter_shows_the_rows_that_have_all_words(page):
    field = press(page, "#layers-filter", "UP blocks.1")
    assert read_column(page, "layers", 0) == ["blocks.1.up"]
    told = page.find_element("css selector", "output[for=layers-filter]")
    assert told.text == f"1 of {len(LAYERS)} rows"
    field.clear()
    field.send_keys("script>")
    assert read_column(page, "layers", 0) == [HOSTILE]
    press(page, "#ops-filter", "softmax")
    assert read_column(page, "ops", 2) == ["F.softmax"]


@pytest.mark.parametrize(
    ("low", "keys", "power"), [("f16", "\ue011\ue014", 1), ("bf16", "\ue010", 24)], ids=["f16", "bf16"]
)
def test_the_slider_moves_the_zones_and_their_shares(low, keys, power, page, written):
    press(page, "#low", "b" if low == "bf16" else "f")
    press(page, "#scale", keys)
    shares = exponents.find_shares(written[1].gradients, low, 2.0**power)
    told = page.find_element("id", "shares").text
    assert [float(part.split()[0]) for part in told.split(",")] == pytest.approx([100 * one for one in shares])
    assert page.find_element("id", "scale-text").text == f"2^{power} = {2**power:,}"
    zero, infinite = (
        page.execute_script(
            "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.left, box.right]",
            one,
        )
        for one in ("#histogram rect.zero", "#histogram rect.infinite")
    )
    bars = page.execute_script(
        "return [...document.querySelectorAll('#histogram .bar')].map(bar => bar.getBoundingClientRect())"
        ".map(box => (box.left + box.right) / 2)"
    )
    assert len(bars) == 3
    assert sum(25 * (zero[0] < bar < zero[1]) * (1 + (n == 1)) for n, bar in enumerate(bars)) == 100 * shares.zero
    assert sum(25 * (infinite[0] < bar < infinite[1]) * (1 + (n == 1)) for n, bar in enumerate(bars)) == 100 * shares[2]


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_or_faint(page, width, is_dark):
    show(page, width, dark=is_dark)
    assert find_cut_off(page, "main *") + find_faint(page, "main *") == []


@pytest.mark.parametrize("write", [write_check, write_lost, write_ops, write_trace])
def test_each_page_is_whole_and_runs_without_an_error(browser, write, tmp_path):
    """Also where a value with a hyphen, such as 2e-05, meets the end of its line."""
    write(tmp_path / "report.html")
    wrong = []
    for width in (1280, 390):
        show(browser, width)
        browser.get((tmp_path / "report.html").as_uri())
        wrong += find_cut_off(browser, "main *") + find_split(browser, "main *", r"\S-(?=\S)")
    assert browser.execute_script("return document.querySelectorAll('main h1').length") == 1
    assert wrong == [] and browser.get_log("browser") == []


def test_a_table_has_a_shadow_until_its_last_column_is_seen(page):
    from selenium.webdriver.support.wait import WebDriverWait

    show(page, 390)
    box = page.find_element("css selector", ".box:has(#layers)")
    WebDriverWait(page, 20).until(lambda _: "more" in box.get_attribute("class"))
    page.execute_script("arguments[0].scrollLeft = 10000", box)
    WebDriverWait(page, 20).until(lambda _: "more" not in box.get_attribute("class"))


def test_an_option_stays_on_its_line_and_is_copied_as_it_is(page, written):
    page.execute_script("document.querySelector('main').style.width = '200px'")
    command = page.find_element("xpath", "//dt[text()='command']/following-sibling::dd")
    copied = page.execute_script("getSelection().selectAllChildren(arguments[0]); return `${getSelection()}`", command)
    assert copied == written[1].recording.records[0].command
    words = command.find_elements("css selector", ".word")
    heights = [page.execute_script("return arguments[0].offsetHeight", word) for word in words]
    assert len(words) == 4 and len(set(heights)) == 1


def test_runs_are_taken_out_of_the_charts_and_put_back(page):
    groups = "[...document.querySelectorAll('[data-series=O4]')]"
    shown = f"return {groups}.map(group => group.getBoundingClientRect().width > 0)"
    assert page.execute_script(shown) == [True] * 4  # a line and its marks, in two charts
    press(page, "[data-run=O4]", " ")
    assert page.execute_script(shown) == [False] * 4
    assert page.find_element("css selector", "[data-run=O4]").get_attribute("aria-pressed") == "false"
    press(page, "[data-run=O4]", " ")
    assert page.execute_script(shown) == [True] * 4


def test_the_download_is_the_records(page, tmp_path, written):
    from selenium.webdriver.support.wait import WebDriverWait

    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    press(page, "#download", "\n")
    path = tmp_path / "records.jsonl"
    WebDriverWait(page, 20).until(lambda _: path.exists() and path.read_text().endswith("\n"))
    assert type(written[1]).read(path).recording == written[1].recording


def test_everything_that_acts_is_reached_by_tab(page):
    count = page.execute_script("return document.querySelectorAll('button, input, select, .box').length")
    reached = set()
    body = page.find_element("tag name", "body")
    body.click()
    for _ in range(count + 5):
        page.switch_to.active_element.send_keys("\ue004")
        reached.add(page.switch_to.active_element.id)
        outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.switch_to.active_element.tag_name == "body"
    assert len(reached - {body.id}) == count
