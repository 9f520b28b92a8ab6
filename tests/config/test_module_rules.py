"""A module rule covers the modules that it names, and these run in its dtype at every level, forward and backward.

Guards: config/module_rules, training/rule_regions, training/model_hooks, training/model.
"""

import copy
import io
import pickle
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp
from amp_patch.config.op_lists import load_oplists
from amp_patch.session.current import state
from amp_patch.training.rule_regions import decide_rules, find_borders

LOW = torch.bfloat16
LOWS = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "O4": LOW, "O5": LOW}
PATCHING = ("O1", "O4")


class Block(nn.Module):
    """Matrix product, norm, softmax: one op of each list and one that is a module of its own.

    Notes the dtype after each.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        nn.init.constant_(self.norm.weight, 0.5)  # else softmax saturates, and float16 has no gradient left
        self.dtypes = ()

    def forward(self, x):
        product = self.linear(x)
        normed = self.norm(product)
        result = torch.softmax(normed @ normed.transpose(0, 1) @ normed, -1)
        if not torch.compiler.is_compiling():
            self.dtypes = (product.dtype, normed.dtype, result.dtype)
        return result


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.blocks(x))


@pytest.fixture
def write(tmp_path):
    def write(rules, extends="bfloat16"):
        path = tmp_path / f"list{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(f"extends: {extends}\nmodules:\n" + "".join(f"  - {rule}\n" for rule in rules))
        return str(path)

    return write


def make(level, lists, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, lists=lists, verbosity=0, **options)
    return model, optimizer


def batch():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


# ---- which modules ---------------------------------------------------------------------------------------------------

CHOICES = [
    ('match: "head"', {"head"}),
    ('match: "blocks.*"', {"blocks.0", "blocks.1", "blocks.2"}),
    ('match: "*"', {"blocks", "head"}),
    ('match: "*.1.norm"', {"blocks.1.norm"}),
    ('match: "**.norm"', {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"}),
    ('match: "blocks.**.norm"', {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"}),
    ('match: "blocks.?.lin*"', {"blocks.0.linear", "blocks.1.linear", "blocks.2.linear"}),
    ('match: "re:^blocks\\\\.[02]$"', {"blocks.0", "blocks.2"}),
    ('match: "re:norm"', {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"}),
    ("type: torch.nn.LayerNorm", {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"}),
    ("type: torch.nn.modules.linear.Linear", {"blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "head"}),
    ("type: package_that_nobody_imported.Layer", set()),
    ('match: "norm"', set()),
    ('match: "block"', set()),
]


def test_a_rule_chooses_by_name_or_type(write):
    for chooser, expected in CHOICES:
        (rule,) = load_oplists(write([f"{{{chooser}, run: low}}"])).modules
        assert {name for name, module in Net().named_modules() if rule.chooses(name, module)} == expected


def test_a_rule_covers_what_is_inside_and_the_last_rule_counts(write):
    model = Net()
    rules = [
        '{match: "blocks.*", run: float32}',
        "{type: torch.nn.LayerNorm, run: low}",
        '{match: "blocks.0", run: low}',
    ]
    rules = load_oplists(write(rules)).modules
    decided, used = decide_rules(model, rules)
    runs = {module: rule.run for module, rule in decided.items()}
    names = {name: runs.get(module) for name, module in model.named_modules()}
    assert names == {
        "": None,
        "head": None,
        "blocks": None,
        **dict.fromkeys(["blocks.0", "blocks.0.linear", "blocks.0.norm"], "low"),
        **dict.fromkeys(["blocks.1", "blocks.1.linear", "blocks.2", "blocks.2.linear"], "float32"),
        **dict.fromkeys(["blocks.1.norm", "blocks.2.norm"], "low"),
    }
    assert used == set(rules)
    first, second, third = model.blocks
    assert find_borders(model, runs) == {
        **{first: "low", second: "float32", third: "float32"},
        **{second.norm: "low", third.norm: "low"},
    }


def test_a_module_with_two_names_in_its_parent_is_chosen_by_either(write):
    model = Net()
    model.tail = model.head
    for name in ("head", "tail"):
        rules = load_oplists(write([f"{{match: {name}, run: float32}}"])).modules
        assert decide_rules(model, rules) == ({model.head: rules[0]}, set(rules))


def test_a_file_that_comes_later_wins_and_another_digest_results(write):
    first = write(['{match: "head", run: float32}'])
    second = write(['{match: "**", run: low}'], extends="float16")
    rules = load_oplists([first, second]).modules
    assert [rule.run for rule in rules] == ["float32", "low"]
    assert len({load_oplists(lists).digest for lists in ([first, second], [second, first], [first])}) == 3


# ---- how they run where functions are patched ------------------------------------------------------------------------

MIXED = ('{match: "blocks.0", run: float32}', '{match: "blocks.1", run: low}', '{match: "head", run: float32}')


def run_by_hand(model, x, low):
    """MIXED, written out."""

    def linear(layer, x, dtype):
        return F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))

    def norm(layer, x, dtype):
        return F.layer_norm(x.to(dtype), (4,), layer.weight.to(dtype), layer.bias.to(dtype))

    def block(layer, x, products, others):
        x = norm(layer.norm, linear(layer.linear, x, products), others)
        return torch.softmax((x.to(products) @ x.transpose(0, 1).to(products) @ x.to(products)).to(others), -1)

    first, second, third = model.blocks
    x = block(first, x, torch.float32, torch.float32)
    x = block(second, x, low, low)
    x = block(third, x, low, torch.float32)
    return linear(model.head, x, torch.float32)


@pytest.mark.parametrize("level", PATCHING)
def test_ops_inside_follow_the_rule_bitwise(level, write):
    torch.manual_seed(0)
    reference, low = Net(), LOWS[level]
    model, optimizer = make(level, write(MIXED), loss_scale=1.0, compute="native")
    for _ in range(3):
        with amp.disable_casts():
            expected = run_by_hand(reference, batch(), low)
        expected.square().sum().backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
        output = model(batch())
        assert torch.equal(output, expected) and output.dtype is torch.float32
        with amp.scale_loss(output.square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [block.dtypes for block in model.blocks] == [
        (torch.float32,) * 3,
        (low,) * 3,
        (low, torch.float32, torch.float32),
    ]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_rules_hold_at_a_patching_level_with_a_float32_model_type(write):
    model, _ = make("O4", write(['{match: "blocks.0", run: float32}']), cast_model_type=torch.float32)
    model(batch())
    assert set(model.blocks[0].dtypes) == {torch.float32} and model.blocks[1].dtypes[0] is LOW


@pytest.mark.parametrize("match", ["layers", "layers.**", "**"])
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_rule_for_a_container_acts_in_what_it_holds(level, match, write):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            heads = nn.ModuleDict({"left": nn.Linear(4, 4), "right": nn.Linear(4, 4)})
            self.layers = nn.ModuleList([nn.Linear(4, 4), heads])

        def forward(self, x):
            first, heads = self.layers
            return heads["left"](first(x)) + heads["right"](x)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = f'{{match: "{match}", run: float32}}'
    amp.initialize(model, optimizer, opt_level=level, lists=write([rule]), verbosity=0)
    dtypes = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    model(torch.ones(2, 4))
    assert dtypes == [torch.float32] * 3


def regions():
    return state.session.switch.regions


def test_disable_casts_wins_over_the_rules(write):
    model, _ = make("O4", write(MIXED))
    with amp.disable_casts():
        model(batch())
    assert {block.dtypes for block in model.blocks} == {(torch.float32,) * 3}
    assert regions() == 0


def test_a_module_that_calls_itself_and_others_nest(write):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.seen = []

        def forward(self, x, depth=2):
            self.seen.append(torch.mm(x, x.t()).dtype)
            result = self(x, depth - 1) if depth else self.inner(x)
            self.seen.append(torch.mm(x, x.t()).dtype)
            return result

    model = Recursive()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(
        model,
        optimizer,
        opt_level="O4",
        verbosity=0,
        lists=write(['{match: "**", run: float32}', '{match: "inner", run: low}']),
    )
    assert model(batch()).dtype is LOW
    assert set(model.seen) == {torch.float32}
    assert regions() == 0


# ---- how they run where the model is cast ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_weights_have_the_dtype_of_the_rule_and_inputs_are_cast_at_the_border(level, write):
    low = LOWS[level]
    model, optimizer = make(level, write(MIXED), loss_scale=128.0)
    first, second, third = model.blocks
    dtypes = [{parameter.dtype for parameter in part.parameters()} for part in (first, second, third, model.head)]
    assert dtypes == [{torch.float32}, {low}, {low}, {torch.float32}]
    output = model(batch())
    assert [block.dtypes for block in model.blocks] == [(torch.float32,) * 3, (low,) * 3, (low,) * 3]
    assert output.dtype is torch.float32 and not torch.equal(
        output, output.to(low).float()
    )  # the head's result was never rounded
    with amp.scale_loss(output.square().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert all(
        not torch.equal(model.state_dict()[name], before[name])
        for name in ("blocks.0.linear.weight", "blocks.1.norm.bias", "head.weight")
    )
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    amp.reset()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("run", ["low", "float32"])
def test_a_rule_wins_over_keep_batchnorm_fp32(run, write):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1))
    amp.initialize(model, opt_level="O2", lists=write([f"{{type: torch.nn.BatchNorm2d, run: {run}}}"]), verbosity=0)
    expected = torch.float16 if run == "low" else torch.float32
    assert {tensor.dtype for tensor in (*model[1].parameters(), *model[1].buffers()) if tensor.is_floating_point()} == {
        expected
    }
    assert model(torch.randn(2, 1, 5, 5)).dtype is torch.float32


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_weights_tied_to_a_float32_module_stay_float32(level, write):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.body(self.embedding(tokens)))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, lists=write(['{match: "head", run: float32}']), verbosity=0)
    assert (
        model.embedding.weight is model.head.weight
        and model.head.weight.dtype is torch.float32
        and model.body.weight.dtype is LOWS[level]
    )
    with amp.scale_loss(model(torch.tensor([1, 2])).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O4", "O2"])
def test_copies_follow_the_rules_and_saved_models_load(level, write):
    model, _ = make(level, write(MIXED))
    expected = model(batch())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch()), expected)
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.zero_()
    assert not twin(batch()).any() and torch.equal(model(batch()), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded(batch()).shape == expected.shape
    assert pickle.loads(pickle.dumps(model)).head.weight.dtype is model.head.weight.dtype


def test_a_rule_that_chooses_nothing_is_said_once(write):
    lists = write(['{match: "tail", run: float32}', '{match: "head", run: float32}'])
    with pytest.warns(UserWarning, match=r"list0\.yaml:3:5: the rule for 'tail' matches no module") as caught:
        make("O4", lists)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("chooser", "meant"),
    [('match: "Net.head"', "head"), ('match: "model.head"', "head"), ('match: "haed"', "head")]
    + [("type: torch.nn.LSTMCell", "torch.nn.modules.rnn.LSTM")],
)
def test_a_rule_that_chooses_nothing_is_told_with_the_name_that_is_meant(chooser, meant, write):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.tail = nn.Linear(2, 2), nn.LSTM(2, 2)

    with pytest.warns(UserWarning, match=f"Did you mean '{meant}'"):
        amp.initialize(Net(), opt_level="O2", lists=write([f"{{{chooser}, run: float32}}"]), verbosity=0)


def test_a_rule_may_be_for_one_of_several_models(write):
    lists = write(['{match: "weight_holder", run: float32}', '{match: "head", run: float32}'])
    other = nn.Module()
    other.weight_holder = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize([Net(), other], opt_level="O2", lists=lists, verbosity=0)
    assert other.weight_holder.weight.dtype is torch.float32


def test_rules_of_a_level_that_patches_nothing_leave_other_recurrent_layers_alone(write):
    amp.initialize(Net(), opt_level="O2", lists=write(MIXED), compute="float32", verbosity=0)
    assert nn.LSTM(4, 4)(torch.ones(2, 1, 4))[0].dtype is torch.float32


def test_levels_that_patch_nothing_take_lists_for_their_module_rules_alone(write):
    with pytest.raises(amp.PolicyError, match="these lists have none"):
        amp.initialize(Net(), opt_level="O2", lists="bfloat16", verbosity=0)
    with pytest.raises(amp.PolicyError, match="O0 runs everything in float32"):
        amp.initialize(Net(), opt_level="O0", lists=write(MIXED), verbosity=0)


def test_models_that_are_adopted_follow_the_rules_too(write):
    lists = write(MIXED)
    first, _ = make("O4", lists)
    second, _ = make("O4", lists)
    for model in (first, second):
        model(batch())
        assert model.blocks[0].dtypes == (torch.float32,) * 3


SWAPS = {
    "replaced": lambda model: setattr(model, "head", nn.Linear(4, 4)),
    "in the table": lambda model: model._modules.update(head=nn.Linear(4, 4)),
    "wrapped": lambda model: setattr(model, "head", nn.Sequential(model.head, nn.Linear(4, 4))),
    "moved": lambda model: model.blocks.insert(0, nn.Identity()),
    "copied": lambda model: setattr(model, "head", copy.deepcopy(model.blocks[1])),
}


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
@pytest.mark.parametrize("level", PATCHING)
def test_rules_hold_for_the_modules_that_a_model_has_when_it_is_called(level, swap, write):
    lists = write(['{match: "head", run: float32}', '{match: "blocks.2", run: float32}'])
    model, _ = make(level, lists)
    model(batch())
    swap(model)
    assert model(batch()).dtype is torch.float32
    assert [type(block).__name__ for block in model.blocks if getattr(block, "dtypes", ())]
    for index, block in enumerate(model.blocks):
        if isinstance(block, Block):
            assert (block.dtypes[0] is torch.float32) is (index == 2)
    amp.reset()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_part_that_was_replaced_and_is_called_by_itself_follows_its_rule(write):
    model, _ = make("O4", write(['{match: "head", run: float32}']))
    model.head = nn.Linear(4, 4)
    assert model.head(input=batch()).dtype is torch.float32


class Criterion(nn.Module):
    """Is given to no `initialize`."""

    def __init__(self, parts=None):
        super().__init__()
        self.parts = parts

    def forward(self, a):
        return a @ a.T  # O4 runs it in bfloat16


def test_a_rule_by_type_acts_in_a_criterion_that_the_script_calls(write):
    rules = [f"{{type: {__name__}.Criterion, run: float32}}", "{type: torch.nn.Bilinear, run: float32}"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = make("O4", write(rules))
        dtypes = [Criterion()(model(batch())).dtype for _ in range(3)]
        loss = Criterion()(model(batch())).sum()
    assert dtypes == [torch.float32] * 3
    loss.backward()
    with pytest.warns(UserWarning, match="'torch.nn.Bilinear' matches no module"):
        optimizer.step()


def test_a_rule_by_name_acts_in_a_model_that_was_called_before_it_was_passed(write):
    lists = write([f"{{type: {__name__}.Criterion, run: float32}}", "{match: head, run: float32}"])
    first_model, _ = make("O4", lists)
    model = Net()
    assert (first_model(batch()).dtype, model(batch()).dtype) == (torch.float32, LOW)
    amp.initialize(model, opt_level="O4", lists=lists, verbosity=0)
    assert model(batch()).dtype is torch.float32


@pytest.mark.parametrize(("match", "is_warned_of"), [("0", True), ("1", False), ("**", False)])
def test_a_rule_for_a_scripted_module_is_warned_of(match, is_warned_of, write):
    """Within a region of what holds it, a scripted module runs as that does."""
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.initialize(model, opt_level="O4", lists=write([f'{{match: "{match}", run: float32}}']), verbosity=0)
        assert model(batch()).dtype is (torch.bfloat16 if match == "0" else torch.float32)
    assert any("scripted" in str(warning.message) for warning in caught) is is_warned_of


def test_threads_may_call_a_new_module_at_once(write):
    make("O4", write([f"{{type: {__name__}.Criterion, run: float32}}"]))
    threads = 4
    begin = threading.Barrier(threads)
    parts = nn.ModuleList(nn.Identity() for _ in range(2000))  # so many that deciding their rules takes a while

    def call(criterion):
        begin.wait()
        return criterion(batch()).dtype

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(20):
                dtypes = list(pool.map(call, [Criterion(parts)] * threads))
                assert dtypes == [torch.float32] * threads
    finally:
        sys.setswitchinterval(interval)


def test_a_class_of_the_script_is_named_with_its_module(tmp_path, monkeypatch):
    monkeypatch.setattr("__main__.OwnBlock", Block, raising=False)
    path = tmp_path / "own.yaml"
    path.write_text("modules: [{type: OwnBlock, run: float32}]")
    with pytest.raises(amp.OpListError, match=r"__main__\.OwnBlock"):
        load_oplists(path)
    path.write_text("modules: [{type: __main__.OwnBlock, run: float32}]")
    load_oplists(path)
