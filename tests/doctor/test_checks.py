"""Each rule of the doctor finds its fault in bad code and none in good code: in its own examples and in real code.

Guards: doctor/checkpoint_checks, doctor/import_checks, doctor/loss_checks, doctor/setup_checks, doctor/rules.
Guards: doctor/script, doctor/tree, doctor/names.
"""

from pathlib import Path

import pytest
import yaml

import amp_patch
from amp_patch.config import levels
from amp_patch.doctor import Project, Selection, explain_rule, sorted_rules
from amp_patch.doctor.script import Script, expect
from amp_patch.errors import SettingsError

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\nimport amp_patch as amp\n"
OWN = HEAD + 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'
APEX = OWN.replace("import amp_patch as amp", "from apex import amp")
SCALE = "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    "
RULES = [pytest.param(rule, id=rule.code) for rule in sorted_rules() if rule.find]


def diagnose(tmp_path: Path, *sources: str) -> list[tuple[str, int | None]]:
    """The code and the line of each finding in these sources, but for covered imports of apex."""
    files = [tmp_path / f"script{number}.py" for number in range(len(sources))]
    for file, source in zip(files, sources, strict=True):
        file.write_text(source)
    found = Project(files).diagnose(Selection())
    return [(one.code, one.line) for one in found if one.code != "AMP101" or "# AMP101" in sources[0]]


def marked(source: str) -> list[tuple[str, int]]:
    lines = enumerate(source.splitlines(), 1)
    return [(line.rpartition("# ")[2], number) for number, line in lines if "# AMP" in line]


def complete(example: str) -> str:
    """An example with the imports, and the call of `initialize`, that it leaves out."""
    if example.startswith(("import ", "from ")):
        return example
    return (HEAD if "initialize" in example else OWN) + example


def test_an_optimizer_that_initialize_was_not_given_is_told_of_if_it_steps(tmp_path):
    source = complete('model, optimizer = amp.initialize(model, optimizer, opt_level="O2")\n')
    source += "other = torch.optim.Adam(model.parameters())\n"
    assert diagnose(tmp_path, source) == []
    assert [code for code, _ in diagnose(tmp_path, f"{source}other.step()\n")] == ["AMP210"]


@pytest.mark.parametrize("rule", RULES)
def test_examples(rule, tmp_path):
    bad = complete(rule.bad)
    assert diagnose(tmp_path, bad) == marked(bad) != []
    assert diagnose(tmp_path, complete(rule.good)) == []


BAD = {
    "pretrained-model-moved-late": HEAD
    + "model = Net.from_pretrained(name)\n"
    + "model, optimizer = amp.initialize(model, optimizer)\nmodel.to(args.device)  # AMP208",
    "optimizer-renewed-in-the-loop": OWN
    + "for epoch in epochs:\n    if epoch == 5:\n"
    + "        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # AMP210",
    "initialize-each-epoch": HEAD
    + "for epoch in epochs:\n    model, optimizer = amp.initialize(model, optimizer)  # AMP211\n    train()",
    "import-of-what-is-gone": "from apex.contrib.sparsity import ASP  # AMP102",
    "import-in-a-handler": "try:\n    import fast\nexcept ImportError:\n    import apex.RNN  # AMP102",
    "attribute-of-a-module": "import apex\noptimizer = apex.optimizers.FusedThing(p)  # AMP102",
    "attribute-of-a-bound-extension": "import amp_C\nkernel = amp_C.multi_tensor_no_such_kernel  # AMP102",
    "name-of-amp-patch": "from amp_patch import initialise  # AMP102",
    "unscaled-in-block": OWN + SCALE + "(loss / 4).backward(retain_graph=True)  # AMP301",
    "unscaled-in-block-reached-through-args": OWN
    + "with args.amp.scale_loss(loss, optimizer) as scaled_loss:\n    loss.backward()  # AMP301",
    "clip-in-block": APEX
    + SCALE
    + "scaled_loss.backward()\n    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1)  # AMP305",
    "name-of-the-loss-taken-over": OWN
    + "with amp.scale_loss(loss, optimizer) as loss:\n    loss.backward()\nlosses.append(loss.item())  # AMP313",
    "scaled-loss-logged-in-block": OWN + SCALE + "scaled_loss.backward()\n    total += scaled_loss.item()  # AMP313",
    "saved-piece-by-piece": OWN + "state['optimizer'] = optimizer.state_dict()  # AMP501\ntorch.save(state, path)",
    "saved-by-a-function-of-the-script": APEX
    + "save_checkpoint({'optimizer': optimizer.state_dict()}, path)  # AMP501",
    "loaded-where-told-so": OWN + "if args.resume:\n    optimizer.load_state_dict(torch.load(path))  # AMP502",
    "state-loaded-too-early": HEAD
    + "if args.resume:\n    amp.load_state_dict(torch.load(path)['amp'])  # AMP503\n"
    + "model, optimizer = amp.initialize(model, optimizer)",
}

