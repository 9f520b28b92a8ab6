"""The commands of the tutorials and of the page on NaN print the output that the pages show.

The test writes the files of a page and runs its commands. A block of the language `diff` is applied to the file in its
title. In an output, a line of `...` stands for any lines.

Guards: docs/apex.md, docs/ci.md, docs/insight.md, docs/levels.md, docs/lists.md, docs/nan.md, docs/quiet.md.
"""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from amp_patch.cli.main import main

pytestmark = pytest.mark.xdist_group("scripts")

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("apex.md", "ci.md", "insight.md", "levels.md", "lists.md", "nan.md", "quiet.md")
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[+-]?\d+\.\d+(?:e[+-]?\d+)?%?|\d{4}-\d\d-\d\d")
WRAPPED_VERDICT = re.compile(r"^(\S+: (?:as good|no worse|worse|perhaps|better|not)\b.*)\n  ", re.MULTILINE)
NAMED_FILE = re.compile(r"\S*/(\w+\.(?:yaml|py))")


def simplify(text):
    """Without what may differ from machine to machine: numbers that are not whole, folders, widths, times, advice."""
    text = re.sub(r"cpu \(.*\)", "cpu", re.sub(r"\btorch \d[\w.+]*", "torch", text))
    text = WRAPPED_VERDICT.sub(r"\1 ", text)
    text = re.sub(r"; (?:faster|slower|time within noise).*|(?<=^advice: ).*", "", text, flags=re.MULTILINE)
    text = re.sub(r" +|-{2,}", " ", NAMED_FILE.sub(r"\1", NUMBER.sub("0.0", text)))
    return [line.rstrip() for line in text.strip().splitlines()]


def apply(difference, path):
    """Replace the one place that has the old lines by the new ones."""
    old, new = (
        "".join(line[1:] for line in difference.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +")
    )
    text = path.read_text()
    assert text.count(old) == 1, difference
    path.write_text(text.replace(old, new))


def is_as_shown(printed, shown):
    pattern = "".join(r"(.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in shown)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_give_what_it_shows(page, run_scripts, warm_server, tmp_path, capsys):
    commands = 0
    for language, title, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        if language == "diff":
            apply(text, tmp_path / title)
        elif title:
            (tmp_path / title).write_text(text)
        if language != "console":
            continue
        for shown in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = shown.partition("\n")
            name, *arguments = shlex.split(command)
            if name == "amp-patch":
                with contextlib.suppress(run_scripts):
                    main(arguments)
                printed, errors = capsys.readouterr()
            else:
                assert name == "python"
                done = warm_server.run(*arguments, cwd=tmp_path)
                printed, errors = done.stdout, done.stderr
            if not is_as_shown(simplify(printed), simplify(expected)):
                assert simplify(printed) == simplify(expected), f"{command}\n{errors}"
            commands += 1
    assert commands


def test_what_is_shown_is_compared():
    assert is_as_shown(["a", "b"], ["a", "b"]) and is_as_shown(["a", "b", "c"], ["...", "c"])
    assert (
        not is_as_shown(["a", "b"], ["a"])
        and not is_as_shown(["a.b"], ["a-b"])
        and not is_as_shown(["a"], ["...", "b"])
    )
