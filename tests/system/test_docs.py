"""The blocks of the README and of docs/ run, generated parts are current, and links and anchors lead somewhere.

tests/cli/test_doc_pages.py runs the tutorials. test_distributed_page.py and tests/clients/test_trainers_page.py run
their pages.

Guards: README.md, docs/*, lists/README.md, tools/generate_cli_page.py, tools/draw_figures.py, examples/README.md, api.
"""

import ast
import doctest
import importlib.util
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml

import amp_patch as amp
from amp_patch import api, insight
from amp_patch.config.op_lists import check_oplists
from amp_patch.config.shipped import shipped_presets

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README, **{path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}}
NEIGHBOURS = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
    "lists/README.md",
)
TESTED_ELSEWHERE = {"apex.md", "ci.md", "distributed.md", "levels.md", "nan.md", "quiet.md", "trainers.md"}

BLOCK = re.compile(r"^```(\w+)(?: [^\n]*)?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
BLOCKS = {page: BLOCK.findall(text) for page, text in PAGES.items()}
# one with a title is a file of a tutorial
UNTITLED = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
PYTHON = [
    pytest.param(code, page, id=f"{page}-{index}")
    for page, text in PAGES.items()
    if page not in TESTED_ELSEWHERE
    for index, code in enumerate(UNTITLED.findall(text))
]
FILES = {
    found[1]: code
    for page, blocks in BLOCKS.items()
    for language, code in blocks
    if page != "README.md" and language == "yaml" and (found := re.match(r"# (\S+)\n", code))
}


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_a_folder_with_the_files(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def test_every_block_is_of_a_kind_that_is_tested():
    languages = {language for blocks in BLOCKS.values() for language, _ in blocks}
    assert languages == {"console", "diff", "pycon", "python", "sh", "text", "yaml"}
    assert all(text.count("```") == 2 * len(BLOCKS[page]) for page, text in PAGES.items())
    assert len(PYTHON) >= 14 and {"my_presets.yaml", "my_lists.yaml", "my_modules.yaml"} <= FILES.keys()


@pytest.mark.parametrize("page", [*PAGES, *NEIGHBOURS])
def test_every_block_of_code_has_a_fence_and_a_language(page):
    text = PAGES[page] if page in PAGES else (ROOT / page).read_text()
    without = BLOCK.sub("", text)
    chunks = without.split("\n\n")
    after = [before for before, chunk in zip(chunks, chunks[1:], strict=False) if chunk.startswith("    ")]
    assert "\n```" not in without
    assert [before for before in after if not re.match(r" *([*-]|\d+\.) ", before)] == []


@pytest.mark.parametrize("name", [*amp.__all__, *insight.__all__])
def test_every_attribute_has_an_entry_of_its_own(name):
    described = getattr(amp, name, None) or getattr(insight, name)
    attributes = (described.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^ +(\w+, [\w, ]+):", attributes, re.MULTILINE) == []


@pytest.mark.parametrize("code, page", PYTHON)
def test_python_blocks_run_without_a_warning(code, page):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", ["api.md", "insight.md"])
def test_examples_of_the_reference_give_what_they_show(page):
    test = doctest.DocTestParser().get_doctest(PAGES[page], {"__name__": "__main__"}, page, page, 0)
    said = []
    results = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert results.failed == 0, "".join(said)
    assert results.attempted > 2


def test_the_reference_has_every_public_name():
    described = set(re.findall(r"^::: amp_patch\.(\S+)", PAGES["api.md"] + PAGES["insight.md"], re.MULTILINE))
    public = {name for name in amp.__all__ if not name.endswith("Error")} - {"amp"}
    assert public == set(api.__all__)  # from which type checkers and the site have them
    internal = {
        "comparing",
        "describe_further",
        "describe_search",
        "note_float32",
        "find_base",
        "find_remedy",
        "agreement",
        "checking",
        "find_level",
        "note_casts",
        "remedies",
        "report",
        "runs",
    }  # what the commands need
    assert described == public | {"errors"} | {f"insight.{name}" for name in insight.__all__ if name not in internal}


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", ["README.md", "index.md"])
def test_output_on_a_first_page_is_that_of_a_page_that_is_run(page):
    shown = [code for language, code in BLOCKS[page] if language == "console"]
    assert shown and all(code in PAGES["nan.md"] for code in shown)


@pytest.mark.parametrize("kept", [" -", " +"])
def test_the_loop_of_the_readme_runs_before_and_after(kept):
    (difference,) = [code for language, code in BLOCKS["README.md"] if language == "diff"]
    lines = [line[1:] for line in difference.splitlines() if line[:1] in kept]
    exec(compile("\n".join(lines), "README.md", "exec"), {"__name__": "__main__"})
    amp.reset()


def find_rows(text):
    """Return the cells of every row of a table, by the first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


def test_the_figures_of_the_readme_are_those_of_the_benchmarks():
    times, memory = load_tool("draw_figures").read_tables((ROOT / "benchmarks" / "README.md").read_text())
    modes = ("float32", "O4", "O5")
    shown = find_rows(README)
    for workload, name in {"gpt-256": "GPT of width 256", "mlp": "MLP of width 1024"}.items():
        assert shown[f"step time, {name}"] == [f"{times[workload, mode]:.2f}" for mode in modes]
        assert shown[f"peak memory, {name}"] == [f"{memory[workload, mode]:.2f}" for mode in modes]
    counts = find_rows(PAGES["launches.md"].partition("As ratios")[0])
    launches = {mode: int(cells[2]) for mode, cells in counts.items() if cells[2:3] and cells[2].isdigit()}
    ratios = [launches[level] / launches["autocast-bfloat16"] for level in ("O0", "O4", "O5")]
    assert shown["kernel launches, with those of casts, small GPT"] == [f"{ratio:.2f}" for ratio in ratios]
    for level in ("O1", "O2"):
        assert f"{1 - launches[level] / launches['autocast-float16']:.0%} ({level})" in README


def test_targets_that_pages_name_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for page, text in PAGES.items():
        for target in re.findall(r"`make ([a-z-]+)", text):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), (page, target)


def test_commands_in_tables_take_their_options():
    """The options of `amp-patch` commands in the README and on the page of troubles are on the page of the commands."""
    reference = {
        part.partition("\n")[0]: part for part in re.split(r"^#+ amp-patch ", PAGES["cli.md"], flags=re.MULTILINE)
    }
    commands = re.findall(r"`amp-patch ([^`]+)`", README + PAGES["which.md"])
    assert len(commands) > 25
    for command in commands:
        words = command.split()
        name = " ".join(words[:2]) if words[0] == "lists" else words[0]
        unknown = [word for word in words if word.startswith("--") and word not in reference[name]]
        assert not unknown, command


def test_the_list_of_the_readme_has_no_fault(tmp_path):
    (text,) = [code for language, code in BLOCKS["README.md"] if language == "yaml"]
    (tmp_path / "readme.yaml").write_text(text)
    report = check_oplists(tmp_path / "readme.yaml")
    assert not report.errors and not report.warnings


def test_the_table_of_levels_is_that_of_the_presets():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGES["presets.md"].splitlines()
        if line.startswith("| ")
    ]
    header = next(row for row in rows if row[1:2] == ["O0"])
    written = {
        row[0].strip("`"): dict(zip(header[1:], row[1:], strict=True))
        for row in rows
        if len(row) == 7 and row[0].startswith("`")
    }
    presets = yaml.safe_load(shipped_presets().read_text())
    for level in header[1:]:
        own = presets[level]
        properties = {**presets.get(own.get("extends"), {}), **own}
        for name, shown in written.items():
            said = {True: "yes", False: "no", None: "-"}.get(properties[name], str(properties[name]))
            assert shown[level] in (said, str(properties[name])), (level, name)
    assert len(written) == 9


def test_pages_name_public_functions_that_there_are():
    named = {name for text in PAGES.values() for name in re.findall(r"(?<!torch\.)\bamp\.(\w+)\(", text)}
    assert len(named) > 10 and [name for name in named if not hasattr(amp, name)] == []


@pytest.mark.parametrize(
    "tool, page, make",
    [
        ("generate_cli_page", "cli.md", lambda tool: tool.make_page()),
        ("draw_figures", "figures.svg", lambda tool: tool.draw(tool.TABLES.read_text())),
        ("draw_figures", "figures-narrow.svg", lambda tool: tool.draw(tool.TABLES.read_text(), is_narrow=True)),
    ],
)
def test_what_is_generated_is_current(tool, page, make):
    assert (ROOT / "docs" / page).read_text() == make(load_tool(tool)), f"run: python tools/{tool}.py"


def messages():
    """Every string constant of the package, with `...` in the place of what is filled in."""
    for path in (ROOT / "amp_patch").rglob("*.py"):
        yield from constants(ast.parse(path.read_text()))


def constants(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sd]", "...", node.value)


def test_messages_that_are_explained_are_those_of_the_package():
    """Or those of torch's GradScaler."""
    page = PAGES["troubleshooting.md"]
    of_torch = page.partition("## Exceptions of torch")[2].partition("\n## ")[0]
    own = page.replace(of_torch, "")
    quoted = re.findall(r"^### `(.*)`$", own, re.MULTILINE)
    said = "\n".join([*messages(), *constants(ast.parse(inspect.getsource(torch.amp.grad_scaler)))])
    assert len(quoted) > 20 and [text for text in quoted if text not in said] == []


def anchors(text):
    """The anchors of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def find_dead_links(path):
    text = BLOCK.sub("", path.read_text())
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        goal = path.parent / target if target else path
        if not goal.exists() or (anchor and anchor not in anchors(goal.read_text())):
            yield f"{path.name}: {target}#{anchor}"


def test_links_lead_to_files_and_headings_that_there_are():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / name for name in NEIGHBOURS)]
    assert [link for page in pages for link in find_dead_links(page)] == []