GOOD = {
    "model-moved-twice": HEAD
    + "model = Net().cuda()\nmodel, optimizer = amp.initialize(model, optimizer)\nmodel.cuda()",
    "model-made-by-a-function": HEAD
    + "model = build(args)\nmodel, optimizer = amp.initialize(model, optimizer)\nmodel.to(device)",
    "model-moved-back": HEAD + "model = Net()\nmodel, optimizer = amp.initialize(model, optimizer)\nmodel.to('cpu')",
    "optimizer-wrapped": OWN + "optimizer = Lookahead(optimizer, k=5)",
    "optimizer-without-amp": HEAD
    + "if args.fp16:\n    model, optimizer = amp.initialize(model, optimizer)\n"
    + "else:\n    optimizer = torch.optim.SGD(model.parameters())",
    "optimizer-and-initialize-again": OWN
    + "optimizer = torch.optim.SGD(model.parameters())\nmodel, optimizer = amp.initialize(model, optimizer)",
    "a-model-for-each-fold": HEAD
    + "for fold in range(5):\n    model = Net()\n    model, optimizer = amp.initialize(model, make(model))",
    "initialize-once-in-a-loop": HEAD
    + "for step in steps:\n    if step == 0:\n        model, optimizer = amp.initialize(model, optimizer)",
    "never-run": OWN + "if False:\n    import apex.RNN\n    torch.save(optimizer.state_dict(), path)",
    "saved-where-amp-is-off": HEAD
    + "if args.fp16:\n    model, optimizer = amp.initialize(model, optimizer)\n"
    + "else:\n    torch.save(optimizer.state_dict(), path)",
    "import-with-a-fallback": "import amp_patch\ntry:\n    import torch_scatter\nexcept ImportError:\n    pass",
    "relative-imports": "from .apex import nothing\nfrom . import apex\napex.transformer.x()",
    "module-under-another-name": "import apex.optimizers as fused\nfused.FusedAdam(p)",
    "object-under-the-name-of-a-module": "from apex import amp\namp._amp_state.loss_scalers[0]._unskipped",
    "amp-of-two-packages": "try:\n    from apex import amp\nexcept ImportError:\n    from torch.cuda import amp\n"
    "amp.GradScaler()",
    "made-of-a-scaled-loss": OWN + SCALE + "total = scaled_loss / 2\n    total.backward()",
    "nothing-is-scaled": OWN.replace("O1", "O4")
    + SCALE
    + "loss.backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1)\ntorch.save(optimizer.state_dict(), path)",
    "clipped-behind-the-block": OWN + SCALE + "scaled_loss.backward()\nnn.utils.clip_grad_norm_(p, 1)",
    "scaled-loss-divided-again": OWN + SCALE + "scaled_loss.backward()\nprint(scaled_loss.item() / loss_scale)",
    "name-of-the-loss-bound-again": OWN
    + "with amp.scale_loss(loss, optimizer) as loss:\n    loss.backward()\nloss = f(x)\nprint(loss.item())",
    "state-of-amp-saved": OWN + "torch.save([optimizer.state_dict(), amp.state_dict()], path)",
    "weights-only": OWN + "torch.save(model.state_dict(), path)\nmodel.load_state_dict(torch.load(path))",
    "scalers-saved-by-hand": APEX + "torch.save([optimizer.state_dict(), amp._amp_state.loss_scalers], path)",
    "state-of-what-was-loaded": OWN + "optimizer = torch.load(path)\nsave(optimizer.state_dict())",
    "delegating-wrapper": OWN
    + "class Wrapper:\n    def state_dict(self):\n        return self.optimizer.state_dict()\n"
    + "    def load_state_dict(self, state):\n        self.optimizer.load_state_dict(state)\n    def save(self): ...\n"
    + "save()",
    "optimizer-with-its-own-scale": OWN
    + "optimizer = FP16_Optimizer(optimizer)\ntorch.save(optimizer.state_dict(), path)",
    "state-in-another-function": HEAD
    + "def resume():\n    amp.load_state_dict(c)\ndef main():\n    model, optimizer = amp.initialize(model, optimizer)",
    "not-under-amp": "import torch\nloss.backward()\ntorch.save(optimizer.state_dict(), path)",
}


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in BAD.items()])
def test_a_fault_is_found_at_its_line_and_nothing_else(source, tmp_path):
    assert diagnose(tmp_path, source) == marked(source) != []


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in GOOD.items()])
def test_what_only_looks_like_a_fault_is_left_alone(source, tmp_path):
    assert diagnose(tmp_path, source) == []


