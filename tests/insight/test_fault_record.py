"""The record of a fault has the documented parts, flat JSON and words, and a cause and advice for every fault.

Guards: insight/fault_record, insight/causes, insight/json_values.
"""

import json
import math
from dataclasses import fields

import pytest

from amp_patch import RecordError, insight
from amp_patch.insight.causes import DIAGNOSES, Course, describe_cause, diagnose, find_remedy
from amp_patch.insight.fault_record import (
    Cause,
    Effect,
    Evidence,
    FaultRecord,
    Fix,
    Origin,
    Phase,
    Reach,
    RegionKind,
    Value,
)
from amp_patch.insight.records import RunRecord

RUN = RunRecord("2.13.0", "cpu", "O1", "f16", (), "", 0)

FULL = FaultRecord(
    3,
    Phase.BACKWARD,
    Value.INF,
    Cause.PRECISION,
    rank=2,
    origin=Origin(
        module="blocks.0",
        op="F.linear",
        rule="whitelist",
        entry="float16.yaml:3",
        listed="torch.nn.functional.linear",
        region=RegionKind.LOW,
        site="train.py:9",
        aten="mm",
        node="MmBackward0",
        given=("f16", "f16"),
        out="f16",
        share=0.25,
        parameter="blocks.0.weight",
    ),
    evidence=Evidence(
        largest=300.0,
        in_float32=9e4,
        loss_scale=1024.0,
        trail=(("mul", 7.0), ("exp", math.inf)),
        is_of_rounding=True,
        is_untested=True,
        lost=1e-8,
        eps=1e-6,
        lr=0.5,
    ),
    effect=Effect(Reach.GRADIENTS, ("blocks.0.weight",), 4, True, True),
    fix=Fix(("match: a",), ("exp",), ("mm",), ("a.py:1",), ("a.py:2",), "log at a.py:3", 64.0, True, 512.0),
)
EMPTY = FaultRecord(0, Phase.FORWARD, Value.NAN, Cause.MATHEMATICS)


def write(fault, tmp_path):
    path = tmp_path / "faults.jsonl"
    insight.Recording(RUN, [fault]).to_jsonl(path)
    return path


@pytest.mark.parametrize("fault", [FULL, EMPTY], ids=["all fields", "no fields"])
def test_a_fault_is_read_as_it_was_written(fault, tmp_path):
    (read,) = insight.Recording.read(write(fault, tmp_path)).records
    assert read == fault


def test_the_full_fault_leaves_no_field_at_its_default():
    """So the round trip above misses no field."""
    for part, default in (
        (FULL.origin, Origin()),
        (FULL.evidence, Evidence()),
        (FULL.effect, Effect()),
        (FULL.fix, Fix()),
    ):
        stored = [field.name for field in fields(part) if field.compare]
        assert [name for name in stored if getattr(part, name) == getattr(default, name)] == []


def test_the_parts_are_flat_in_json_and_none_has_the_value_of_each_key(tmp_path):
    (line,) = map(json.loads, write(EMPTY, tmp_path).read_text().splitlines()[1:])
    strings = ("module", "op", "rule", "entry", "listed", "region", "site", "aten", "node", "out", "parameter", "reach")
    assert {line[key] for key in (*strings, "beyond")} == {""}
    assert (line["share"], line["largest"], line["in_float32"]) == ("nan", "nan", "inf")
    assert (line["lost"], line["summed"], line["loss_scale"], line["of"], line["rank"]) == (0.0, 0.0, 1.0, 0, 0)
    assert {line[key] for key in ("scale", "eps", "lr", "skipped")} == {None}
    assert len(line) == 42 and "came_in" not in line


@pytest.mark.parametrize("fault", [FULL, EMPTY], ids=["all fields", "no fields"])
def test_a_fault_has_each_key_of_the_json_as_an_attribute(fault, tmp_path):
    (line,) = map(json.loads, write(fault, tmp_path).read_text().splitlines()[1:])
    for key, stored in line.items():
        value = getattr(fault, key)
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        assert key == "trail" or value == (tuple(stored) if isinstance(stored, list) else stored)
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        fault.colour  # noqa: B018


@pytest.mark.parametrize(
    ("key", "word"), [("cause", "witchcraft"), ("phase", ""), ("region", "high"), ("reach", "far")]
)
def test_a_word_that_no_vocabulary_has_is_refused(key, word, tmp_path):
    path = write(FULL, tmp_path)
    run, line = path.read_text().splitlines()
    path.write_text(f"{run}\n{json.dumps({**json.loads(line), key: word})}\n")
    with pytest.raises(RecordError, match=f"{key} is '{word}'"):
        insight.Recording.read(path)


def test_each_cause_has_one_diagnosis_and_the_last_explains_everything():
    assert sorted(diagnosis.cause for diagnosis in DIAGNOSES) == sorted(Cause)
    assert diagnose(EMPTY, Course()).cause is Cause.MATHEMATICS


@pytest.mark.parametrize("diagnosis", DIAGNOSES, ids=lambda diagnosis: diagnosis.cause.name.lower())
def test_a_cause_is_described_and_advised_without_any_evidence(diagnosis):
    """As in a file that somebody has edited."""
    fault = FaultRecord(0, Phase.FORWARD, Value.NAN, diagnosis.cause, origin=Origin(aten="exp"))
    assert describe_cause(fault).startswith(f"{diagnosis.cause}: ")
    assert find_remedy(fault, None).kind and insight.format_fault(fault, None)
