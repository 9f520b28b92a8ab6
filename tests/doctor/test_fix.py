"""Mending: broken scripts run afterwards, and what is no part of a fault stays byte for byte."""

import codecs
import json
from pathlib import Path

import pytest
from broken_scripts import BROKEN
from fork_server import ForkServer

from amp_patch.cli.main import main
from amp_patch.doctor.rules import complete, sorted_rules


@pytest.fixture(scope="module")
def server():
    """Forks of a process that has imported torch and the package."""
    server = ForkServer("import torch._dynamo, torch._inductor.config, amp_patch.api")
    yield server
    server.close()


def mend(path: Path, *options: str) -> int:
    return main(["doctor", "--no-advice", *options, str(path)])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_script_runs_when_it_is_mended_and_not_before(name, tmp_path, server, capsys):
    broken, path = tmp_path / "broken.py", tmp_path / "train.py"
    for one in (broken, path):
        one.write_text(BROKEN[name])
    assert mend(path, "--fix") == 0, capsys.readouterr().out
    runner = ["-m", "amp_patch", "run"] if name.startswith("apex") else []
    commands = [[*runner, broken], [*runner, path]]
    before, after = server.run_together(commands, cwd=tmp_path, environments=[{}, {}])
    assert before.returncode == 1
    assert after.returncode == 0, after.stderr + path.read_text()
    mended = path.read_bytes()
    assert mend(path, "--fix") == 0
    assert path.read_bytes() == mended


# ---- what is no part of a fault ------------------------------------------------------------------------------------

