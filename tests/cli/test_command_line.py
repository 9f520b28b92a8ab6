"""A wrong command line gets an error that says what is wrong; help needs no torch; colour, completion and Ctrl-C behave
as documented.

Guards: cli/parser, cli/values, cli/completion, cli/main, terminal, __main__.
"""

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import amp_patch as amp
from amp_patch import terminal
from amp_patch.cli import values
from amp_patch.cli.main import COMMANDS, EPILOG, _parse, build_parser, main

ROOT = Path(__file__).parent.parent.parent
LEVELS = "O0, O1, O2, O3, O4, O5"
LISTS = "apex, autocast-cpu, autocast-cuda, autocast-mps, autocast-xpu, bfloat16, fast, float16, paper"
TASKS_OF_LISTS = "show, check, diff, explain, init"

WRONG = {
    # of the command itself
    "trce train.py": ("amp-patch", "Did you mean 'trace'?"),
    "--versoin": ("amp-patch", "Did you mean '--version'?"),
    "--opt-level O1 trace train.py": ("amp-patch", "options go after their command"),
    # levels
    "trace train.py --opt-level O9": ("amp-patch trace", f"argument --opt-level: 'O9' is not an opt_level ({LEVELS})."),
    "run --opt-level o1 train.py": ("amp-patch run", "Did you mean 'O1'? The first character is the letter O."),
    "compare train.py --runs O1,o2": ("amp-patch compare", "argument --runs: 'o2' is not an opt_level"),
    "compare train.py --opt-level O1": ("amp-patch compare", "name levels with --runs"),
    # op lists
    "trace train.py --lists flaot16": ("amp-patch trace", f"({LISTS}); a path must end in .yaml or .yml."),
    "tune train.py --extends mien.yaml": ("amp-patch tune", "no such file. Did you mean 'mine.yaml'?"),
    "compare train.py --runs O4+none.yaml": ("amp-patch compare", "'none.yaml': no such file."),
    # options
    "trace train.py --undreflow 5%": ("amp-patch trace", "Did you mean '--underflow'?"),
    "tune train.py --tolerence=0.5": ("amp-patch tune", "Did you mean '--tolerance'?"),
    "explain train.py --epochs 3": ("amp-patch explain", "--epochs 3; arguments of the script go after --"),
    "compare train.py data": ("amp-patch compare", "unrecognized arguments: data; arguments of the script go after --"),
    # values
    "trace train.py --steps 3:1": ("amp-patch trace", "argument --steps: '3:1'"),
    "trace train.py --underflow 500%": ("amp-patch trace", "argument --underflow: '500%'"),
    "compare train.py --steps 0": ("amp-patch compare", "argument --steps: '0'"),
    "tune train.py --max-runs 1": ("amp-patch tune", "argument --max-runs: '1'"),
    "tune train.py --tolerance -1": ("amp-patch tune", "argument --tolerance: '-1'"),
    "explain train.py --by modul": ("amp-patch explain", "(module, op, entry). Did you mean 'module'?"),
    "explain train.py --html no/where.html": ("amp-patch explain", "argument --html: 'no/where.html'"),
    "trace train.py --json": ("amp-patch trace", "argument --json: expected one argument"),
    # scripts
    "run --": ("amp-patch run", "name a script"),
    "run nowhere.py": ("amp-patch run", "no such file"),
    "trace .": ("amp-patch trace", ". is a folder"),
    "trace": ("amp-patch trace", "name a script, or a module with -m"),
    "explain tran.py": ("amp-patch explain", "/tran.py': no such file. Did you mean 'train.py'?"),
    "check --write tarin.py": ("amp-patch check", "tarin.py was taken for FILE of --write"),
    "check --against train.py": ("amp-patch check", "train.py was taken for FILE of --against"),
    "explain --json train.py": ("amp-patch explain", "train.py was taken for FILE of --json"),
    "run -m": ("amp-patch run", "name a script, or a module with -m"),
    "tune -m": ("amp-patch tune", "argument -m: expected one argument"),
    "compare -m json.tool train.py": ("amp-patch compare", "train.py: write arguments of the module after --"),
    # lists
    "lists": ("amp-patch lists", "TASK"),
    "lists shwo float16": ("amp-patch lists", f"'shwo' is not a task ({TASKS_OF_LISTS}). Did you mean 'show'?"),
    "lists diff float16": ("amp-patch lists diff", "required: LISTS"),
    "lists explain mm --dtype half": ("amp-patch lists explain", "Did you mean 'float16'?"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a script and a list."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("mine.yaml").touch()
    return tmp_path


def test_a_wrong_command_line_is_told_what_is_wrong_and_where_help_is(folder, capsys):
    for line, (prog, told) in WRONG.items():
        with pytest.raises(SystemExit) as left:
            main(line.split())
        assert left.value.code == 2
        printed, said = capsys.readouterr()
        error, remedy = said.splitlines()
        assert (printed, remedy) == ("", f"see {prog} --help")
        assert error.startswith(f"{prog}: error: ") and told in error


def test_a_list_file_with_a_fault_is_bad_usage_once_the_rest_is_right(folder, capsys):
    (folder / "mine.yaml").write_text("whitelist: [sofmax]\n")
    with pytest.raises(SystemExit) as left:
        main(["tune", "train.py", "--extends", "mine.yaml"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"amp-patch tune: error: argument --extends: {folder}/mine.yaml:1:13: ")
    assert "Did you mean 'softmax'?" in said


def test_the_command_alone_prints_help_and_its_version(capsys):
    assert main([]) == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: amp-patch ") and EPILOG in output
    assert all(f"  {command.name} " in output for command in COMMANDS)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"amp-patch {amp.__version__}\n"


def list_children(parser):
    """The parsers of the subcommands of a parser, by name."""
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    return choices[0] if choices else {}


def list_parsers():
    """Every parser of the command line: of the command itself, of each command, and of each task of `lists`."""
    parsers = [build_parser([])]
    for command in COMMANDS:  # a parser has the arguments of the one command that it is built for
        parser = list_children(build_parser([command.name]))[command.name]
        parsers += [parser, *list_children(parser).values()]
    return parsers


@pytest.mark.parametrize("parser", list_parsers(), ids=lambda parser: parser.prog)
@pytest.mark.parametrize("columns", [80, 100, 200])
def test_each_help_fits_the_terminal_and_100_columns_and_ends_with_two_examples(parser, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text, _, examples = parser.format_help().partition("Examples:\n")
    assert max(map(len, text.splitlines())) <= min(columns, 100)
    lines = examples.splitlines()
    assert len(lines) == 2 and all(line.startswith("  amp-patch ") and len(line) <= 100 for line in lines)


@pytest.mark.parametrize(
    "example", [example for parser in list_parsers() for example in parser.examples], ids=lambda text: text
)
def test_each_example_of_a_help_is_a_command_line_that_parses(example, folder):
    assert _parse(shlex.split(example, comments=True)[1:]).command.name in example


WITHOUT_TORCH = """
import contextlib, io, sys
class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "numpy", "matplotlib", "sklearn"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Blocker())
from amp_patch.cli import main
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(line.split())
        except SystemExit as left:
            code = left.code
        except BaseException as error:
            code = repr(error)
    print(code, bool(out.getvalue()), bool(err.getvalue()), line, sep=";")
"""


def test_help_and_usage_errors_import_no_torch(folder):
    helped = ["--version", "--help", "", *(f"{command.name} --help" for command in COMMANDS)]
    helped += [f"lists {task} --help" for task in TASKS_OF_LISTS.split(", ")]
    lines = [*helped, *WRONG]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input="\n".join(lines),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    expected = [f"0;True;False;{line}" for line in helped] + [f"2;False;True;{line}" for line in WRONG]
    assert done.stdout.splitlines() == expected, done.stderr


def test_levels_are_those_of_the_shipped_presets_or_of_ones_own(tmp_path, monkeypatch):
    from amp_patch.config import levels, presets, shipped

    names = tuple(level.name for level in levels.read_levels())
    assert names == presets.Presets(shipped.shipped_presets()).names()
    (tmp_path / "mine.yaml").write_text("Mine: {extends: O1}\n")
    monkeypatch.setenv(presets.PRESETS_VARIABLE, str(tmp_path / "mine.yaml"))
    assert [values.opt_level(name) for name in ("O4", "Mine")] == ["O4", "Mine"]
    with pytest.raises(values.argparse.ArgumentTypeError, match="'Mien' is not a preset .*Did you mean 'Mine'"):
        values.opt_level("Mien")


# ---- colour ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_that_wants_colour_gets_it(monkeypatch):
    for is_terminal, no_colour, force_colour, kind, wants in [
        (True, "", "", "xterm", True),
        (False, "", "", "xterm", False),
        (True, "1", "1", "xterm", False),
        (True, "", "", "dumb", False),
        (False, "", "1", "dumb", True),
    ]:
        for name, value in {"NO_COLOR": no_colour, "FORCE_COLOR": force_colour, "TERM": kind}.items():
            monkeypatch.setenv(name, value)
        stream = Terminal() if is_terminal else io.StringIO()
        assert terminal.wants_colour(stream) is wants
        assert terminal.paint("text", terminal.BOLD, stream) == ("\x1b[1mtext\x1b[0m" if wants else "text")


def test_errors_and_heads_of_tables_have_colour(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(SystemExit):
        main(["trce"])
    assert capsys.readouterr().err.startswith("amp-patch: \x1b[1;31merror:\x1b[0m 'trce' is not")
    terminal.print_report("a table\n\nrun  loss\n---  ----\nO0      1\n-")
    assert capsys.readouterr().out == "a table\n\n\x1b[1mrun  loss\x1b[0m\n---  ----\nO0      1\n-\n"
    terminal.print_report("O4: as good as O0 (equal)\nO5: worse than O0\nmore", [True, False])
    good, bad, more = capsys.readouterr().out.splitlines()
    assert good == "\x1b[1;32mO4: as good as O0\x1b[0m (equal)" and bad == "\x1b[1;31mO5: worse than O0\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.print_report("O4: as good as O0 (equal)\nmore", [True])
    assert capsys.readouterr().out == "O4: as good as O0 (equal)\nmore\n" and more == "more"


# ---- completion ------------------------------------------------------------------------------------------------------


@pytest.fixture
def complete(folder):
    """Returns what a shell offers behind a line, as argcomplete's protocol has it."""
    pytest.importorskip("argcomplete", reason="the extra `completion` is not installed")
    Path("pictures").mkdir()

    def complete_line(line):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "offered"),
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        }
        subprocess.run([sys.executable, "-m", "amp_patch"], env=environment, check=True, cwd=folder)
        return {one.strip() for one in (folder / "offered").read_text().split("\n")} - {""}

    return complete_line


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("amp-patch tr", {"trace"}),
        ("amp-patch trace train.py --opt-level ", set(LEVELS.split(", "))),
        ("amp-patch lists explain mm --lists fl", {"float16"}),
        ("amp-patch tune --extends mi", {"mine.yaml"}),
        ("amp-patch trace t", {"train.py"}),
    ],
)
def test_completion(line, offered, complete):
    assert complete(line) == offered


def test_completion_needs_its_extra(monkeypatch, capsys):
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main([]) == 2
    assert 'pip install "amp_patch[completion]"' in capsys.readouterr().err


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compare", "doctor", "explain", "trace", "tune"])
def test_ctrl_c_is_one_line(name, folder, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("amp_patch.doctor.find_files", interrupted)
    monkeypatch.setattr("amp_patch.cli.scripts._call", interrupted)
    assert main([name, "train.py"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"amp-patch {name}: interrupted"


@pytest.mark.parametrize(
    "arguments",
    [
        ["trace", "train.py", "--fix", "mine.yaml"],
        ["trace", "train.py", "--json", "train.py"],
        ["tune", "train.py", "--out", "train.py"],
        ["check", "train.py", "--write", "train.py"],
        ["compare", "train.py", "--html", "train.py"],
        ["trace", "train.py", "--lists", "made.yaml", "--fix", "made.yaml"],
        ["tune", "train.py", "--extends", "made.yaml", "--out", "made.yaml"],
    ],
)
def test_no_file_of_the_user_and_no_input_is_overwritten(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = {"train.py": "raise SystemExit(9)\n", "mine.yaml": "blacklist: [tanh]\n"}
    texts["made.yaml"] = "# amp-patch trace train.py --fix made.yaml\nextends: float16\nblacklist: [tanh]\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "give another name" in " ".join(capsys.readouterr().err.split())
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