def test_a_name_with_a_fallback_is_a_note(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("try:\n    from apex.contrib.sparsity import ASP\nexcept ImportError:\n    ASP = None\n")
    (finding,) = Project([path]).diagnose(Selection())
    assert (finding.code, finding.severity) == ("AMP102", "note")


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("from apex.amp import intialize", "Did you mean 'initialize'?"),
        ("from apex.optimisers import FusedAdam", "Did you mean 'optimizers'?"),
        ("from amp_patch import initialise", "Did you mean 'initialize'?"),
        ("from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam", "fully_shard"),
        ("from apex.amp import wrap", "amp.register_half_function"),
        ("import apex.contrib.optimizers.fused_sgd", "from apex.contrib.optimizers import FusedSGD"),
        ("from apex.amp import zzz", "look for one in torch"),
    ],
)
def test_a_missing_name_is_told_the_right_one_or_what_to_use_today(source, advice, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(source)
    (finding,) = Project([path]).diagnose(Selection())
    assert finding.code == "AMP102" and advice in finding.advice


@pytest.mark.parametrize(
    "line",
    [
        "import apex",
        "from apex.amp import initialize, _amp_state",
        "from apex.optimizers import FusedAdam, FusedLAMB",
        "from amp_C import multi_tensor_scale",
    ],
)
def test_a_covered_import_is_a_note_with_the_way_to_run_it(line, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(line)
    (finding,) = Project([path]).diagnose(Selection())
    assert (finding.code, finding.severity) == ("AMP101", "note")
    assert "amp-patch run" in finding.advice


def test_a_file_without_initialize_takes_the_levels_of_those_with_it(tmp_path):
    engine = HEAD + "def step(loss):\n    " + SCALE.replace("\n", "\n    ") + "loss.backward()\n"
    assert diagnose(tmp_path, engine) == diagnose(tmp_path, engine, OWN) == [("AMP301", 7)]
    assert diagnose(tmp_path, engine, OWN.replace("O1", "O4")) == []


def test_levels_with_a_loss_scale_are_those_of_the_shipped_presets():
    table = yaml.safe_load((Path(amp_patch.__file__).parent / "../lists/presets.yaml").read_bytes())
    scales = {name: {**table.get(own.get("extends"), {}), **own}["loss_scale"] for name, own in table.items()}
    facts = {level.name: level.has_dynamic_scale for level in levels.read_levels()}
    assert {name: scale == "dynamic" for name, scale in scales.items()} == facts


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", (True, True)),
        ("opt_level=args.level", (True, True)),
        ("opt_level='O4'", (False, False)),
        ("opt_level='O4', loss_scale='dynamic'", (True, True)),
        ("opt_level='O2', loss_scale=128.0", (True, False)),
        ("opt_level='O2', loss_scale=1", (False, False)),
        ("enabled=False", (False, False)),
        ("**options", (True, True)),
    ],
)
def test_what_initialize_is_asked_for_decides_whether_losses_are_scaled_and_steps_skipped(arguments, expected):
    script = Script("script.py", f"{HEAD}amp.initialize(model, optimizer, {arguments})")
    found = expect([script])
    assert (found.scales, found.skips) == expected


@pytest.mark.parametrize(
    ("before", "is_known"),
    [("LEVEL = 'O4'", True), ("LEVEL = 'O4'\nLEVEL = choose()", False), ("LEVEL = 'O4'\ndef main(LEVEL): ...", False)],
    ids=["once", "twice", "argument"],
)
def test_a_name_stands_for_the_one_constant_that_it_is_assigned(before, is_known):
    script = Script("script.py", f"{HEAD}{before}\namp.initialize(model, optimizer, opt_level=LEVEL)")
    assert expect([script]).scales is not is_known


# ---- the table of rules ----------------------------------------------------------------------------------------------


def test_rules_are_explained_with_reason_and_examples():
    for rule in sorted_rules():
        said = explain_rule(rule.code)
        assert rule.why and said.startswith(f"{rule.code}: {rule.summary}\n\n{rule.why}")
        assert all(f"    {line}" in said for line in [*rule.bad.splitlines(), *rule.good.splitlines()] if line)


@pytest.mark.parametrize(
    ("select", "ignore", "has", "has_not"),
    [
        (["AMP3"], [], ["AMP301", "AMP313"], ["AMP501", "AMP001"]),
        (["AMP"], ["AMP3"], ["AMP501"], ["AMP301"]),
        (["AMP301"], ["AMP3"], ["AMP301"], ["AMP305", "AMP501"]),
        (["amp3"], ["AMP301", "amp5"], ["AMP305"], ["AMP301"]),
        (["AMP301"], ["AMP301"], [], ["AMP301"]),
    ],
)
def test_of_the_beginnings_of_a_code_the_longest_decides(select, ignore, has, has_not):
    selection = Selection(select, ignore)
    assert all(map(selection.has, has)) and not any(map(selection.has, has_not))


@pytest.mark.parametrize("prefix", ["", "X", "amp306", "AMP3012"])
def test_what_begins_no_code_is_refused_and_the_codes_there_are_are_said(prefix):
    for arguments in ([prefix], ()), ((), [prefix]):
        with pytest.raises(SettingsError, match="is not the code of a rule.*AMP301.*AMP501"):
            Selection(*arguments)