SCRIPTS = {**BROKEN, **{rule.code: complete(rule.bad) for rule in sorted_rules() if rule.mends}}
WAYS = {
    "windows-lines": lambda text: text.replace("\n", "\r\n").encode(),
    "old-mac-lines": lambda text: text.replace("\n", "\r").encode(),
    "byte-order-mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "latin-1": lambda text: b"# coding: latin-1\n# \xe9\n" + text.encode(),
    "wide-characters": lambda text: ("'\N{SNOWMAN}\f\N{ELEPHANT}'\n" + text).encode(),
    "tabs": lambda text: ("if 1:\n\tpass\n" + text.replace("    ", "\t")).encode(),
    "no-last-newline": lambda text: text.rstrip("\n").encode(),
}
"""Ways to write a script down; mending is the same in each."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_mending_keeps_how_a_script_is_written(name, way, tmp_path):
    plain, path = tmp_path / "plain.py", tmp_path / "train.py"
    plain.write_text(SCRIPTS[name])
    path.write_bytes(WAYS[way](SCRIPTS[name]))
    mend(plain, "--fix")
    mend(path, "--fix")
    assert path.read_bytes() == WAYS[way](plain.read_text())


AMP = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'
STATE = "{'o': optimizer.state_dict()}"
LOSS = "loss = model(x).sum()\nloss.backward()\n"
INNER = LOSS.replace("\n", "\n    ")
HEAD = f"import torch\nimport amp_patch as amp\n{AMP}"


def cases(kind, script, parts):
    """Return a parameter for each part, put in the place of @ in a script."""
    return [pytest.param(script.replace("@", part), id=f"{kind}-{name}") for name, part in parts.items()]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(HEAD + "if on: loss.backward(); optimizer.step()\n", id="one-line"),
        pytest.param(HEAD + "for x in y: loss.backward()\noptimizer.step()\n", id="body-on-the-line"),
        pytest.param("if on:\n    " + HEAD.replace("\n", "\n    ") + "pass\nloss.backward()\n", id="amp-under-a-flag"),
        pytest.param(HEAD.replace("optimizer", "optimizers[0]") + "loss.backward()\n", id="nameless-optimizer"),
        pytest.param(
            HEAD + "with amp.scale_loss(loss, optimizer) as s:\n    optimizer.step()\n    s.backward()\n",
            id="step-first",
        ),
        pytest.param(
            HEAD + "with amp.scale_loss(loss, optimizer) as s:\n    s.backward()\n    optimizer.step(s)\n", id="used"
        ),
        pytest.param(
            HEAD + "with amp.scale_loss(loss, optimizer) as s, other:\n    s.backward()\n    optimizer.step()\n",
            id="two-items",
        ),
        pytest.param(HEAD + "with amp.scale_loss(a, optimizer) as s:\n    b.backward()\n", id="another-loss"),
        pytest.param(
            HEAD + "with amp.scale_loss(a, optimizer) as s:\n    pass\nnext()\ns.backward()\n", id="something-between"
        ),
        pytest.param(HEAD + "with amp.scale_loss(a, optimizer) as s: pass\ns.backward()\n", id="block-on-one-line"),
        pytest.param("import torch\nmodel = torch.nn.DataParallel(model)\nf(model.module)\n" + HEAD, id="unwrapped"),
        pytest.param(
            "import amp_patch as amp\nif on:\n    amp.load_state_dict(c)\n    n = 1\nprint(n)\n" + HEAD,
            id="needed-before",
        ),
        *cases(
            "moved-over",
            f"import torch\nmodel = Net()\n{HEAD}@\nmodel.cuda(rank())\n",
            {
                "import": "from os import getpid as rank",
                "star": "from ranks import *",
                "function": "def rank(): ...",
                "loop": "for rank in ranks: ...",
                "with": "with open(p) as (rank, x): ...",
                "handler": "try: ...\nexcept E as rank: ...",
                "case": "match x:\n    case {**rank}: ...",
                "delete": "del rank",
                "augmented": "rank += 1",
                "attribute": "rank.at = 0",
                "another-model": "model = model.layers",
            },
        ),
        *cases(
            "name-of",
            "from amp_patch import initialise\n@\ninitialise(model)\n",
            {
                "parameter": "def f(initialise): ...",
                "loop": "for initialise in all: ...",
                "the-right-function": "def initialize(): ...",
            },
        ),
        *(
            pytest.param(
                f"{HEAD}with amp.scale_loss(loss, optimizer, {more}) as s:\n    s.backward()\n"
                "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
                id=f"delayed-{name}",
            )
            for name, more in {"keyword": "delay_unscale=i % 2", "position": "0, None, i % 2"}.items()
        ),
        *cases(
            "amp-elsewhere",
            "import torch\nimport amp_patch as amp\n@",
            {
                "function": f"{AMP}def f():\n    with torch.autocast('cuda'):\n        model(x)\n",
                "switch": f"{AMP}def f():\n    with torch.autocast('cuda', None, False):\n        model(x)\n",
                "flag": f"if on:\n    {AMP}scaler = torch.amp.GradScaler()\n",
                "block": f"def f():\n    {AMP}def g():\n    scaler = torch.amp.GradScaler()\n    if on:\n"
                "        with amp.scale_loss(x, optimizer) as s:\n            s.backward()\n",
            },
        ),
        *cases(
            "backward",
            f"{HEAD}@\n",
            {
                "of-another-optimizer": f"{LOSS}d_optimizer.step()\noptimizer.step()",
                "of-two-optimizers": f"{LOSS}optimizer.step()\nd_optimizer.step()",
                "before-a-scheduler": f"{LOSS}scheduler.step()\noptimizer.step()",
                "of-its-own-optimizer": f"def f():\n    optimizer = SGD(p)\n    {INNER}optimizer.step()",
                "without-step": LOSS + "print(x.grad)",
                "for-an-input": LOSS + "print(x.grad)\noptimizer.step()",
                "for-nothing": LOSS + "optimizer.zero_grad()\noptimizer.step()",
                "for-some-optimizer": f"def f(optimizer=None):\n    {INNER}if optimizer:\n        optimizer.step()",
                "step-elsewhere": LOSS + "for x in y:\n    optimizer.step()",
                "parameter": "def f(loss):\n    loss.backward()\n    optimizer.step()",
                "global": "loss = f()\ndef g():\n    loss.backward()\n    optimizer.step()",
                "attribute": "self.loss = f()\nself.loss.backward()\noptimizer.step()",
                "loop": "for loss in losses:\n    loss.backward()\n    optimizer.step()",
                "expression": "loss = f()\n(loss / 2).backward()\noptimizer.step()",
            },
        ),
        *cases(
            "checkpoint",
            f"{HEAD}@\n",
            {
                "nested": f"torch.save({{'all': {STATE}}}, path)",
                "amp-key": "torch.save({'amp': True, 'o': optimizer.state_dict()}, path)",
                "amp-entry": f"state = {STATE}\nstate['amp'] = True\ntorch.save(state, path)",
                "more-keys": "torch.save({**base, 'o': optimizer.state_dict()}, path)",
                "keywords": f"state = {STATE}\nsave(path, **state)",
                "in-a-list": f"torch.save([{STATE}], path)",
                "not-saved": f"state = {STATE}\ntorch.save(model, path)",
                "item": "states = {}\nstates[0] = optimizer.state_dict()\ntorch.save(states, path)",
                "no-dict": "state = make()\nstate['o'] = optimizer.state_dict()\ntorch.save(state, path)",
                "attribute": f"self.state = {STATE}\ntorch.save(self.state, path)",
                "made-anew": f"state = {STATE}\nstate = pick(state)\ntorch.save(state, path)",
            },
        ),
        *(
            pytest.param(
                "import amp_patch as amp\nparser.add_argument('--level', default='o1')\n"
                f"amp.initialize(model, opt_level=args.level)\n{use}\n",
                id=f"level-{name}",
            )
            for name, use in {
                "compared": "if args.level == 'o1': ...",
                "looked-up": "rate = rates[args.level]",
                "matched": "match args.level:\n    case 'o1': ...",
            }.items()
        ),
        pytest.param(
            "import amp_patch as amp\nLEVEL = 'o1'\namp.initialize(model, opt_level=LEVEL)\nf(LEVEL)\n", id="level-used"
        ),
        pytest.param(
            f"import torch\nmodel = Net()\n{HEAD.replace('model, optimizer =', 'model, rank =')}model.cuda(rank)\n",
            id="moved-over-what-is-returned",
        ),
        *cases(
            "wrapper",
            f"import torch\n@\n{HEAD}",
            {
                "of-another": "model = torch.nn.DataParallel(net)",
                "attribute": "model = torch.nn.DataParallel(model)\nbare = model.module if on else model",
                "string": "model = torch.nn.DataParallel(model)\nnames = [n for n in all if n.startswith('module.')]",
                "with-later-ids": "model = torch.nn.DataParallel(model, ids)\nids = None",
            },
        ),
        pytest.param(
            f"import torch\ndef setup():\n    import amp_patch as amp\n    {AMP}def train():\n    {INNER}"
            "optimizer.step()\nsetup()\ntrain()\n",
            id="amp-imported-elsewhere",
        ),
        *cases(
            "order",
            "import torch\nimport amp_patch as amp\n@\n",
            {
                "loss-of-a-function-without-amp": f"def plain():\n    {INNER}optimizer.step()\n"
                f"def with_amp():\n    {AMP}plain()",
                "loss-of-a-class-without-amp": f"class A:\n    def step(self):\n        loss = f()\n"
                "        loss.backward()\n        optimizer.step()\nclass B:\n    def __init__(self):\n"
                f"        {AMP}\nA()",
                "loss-before": f"for x in warmup:\n    {INNER}optimizer.step()\n{AMP}",
                "saved-before": f"torch.save({STATE}, path)\n{AMP}",
                "cast-before": f"with torch.autocast('cuda'):\n    model(x)\n{AMP}",
                "wrapped-then-loaded": f"model = torch.nn.DataParallel(model)\nmodel.load_state_dict(x)\n{AMP}",
                "half-then-saved": f"model = model.half()\ntorch.save(model.state_dict(), path)\n{AMP}",
                "half-on-a-switch": "model.half()\n" + AMP.replace(")\n", ", enabled=on)\n"),
                "moved-late": f"model = Net()\n{AMP}print(1)\nmodel.to(device)",
                "resumed-then-copied": f"if on:\n    model.load_state_dict(x)\n    amp.load_state_dict(x)\n"
                f"ema = deepcopy(model)\n{AMP}",
                "amp-for-a-level": f"state = {{'amp': 'O1'}}\n{AMP}optimizer.load_state_dict(state['o'])",
                "loss-made-anew": f"{AMP}with amp.scale_loss(loss, optimizer) as s:\n    loss = loss / 4\n"
                "    loss.backward()",
                "loss-added-to": f"{AMP}with amp.scale_loss(loss, optimizer) as s:\n    loss += penalty\n"
                "    loss.backward()",
                "another-scaled-loss": f"{AMP}scaled_loss = 7\nwith amp.scale_loss(loss, optimizer):\n"
                "    loss.backward()",
                "clipped-by-the-scale": f"{AMP}with amp.scale_loss(loss, optimizer) as s:\n    s.backward()\n"
                "    scale = s / loss\n    torch.nn.utils.clip_grad_norm_(p, 0.1 * scale)",
            },
        ),
    ],
)
def test_what_takes_more_than_the_place_is_left_alone(source, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(source)
    assert mend(path, "--fix") == 1
    assert path.read_text() == source


@pytest.mark.parametrize(
    ("source", "mended"),
    [
        (
            "state = {'e': 1}\nstate['o'] = optimizer.state_dict()\ntorch.save(state, path)\n",
            "state = {'e': 1}\nstate['o'] = optimizer.state_dict()\n"
            'state["amp"] = amp.state_dict()\ntorch.save(state, path)\n',
        ),
        (
            f"state = {STATE}\nself.save(path, state=state)\n",
            "state = {'o': optimizer.state_dict(), \"amp\": amp.state_dict()}\nself.save(path, state=state)\n",
        ),
    ],
    ids=["entry", "name"],
)
def test_a_checkpoint_that_is_saved_by_its_name_gets_the_state_of_amp(source, mended, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + source)
    assert mend(path, "--fix") == 0
    assert path.read_text() == HEAD + mended


def test_all_values_of_an_option_are_spelt_alike(tmp_path):
    path = tmp_path / "train.py"
    source = "import amp_patch as amp\nparser.add_argument('--level', default={}, choices=[{}])\n"
    source += "amp.initialize(model, opt_level=args.level)\nprint(f'{{args.level}}')\n"
    path.write_text(source.format("1", "'o0', '0', 0, '00', 'o1', '01', \"O2\""))
    assert mend(path, "--fix") == 0
    assert path.read_text() == source.format('"O1"', ", ".join(f'"O{number}"' for number in (0, 0, 0, 0, 1, 1, 2)))


def test_lines_in_strings_stay_and_comments_go_along(tmp_path):
    path = tmp_path / "train.py"
    header = "with torch.autocast(\n    'cuda'\n):\n"
    path.write_text(f'{HEAD}{header}    # why: so\n    text = """a\n    b"""\n    model(x)\n')
    assert mend(path, "--fix") == 0
    assert path.read_text() == f'{HEAD}# why: so\ntext = """a\n    b"""\nmodel(x)\n'


# ---- notebooks -------------------------------------------------------------------------------------------------------


def make_notebook(*sources, as_lists=True, **layout):
    cells = [{"cell_type": "markdown", "metadata": {}, "source": ["# Training é"]}]
    for source in sources:
        text = source.splitlines(keepends=True) if as_lists else source
        outputs = [{"name": "stdout", "output_type": "stream", "text": ["1.50\n"]}]
        cells.append({"cell_type": "code", "execution_count": 3, "metadata": {}, "outputs": outputs, "source": text})
    tree = {"cells": cells, "metadata": {"x": 1.0}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(tree, **{"indent": 1, "ensure_ascii": False, **layout}) + "\n"


CELLS = (
    "%matplotlib inline\nimport torch, torch.nn.functional as F\nimport amp_patch as amp\nfiles = !ls\nmodel?",
    "%%bash\nfor x in *; do echo $x; done",
    '%%time\nmodel, optimizer = amp.initialize(model, optimizer, opt_level="o1")',
    "with amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\n    %timeit f()\n    optimizer.step()",
    "text = '# why?'\nnumber = (7\n % 4)",
)
MENDED = (
    *CELLS[:2],
    CELLS[2].replace("o1", "O1"),
    CELLS[3].replace("    optimizer", "optimizer"),
    CELLS[4],
)


MAGICS = {
    "percent-in-brackets": '%matplotlib inline\nprint("%d"\n      % (1,))',
    "percent-in-a-string": '!ls\ntext = """is it?\n% no magic\n! nor this"""',
    "percent-after-a-backslash": "%time f()\nrest = 7 \\\n  % 4",
    "continued": "if on:\n    !pip install \\\n      torch \\\n  wrapt\nx = 1",
    "brackets-in-strings": "!ls\nx = ('(', \"'[\",  # {\n  r'\\\\')\nfiles = !ls (",
    "help": "?print\nmodel.forward??\nx = [1,\n  2]",
}


@pytest.mark.parametrize("cell", MAGICS.values(), ids=MAGICS)
def test_magics_are_told_from_python_and_lines_stay_where_they_are(cell, tmp_path, capsys):
    path = tmp_path / "train.ipynb"
    call = '{}\nmodel, optimizer = amp.initialize(model, optimizer, opt_level="{}")'
    path.write_text(make_notebook(CELLS[0], call.format(cell, "o1"), "!ls \\"))
    assert mend(path) == 1
    assert f"{path}:cell 2:{len(cell.splitlines()) + 1}:63: error: opt_level" in capsys.readouterr().out
    assert mend(path, "--fix") == 0
    assert path.read_text() == make_notebook(CELLS[0], call.format(cell, "O1"), "!ls \\")


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"ensure_ascii": True}, {"indent": None}], ids=str)
@pytest.mark.parametrize("as_lists", [True, False], ids=["lists", "strings"])
def test_a_notebook_is_mended_and_keeps_its_layout(layout, as_lists, tmp_path):
    path = tmp_path / "train.ipynb"
    path.write_text(make_notebook(*CELLS, as_lists=as_lists, **layout))
    assert mend(path, "--fix") == 0
    assert path.read_text() == make_notebook(*MENDED, as_lists=as_lists, **layout)


def test_findings_in_a_notebook_name_cell_and_line(tmp_path, capsys):
    path = tmp_path / "train.ipynb"
    path.write_text(make_notebook(*CELLS))
    assert mend(path) == 1
    said = capsys.readouterr().out
    assert f"{path}:cell 3:2:63: error: opt_level 'o1' is not a level" in said
    assert f"{path}:cell 4:4:5: warning: optimizer.step() inside" in said
    mend(path, "--diff")
    assert '+    "optimizer.step()"\n' in capsys.readouterr().out


def test_a_notebook_laid_out_otherwise_is_read_but_not_written(tmp_path, capsys):
    path = tmp_path / "train.ipynb"
    path.write_text(make_notebook(*CELLS).replace('"nbformat": 4', '"nbformat":  4'))
    text = path.read_text()
    assert mend(path, "--fix") == 1
    said = capsys.readouterr().out
    assert path.read_text() == text and "[AMP201]" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not Python source"),
        ("[]", "it has no cells"),
        (make_notebook("x = 1", "x = (\n  1\n  2"), "train.ipynb:cell 2:1:5: error: this cell cannot be parsed"),
        (make_notebook("%matplotlib inline\nx = 1", "!ls\n\n  y = 2"), "train.ipynb:cell 2:3:"),
    ],
    ids=["no-json", "no-cells", "no-python", "no-python-after-a-magic"],
)
def test_a_notebook_that_cannot_be_read_is_a_finding(text, said, tmp_path, capsys):
    (tmp_path / "train.ipynb").write_text(text)
    assert mend(tmp_path / "train.ipynb") == 1
    shown = capsys.readouterr().out
    assert said in shown and "[AMP001]" in shown


def test_a_cell_that_cannot_be_parsed_is_told_and_the_others_are_checked_and_mended(tmp_path, capsys):
    path, unfinished = tmp_path / "train.ipynb", "for x in (1,\n%time"
    path.write_text(make_notebook(CELLS[0], unfinished, *CELLS[1:]))
    assert mend(path) == 1
    said = capsys.readouterr().out
    assert f"{path}:cell 2:" in said and said.count("AMP001") == 1
    assert f"{path}:cell 4:2:63: error: opt_level 'o1' is not a level" in said
    assert mend(path, "--fix") == 1
    assert path.read_text() == make_notebook(MENDED[0], unfinished, *MENDED[1:])


@pytest.mark.parametrize(
    "source",
    [
        f"import amp_patch as amp\nfrom torch.amp import GradScaler\n{AMP.replace(')', ', loss_scale=1.0)')}"
        "scaler = GradScaler()\n",
        f"import amp_patch as amp\nbank = model.encode(x).half()\n{AMP}",
        f"import amp_patch as amp\n{AMP}model.to(dtype)\n",
    ],
    ids=["scaler-beside-no-scale", "output", "cast-for-export"],
)
def test_what_is_right_is_left_alone(source, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(source)
    mend(path, "--fix")
    assert path.read_text() == source
