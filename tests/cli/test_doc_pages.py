"""The pages on insight: their files are written, their commands run, and the output is what they show."""

import re
import shlex
from pathlib import Path

import pytest

from amp_patch.cli.main import main

pytestmark = pytest.mark.xdist_group("scripts")

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("nan.md", "levels.md", "lists.md")
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[+-]?\d+\.\d+(?:e[+-]?\d+)?%?|\d{4}-\d\d-\d\d")
NAMED_FILE = re.compile(r"\S*/(\w+\.(?:yaml|py))")


def simplify(text):
    """Without what may differ from machine to machine: numbers that are not whole, folders, widths of columns."""
    text = re.sub(r"cpu \(.*\)", "cpu", text)
    text = re.sub(r" +|-{2,}", " ", NAMED_FILE.sub(r"\1", NUMBER.sub("0.0", text)))
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_give_what_it_shows(page, run_scripts, tmp_path, capsys):
    commands = 0
    for language, title, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        if title:
            (tmp_path / title).write_text(text)
        if language != "console":
            continue
        for shown in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = shown.partition("\n")
            name, *arguments = shlex.split(command)
            assert name == "amp-patch"
            main(arguments)
            assert simplify(capsys.readouterr().out) == simplify(expected), command
            commands += 1
    assert commands
