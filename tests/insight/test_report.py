"""The page of a recording needs no other file, shows what was recorded, and takes none of it for markup.

Guards: insight/report/page, insight/report/compared, insight/report/charts, insight/report/tables.
Guards: insight/report/markup, insight/report/marks, insight/comparing/summary.
"""

import html.parser
import math
import re
from dataclasses import replace

import pytest
from compared import HOSTILE, make_comparison, make_op

from amp_patch.insight.comparing import Comparison
from amp_patch.insight.comparing.summary import COLOURS, pick_colours
from amp_patch.insight.fault_record import Cause, FaultRecord, Origin, Phase, Value
from amp_patch.insight.fault_text import format_faults
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import CurveRecord, LayerRecord, RunRecord, UndoneCastRecord
from amp_patch.insight.report import make_report
from amp_patch.insight.report.charts import Series, draw_figure
from amp_patch.insight.report.marks import SHAPES, draw_mark, place_marks
from amp_patch.insight.report.tables import Cell, make_table

VOID = {"meta", "link", "input", "br", "wbr"}


class Page(html.parser.HTMLParser):
    """The elements of a page, and that each ends where it should."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts, self.data = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, dict(attributes)))

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.data += data if self.open[-1][1].get("id") == "records" else ""
        elif self.open and self.open[-1][0] != "style":
            self.texts.append(data)

    def recording(self, folder):
        path = folder / "embedded.jsonl"
        path.write_text(self.data.strip() + "\n")
        return Recording.read(path)

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def check_offline(text):
    page = Page(text)
    links = [attributes[name] for _, attributes in page.elements for name in ("src", "href") if name in attributes]
    assert links == ["data:,"]
    assert "://" not in text and "@import" not in text and "url(" not in text and "fetch(" not in text
    return page


def test_a_report_is_small_and_holds_its_records(tmp_path):
    layers = [f"blocks.{number}.part" for number in range(75)]
    exact = LayerRecord("O1", "exact", 0.0, 0.0, 0.0)
    found = make_comparison(layers=layers, extra=[exact])
    found.save_html(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    page = check_offline(text)
    assert len(text.encode()) < 300_000
    assert page.recording(tmp_path) == found.recording  # of which some are not finite
    assert {*layers, "exact", "0", "inf"} < set(page.texts)


def test_names_are_never_markup(tmp_path):
    extra = [make_op(HOSTILE, HOSTILE, HOSTILE), UndoneCastRecord(0, HOSTILE, HOSTILE, "b", "f32", "f16")]
    found = make_comparison(layers=(HOSTILE, "head"), extra=extra)
    text = make_report(found.recording)
    page = check_offline(text)
    assert page.recording(tmp_path) == found.recording
    assert text.lower().count("</script") == 2 and not page.of("b")
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.texts.count(HOSTILE) >= 5  # layer, module, op, rule, producer


def test_every_field_has_a_label_and_every_id_is_one():
    page = Page(make_report(make_comparison(extra=[make_op("a")]).recording))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes["for"] for attributes in page.of("label")}
    assert {attributes["id"] for tag in ("input", "select") for attributes in page.of(tag)} == labels
    assert all(attributes.get("aria-label") or attributes.get("aria-hidden") for attributes in page.of("svg"))


def test_a_recording_of_ops_alone_is_a_page_of_ops(tmp_path):
    run = RunRecord("2", "cpu", "O1", "f16", ("float16",), "0123456789abcdef", 0)
    recording = Recording(run, [make_op("blocks.0.up"), make_op("blocks.1.up"), make_op("", "F.softmax", "blacklist")])
    page = check_offline(make_report(recording, command="amp-patch explain train.py"))
    assert {"blocks.*.up", "F.softmax", "float16.yaml:3"} <= set(page.texts)
    assert "amp-patch explain train.py" in "".join(page.texts)
    assert not page.of("svg") and page.recording(tmp_path) == recording


def test_a_recording_of_a_trace_shows_what_trace_prints(tmp_path):
    run = RunRecord("2", "cpu", "O1", "f16", ("float16",), "0123456789abcdef", 0)
    origin = Origin(module=HOSTILE, op="F.linear", rule="whitelist", entry="float16.yaml:3", site="train.py:9")
    recording = Recording(run, [FaultRecord(3, Phase.FORWARD, Value.INF, Cause.PRECISION, origin=origin)])
    page = check_offline(make_report(recording))
    assert format_faults(recording) in page.texts and page.recording(tmp_path) == recording


def test_a_report_of_one_step_of_one_run_is_drawn():
    text = make_report(make_comparison(steps=1).recording)
    assert "nan" not in "".join(re.findall(r'(?:points|x|y|width|height)="[^"]*"', text))


def test_runs_of_a_picture_have_colours_of_their_own():
    names = [f"run {number}" for number in range(12)]
    colours = pick_colours(names)
    assert list(colours) == names and len(set(colours.values())) == len(COLOURS) == 10


def test_losses_that_are_infinite_either_way_have_no_mean():
    comparison = make_comparison()
    records = [
        replace(one, losses=(*one.losses[:-2], *((math.inf, 1.0) if one.run == "O0" else (1.0, math.inf))))
        if isinstance(one, CurveRecord)
        else one
        for one in comparison.recording.records
    ]
    found = Comparison(Recording(comparison.recording.run, records))
    assert [math.isnan(row.difference) for row in found.rows()[1:3]] == [True, True]
    assert "nan" in found.table() and "<svg" in make_report(found.recording)


def test_lines_that_run_together_take_turns_and_others_are_whole():
    """Each place of a line that several share is drawn by one of them, so that no colours mix."""
    values = {
        "O0": [1.0, 2.0, math.nan],
        "O1": [1.0, 2.001, math.nan],
        "O4": [9.0, 1.0, 0.1],
        "O5": [1.0, 2.0, math.nan],
    }
    series = [Series(name, number, each, each, each) for number, (name, each) in enumerate(values.items())]
    page = Page(draw_figure(series, "Losses.", label="loss", has_keys=True))
    styles = {attributes["data-series"]: attributes["style"] for attributes in page.of("g") if "style" in attributes}
    assert "Losses. Dashes alternate where lines coincide: O0, O1 and O5. Gaps: inf or NaN." in page.texts
    assert [text.strip() for text in page.texts if text.strip() in values and text != text.strip()] == list(values)
    assert "dash" not in styles.pop("O4")
    turns = [re.search(r"dasharray:(\d+) (\d+);stroke-dashoffset:(-?\d+)", style).groups() for style in styles.values()]
    dashes, gaps, offsets = ([int(turn[column]) for turn in turns] for column in range(3))
    period = dashes[0] + gaps[0]
    drawn = [(place - offset) % period for offset, dash in zip(offsets, dashes, strict=True) for place in range(dash)]
    assert len(set(dashes)) == len(set(gaps)) == 1 and sorted(drawn) == list(range(period))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_caption_names_the_lines_that_are_not_drawn(value):
    lost = [value] * 3
    values = {"O0": [1.0, 2.0, 3.0], "O1": lost, "O2": lost, "O5": []}
    page = Page(
        draw_figure([Series(name, n, each, each, each) for n, (name, each) in enumerate(values.items())], "", label="")
    )
    drawn = [attributes["data-series"] for tag, attributes in page.elements if attributes.get("data-series")]
    assert len(page.of("polyline")) == 1 and drawn.count("O0") == 2
    assert " Without a line, since no value is finite: O1, O2 and O5." in page.texts


@pytest.mark.parametrize(("smallest", "is_told"), [(1e5, True), (1e30, False)])
def test_a_caption_tells_of_values_below_the_axis(smallest, is_told):
    figure = str(draw_figure([Series("O1", 0, [smallest, 1e36], (), (), ())], "Losses.", label="losses"))
    assert ("lie at the lower edge" in figure) is is_told


def test_losses_that_are_nan_throughout_are_named_in_both_charts():
    comparison = make_comparison()
    records = [
        replace(record, losses=(math.nan,) * 30) if isinstance(record, CurveRecord) and record.run == "O1" else record
        for record in comparison.recording.records
    ]
    page = Page(make_report(Recording(comparison.recording.run, records)))
    assert "".join(page.texts).count("Without a line, since no value is finite: O1.") == 2
    assert "+nan" not in page.texts and "nan" in page.texts


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1.2345e-7, 4.3e9])
def test_labels_of_an_axis_have_room(scale):
    values = [scale * number for number in (1.0001, 1.0002, 1.0009)]
    page = Page(draw_figure([Series("O0", 0, values, (), ())], "", label="loss"))
    labels = [text for text in page.texts if re.fullmatch(r"[\d.e+-]+", text) and float(text) > 0.9 * scale]
    ends = [float(attributes["x"]) for attributes in page.of("text") if attributes["class"] == "end"][: len(labels)]
    assert len(labels) >= 2 and min(ends) >= 9 * max(map(len, labels))


@pytest.mark.parametrize("ranged", [0, 1, 3])
def test_ranges_of_several_lines_are_never_areas_which_would_mix_their_colours(ranged):
    low, high = [0.5] * 20, [2.0] * 20
    series = [Series(f"O{number}", number, [1.0] * 20, low, high) for number in range(ranged)]
    series.append(Series("O5", 5, [1.0] * 20, [1.0] * 20, [1.0] * 20))
    page = Page(draw_figure(series, "", label="loss"))
    classes = [attributes.get("class") for _, attributes in page.elements]
    assert classes.count("band") == (ranged == 1)
    assert (classes.count("range") > 0) == (ranged > 1) == ("range over the seeds" in "".join(page.texts))


def test_marks_of_lines_that_coincide_never_cover_each_other():
    points = [(50.0, 10.0), (200.0, 80.0), (300.0, math.nan), (430.0, 20.0)]
    places = [x for order in range(6) for x, _ in place_marks(points, order, 6, (46, 432))]
    gaps = [right - left for left, right in zip(sorted(places), sorted(places)[1:], strict=False)]
    assert len(places) >= 6 and min(gaps) >= 15.9
    assert all(10 <= y <= 80 for order in range(6) for _, y in place_marks(points, order, 6, (46, 432)))
    assert list(place_marks(points[:1], 3, 6, (46, 432))) == points[:1]


def test_runs_of_a_picture_are_told_apart_without_colour_and_seen_on_both_pages():
    marks = {draw_mark(number, 0, 0) for number in range(len(COLOURS))}
    assert len(marks) == len(SHAPES) == len(COLOURS)
    for colours in COLOURS:
        assert contrast(colours.light, "#ffffff") >= 3 and contrast(colours.dark, "#16181b") >= 3


def contrast(*colours):
    """The contrast of two colours, as the WCAG define it."""
    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_table_has_what_the_script_sorts_and_filters_by():
    rows = [[Cell("fc"), Cell("3 %", 0.03, heat=0.5)], [Cell("head"), Cell("all", math.inf)]]
    page = Page(make_table("layers", ("layer", "error"), rows, label="Layers", filter_by="Filter"))
    headings = [found for tag, found in page.elements if found.get("aria-sort")]
    assert [found.get("class") for found in headings] == ["l", None]
    assert len([tag for tag, _ in page.elements if tag == "button"]) == 2
    assert [found["data-v"] for _, found in page.elements if "data-v" in found] == ["0.03", "Infinity"]
    assert [found["style"] for _, found in page.elements if found.get("class") == "hot"] == ["--e:0.50"]
    assert [found["data-table"] for tag, found in page.elements if tag == "input"] == ["layers"]
