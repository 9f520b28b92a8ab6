"""Each message appears once, where the user looks for it: lines of `initialize`, overflows, and the user's own logging.

Guards: reporting, training/step_log, session/stats, api.
"""

import io
import json
import logging

import pytest
import torch
from torch import nn
from training import take_step

import amp_patch as amp


@pytest.fixture
def add_console():
    """Adds the handler that `logging.basicConfig()` makes, which writes to stderr or to a stream."""
    added = []

    def add(stream=None, level=logging.NOTSET):
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        handler.setLevel(level)
        logging.getLogger().addHandler(handler)
        added.append(handler)

    yield add
    for handler in added:
        logging.getLogger().removeHandler(handler)


def make(level="O1", **options):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, **options)


def test_lines_come_once_where_logging_is_configured(add_console, capsys):
    add_console()
    make()
    told = capsys.readouterr()
    assert told.err.count("opt_level O1,") == 1 and told.out == ""


def test_a_console_that_shows_warnings_alone_takes_no_line_away(add_console, capsys):
    add_console(level=logging.WARNING)
    make()
    told = capsys.readouterr()
    assert "opt_level O1," in told.out and told.err == ""


def test_a_warning_that_a_console_of_its_level_shows_is_not_on_stdout_too(add_console, capsys):
    add_console(level=logging.WARNING)
    model, optimizer = make(loss_scale="dynamic", verbosity=2)
    take_step(model(torch.ones(2, 3)).sum() * float("inf"), optimizer)
    told = capsys.readouterr()
    assert "Gradient overflow" in told.err and "Gradient overflow" not in told.out


def test_a_file_gets_the_lines_beside_stdout(add_console, capsys):
    stream = io.StringIO()
    add_console(stream)
    make()
    assert all("opt_level O1," in told for told in (capsys.readouterr().out, stream.getvalue()))


def test_a_dtype_that_is_not_used_is_not_named(capsys):
    make("O1", patch_torch_functions=False)
    assert "patch_torch_functions_type" not in capsys.readouterr().out


def test_each_overflow_is_a_warning_with_step_and_parameters_at_verbosity_2(caplog, capsys):
    model, optimizer = make("O2", loss_scale="dynamic", verbosity=2)
    scales = iter((32768.0, 16384.0))
    for step in (1, 3):
        take_step(model(torch.ones(2, 3)).sum() * float("inf"), optimizer)
        told = [one for one in caplog.records if one.levelno == logging.WARNING]
        where = "in 0.weight, 0.bias, 1.weight, 1.bias"
        scaler = f"loss scaler 0 reducing loss scale to {next(scales)}"
        line = f"Gradient overflow.  Skipping step, {scaler} (step {step}, {where})"
        assert told[-1].getMessage() == line and line + "\n" in capsys.readouterr().out
        take_step(model(torch.ones(2, 3)).sum() * 1e-3, optimizer)
    assert amp.stats().steps == amp.stats().steps_skipped == len(told) == 2


def test_an_overflow_is_no_warning_at_verbosity_1(caplog, capsys):
    model, optimizer = make(loss_scale="dynamic")
    take_step(model(torch.ones(2, 3)).sum() * float("inf"), optimizer)
    assert capsys.readouterr().out.endswith("loss scaler 0 reducing loss scale to 32768.0\n")
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]


def test_stats_go_through_json_and_html():
    _model, _optimizer = make("O4", verbosity=0, loss_scale={"init": 8.0})
    stats = amp.stats()
    told = json.loads(json.dumps(stats.to_dict()))
    assert told == {
        "opt_level": "O4",
        "low_dtype": "bfloat16",
        "names_patched": stats.names_patched,
        "parameters_low": 0,
        "parameters_float32": 16,
        "steps": 0,
        "steps_skipped": 0,
        "loss_scales": [8.0],
    }
    assert "<tr><th>loss scale</th><td>8</td></tr>" in stats._repr_html_()
    amp.reset()
    assert json.loads(json.dumps(amp.stats().to_dict()))["low_dtype"] is None
    assert amp.stats()._repr_html_() == "<p>amp_patch: no level is in force</p>"


@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_the_announcement_is_in_words_and_names_what_acts(level, capsys):
    make(level)
    told = capsys.readouterr().out
    assert not any(word in told for word in ("None", "True", "False", "torch.", "'"))
    assert ("float16" in told.replace("bfloat16", "")) is (level == "O2")
    assert ("bfloat16" in told) is (level == "O4") and ("compute" in told) is (level != "O0")
