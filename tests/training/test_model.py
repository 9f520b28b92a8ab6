"""A cast model has the documented dtypes, takes and returns the documented values, and has float32 state dicts.

Guards: training/model, training/model_hooks, training/rule_regions, casting/tensor_cast.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from devices import requires_cpu
from reference import make_batches, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import backward, take_step, train

import amp_patch as amp
from amp_patch.config import make_policy
from amp_patch.session import current

requires_gru = requires_cpu("the simulated device has no kernel for GRU")
F16, BF16 = torch.float16, torch.bfloat16
LOWS = {"O1": F16, "O2": F16, "O3": F16, "O4": BF16, "O5": BF16}


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 1)
        self.bn = nn.BatchNorm1d(4)
        self.plain_bn = nn.BatchNorm1d(4, affine=False)
        self.sync_bn = nn.SyncBatchNorm(4)
        self.norm = nn.LayerNorm(4)
        self.tied = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.tied.weight
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))

    def forward(self, x):
        return self.head(self.tied(x))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_parameters_and_buffers_are_cast_in_place_and_batchnorm_is_kept(level):
    model = Everything()
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    amp.initialize(model, opt_level=level, verbosity=0)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == before
    dtypes = {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}
    kept = {
        name
        for name in dtypes
        if name.startswith(("bn.", "plain_bn.", "sync_bn.")) and not name.endswith("num_batches_tracked")
    }
    assert {"plain_bn.running_mean", "plain_bn.running_var", "sync_bn.weight"} <= kept
    assert {dtypes[name] for name in kept} == {torch.float32}
    untouched = {"wide": torch.float64, "index": torch.int64, "phase": torch.complex64}
    untouched |= {name: torch.int64 for name in dtypes if name.endswith("num_batches_tracked")}
    assert {name: dtypes[name] for name in untouched} == untouched
    assert {dtypes[name] for name in set(dtypes) - kept - set(untouched)} == {LOWS[level]}
    assert model.head.weight is model.tied.weight


def test_o3_casts_batchnorm_too_and_keep_batchnorm_fp32_overrides():
    for options, expected in (
        ({}, F16),
        ({"cast_model_type": BF16}, BF16),
        ({"keep_batchnorm_fp32": True}, torch.float32),
        ({"keep_batchnorm_fp32": "True"}, torch.float32),
    ):
        model = Everything()
        amp.initialize(model, opt_level="O3", verbosity=0, **options)
        assert {model.bn.weight.dtype, model.plain_bn.running_mean.dtype, model.sync_bn.running_var.dtype} == {expected}
        amp.reset()


def test_existing_gradients_and_views_of_the_optimizer_survive_the_cast():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    expected = model.weight.grad.clone()
    amp.initialize(model, opt_level="O3", verbosity=0)
    assert model.weight.grad.dtype is F16 and torch.equal(model.weight.grad.float(), expected)
    amp.reset()
    assert model.weight.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("level", "timesteps", "is_told"),
    [
        ("O5", torch.tensor([999.0, 3.0]), True),
        ("O5", torch.tensor([999, 3]), False),
        ("O5", torch.tensor([256.0, 3.0]), False),
        ("O5", torch.tensor([999.5, 3.0]), False),
        ("O5", torch.tensor([-10001.0, 0.0]), False),
        ("O2", torch.tensor([999.0, 3.0]), False),
        ("O2", torch.tensor([2049.0, 3.0]), True),
        ("O0", torch.tensor([999.0, 3.0]), False),
    ],
)
def test_whole_numbers_that_an_input_loses_are_warned_of_once(level, timesteps, is_told, recwarn):
    model = Echo()
    amp.initialize(model, opt_level=level, verbosity=0)
    for _ in range(2):
        model(torch.rand(2, 4), at={"step": timesteps})
    assert [("(2,)" in str(one.message)) for one in recwarn] == [True] * is_told


# ---- buffers ---------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position, as rotary embeddings do. No weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 10000 ** -torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x):
        angles = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * self.frequencies
        return torch.cat([x[:, :8] * angles.cos() - x[:, 8:] * angles.sin(), x[:, :8] * angles.sin()], 1).to(x.dtype)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.rotary = Rotary()
        self.last = nn.Linear(16, 2)
        self.register_buffer("offset", torch.linspace(0, 1, 16))

    def forward(self, x):
        return self.last(self.rotary(self.first(x)) + self.offset)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_module_without_weights_computes_in_float32_between_its_neighbours(level):
    low, model, x = LOWS[level], Positions(), torch.randn(3000, 4)
    first, last = copy.deepcopy(model.first).to(low), copy.deepcopy(model.last).to(low)
    turned = Rotary()(first(x.to(low)).float()).to(low)
    expected = last(turned + model.offset.to(low)).float()
    amp.initialize(model, opt_level=level, compute="native", verbosity=0)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(("level", "run"), [("O5", "low"), ("O5", "float32"), ("O0", None)])
def test_a_rule_decides_how_a_module_without_weights_runs(level, run, tmp_path):
    model, options = Positions(), {}
    if run is not None:
        (tmp_path / "rules.yaml").write_text(f"modules: [{{match: rotary, run: {run}}}]")
        options["lists"] = tmp_path / "rules.yaml"
    amp.initialize(model, opt_level=level, verbosity=0, **options)
    assert model.rotary.frequencies.dtype is (BF16 if run == "low" else torch.float32)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_that_a_rule_runs_in_float32_takes_what_it_is_given(level, tmp_path):
    model, x = Positions(), torch.randn(3, 4)
    expected = model(x)
    (tmp_path / "rules.yaml").write_text('modules: [{match: "**", run: float32}]')
    amp.initialize(model, opt_level=level, lists=tmp_path / "rules.yaml", verbosity=0)
    assert torch.equal(model(x), expected)


class Declaring(nn.Module):
    """Says what is to stay in float32 as models of transformers do, and computes accordingly."""

    _keep_in_fp32_modules = ["inner.last"]
    _keep_in_fp32_modules_strict = {"gate.bias"}

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.inner = nn.Sequential()
        self.inner.last = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("level", "rule", "expected"),
    [
        ("O2", "", {"gate.bias", "inner.last.weight", "inner.last.bias"}),
        ("O5", "", {"gate.bias"}),
        ("O5", "modules: [{match: gate, run: low}]", set()),
    ],
)
@pytest.mark.parametrize("is_nested", [True, False])
def test_what_a_model_of_transformers_declares_stays_float32(level, rule, expected, is_nested, tmp_path):
    declaring, options = Declaring(), {}
    if rule:
        (tmp_path / "rules.yaml").write_text(rule.replace("gate", "'**.gate'"))
        options["lists"] = tmp_path / "rules.yaml"
    amp.initialize(nn.Sequential(declaring) if is_nested else declaring, opt_level=level, verbosity=0, **options)
    assert {name for name, tensor in declaring.named_parameters() if tensor.dtype is torch.float32} == expected


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_buffers_that_nobody_changed_come_back_as_they_were_and_are_saved_so(level):
    model = Positions()
    before = copy.deepcopy(model.state_dict())
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model.offset.dtype is LOWS[level]
    model.offset[3] = 0.5
    before["offset"][3] = 0.5
    assert torch.equal(model.state_dict()["offset"], before["offset"])
    amp.reset()
    assert torch.equal(model.offset, before["offset"])


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("is_changed", [True, False])
def test_a_running_value_in_16_bits_is_warned_of(level, is_changed, recwarn):
    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        backward(model(torch.ones(2, 4)).sum(), optimizer)
        model.offset += 0.5 * is_changed
        optimizer.step()
    assert [("offset" in str(one.message)) for one in recwarn] == [True] * is_changed


def test_a_buffer_is_resumed_as_it_was_saved():
    saved = Positions().state_dict()
    saved["offset"] /= 3
    model = Positions()
    amp.initialize(model, opt_level="O5", verbosity=0)
    model.load_state_dict(saved)
    assert torch.equal(model.state_dict()["offset"], saved["offset"])
    amp.reset()
    assert torch.equal(model.offset, saved["offset"])


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


class Echo(nn.Module):
    """Returns its arguments, and notes what it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return args


def test_containers_generators_and_keywords_are_cast_on_the_way_in_and_out():
    model, module, given = Echo(), nn.Linear(1, 1), torch.ones(1)
    amp.initialize(model, opt_level="O2", verbosity=0)
    result = model({"a": [given]}, (torch.ones(1) for _ in range(2)), module, mask=torch.ones(1), flag=True)
    (nested, generator, seen_module), keywords = model.seen
    assert nested["a"][0].dtype is F16 and [t.dtype for t in generator] == [F16, F16]
    assert keywords["mask"].dtype is F16 and keywords["flag"] is True
    assert result[0]["a"][0].dtype is torch.float32 and given.dtype is torch.float32
    assert seen_module is module is result[2] and module.weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("level", "options", "expected"),
    [
        ("O0", {}, torch.float32),
        ("O1", {"cast_model_outputs": "float16"}, F16),
        ("O5", {"cast_model_outputs": "float16"}, F16),
    ],
)
def test_inputs_of_another_dtype_are_taken_and_outputs_have_the_one_asked_for(level, options, expected):
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level=level, verbosity=0, **options)
    assert model(torch.ones(1, 2).half()).dtype is expected


@pytest.mark.parametrize(
    ("kind", "level"),
    [(nn.LSTM, "O1"), (nn.LSTM, "O5"), pytest.param(nn.GRU, "O1", marks=requires_gru), (nn.RNN, "O5")],
)
def test_recurrent_networks_train(kind, level):
    torch.manual_seed(0)
    model = kind(3, 4, num_layers=2, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, max_loss_scale=1024.0, verbosity=0)
    inputs, targets = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
    losses = []
    for _ in range(5):
        output, _ = model(inputs)
        assert output.dtype is (F16 if level == "O1" else torch.float32)
        loss = F.mse_loss(output, targets)
        take_step(loss, optimizer)
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 5


# ---- state dicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_state_dicts_are_float32_and_those_of_submodules_too(level):
    model = make_model()
    amp.initialize(model, opt_level=level, verbosity=0)
    for state in (model.state_dict(), model.conv1.state_dict(), nn.Sequential(model).state_dict()):
        assert {value.dtype for value in state.values()} <= {torch.float32, torch.int64}


@pytest.mark.parametrize("comes_first", ["layer", "parameters"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_layer_that_is_added_saves_and_loads_its_masters(level, comes_first):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    added = nn.Linear(4, 4).to(LOWS[level])
    if comes_first == "layer":
        model.append(added)
    optimizer.add_param_group({"params": list(added.parameters())})
    if comes_first == "parameters":
        model.append(added)
    backward(model(torch.ones(2, 4)).square().mean(), optimizer)
    optimizer.step()
    masters = [master.detach() for master in amp.master_params(optimizer)]
    saved = model.state_dict()
    torch.testing.assert_close(list(saved.values()), masters, rtol=0, atol=0)
    torch.testing.assert_close(list(added.state_dict().values()), masters[2:], rtol=0, atol=0)
    loaded = {name: value + 1e-4 for name, value in saved.items()}
    model.load_state_dict(loaded)
    torch.testing.assert_close(masters, list(loaded.values()), rtol=0, atol=0)
    amp.reset()
    assert not any(module._state_dict_hooks or module._state_dict_pre_hooks for module in model.modules())


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_state_dict_that_keeps_variables_has_float32_ones_that_can_be_trained(level):
    model = make_model(0)
    model.conv1.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trains = {name: tensor.requires_grad for name, tensor in model.state_dict(keep_vars=True).items()}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    kept = model.state_dict(keep_vars=True)
    assert {name: tensor.requires_grad for name, tensor in kept.items()} == trains
    assert {tensor.dtype for tensor in kept.values() if tensor.is_floating_point()} == {torch.float32}
    if level != "O3":
        masters = {id(master) for master in amp.master_params(optimizer)}
        assert {id(kept[name]) for name, _ in model.named_parameters()} == masters


def test_loading_refreshes_the_masters_without_rounding():
    model, other = make_model(0), make_model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, make_batches(2))
    model.load_state_dict(other.state_dict())
    for master, expected in zip(amp.master_params(optimizer), other.parameters(), strict=True):
        assert torch.equal(master, expected)
    assert torch.equal(model.fc.weight, other.fc.weight.half())
    model.conv1.load_state_dict(make_model(2).conv1.state_dict())
    assert torch.equal(next(amp.master_params(optimizer)), make_model(2).conv1.weight)


def test_loading_by_assignment_is_refused_where_weights_were_cast():
    model, saved = make_model(0), make_model(1).state_dict()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level="O5", verbosity=0)
    before = model.state_dict()
    with pytest.raises(amp.SessionError, match=r"conv1\.weight"):
        model.load_state_dict(saved, assign=True)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ---- submodules and methods called from outside ----------------------------------------------------------------------


class Trainer(nn.Module):
    """As frameworks have it: the wrapper is initialized, and its parts are called."""

    def __init__(self, part):
        super().__init__()
        self.part = nn.ModuleDict({"inner": part})

    def forward(self, *inputs):
        return self.part["inner"](*inputs)


class Product(nn.Module):
    """A layer of somebody's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def forward(self, inputs):
        return inputs @ self.weight


def make_encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 2, enable_nested_tensor=False)


MASK = nn.Transformer.generate_square_subsequent_mask(5)
PARTS = {
    "encoder with a mask": (make_encoder, lambda: [torch.ones(5, 2, 4), MASK]),
    "encoder layer": (lambda: make_encoder().layers[0], lambda: [torch.ones(5, 2, 4)]),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0), 1),
        lambda: [torch.ones(5, 2, 4), torch.ones(3, 2, 4), MASK],
    ),
    "attention": (lambda: nn.MultiheadAttention(4, 2), lambda: [torch.ones(5, 2, 4)] * 3),
    "own": (Product, lambda: [torch.ones(3, 4)]),
    "bilinear": (lambda: nn.Bilinear(4, 4, 2), lambda: [torch.ones(3, 4), torch.ones(3, 4)]),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        lambda: [torch.ones(2, 2, 5, 5)],
    ),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), lambda: [torch.randn(3, 4)]),
    "lstm": (
        lambda: nn.LSTM(4, 3),
        lambda: [torch.ones(5, 2, 4), (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))],
    ),
    "cell": (lambda: nn.GRUCell(4, 3), lambda: [torch.ones(2, 4), torch.zeros(2, 3)]),
}


def floating(value):
    return [value] if isinstance(value, torch.Tensor) else [tensor for item in value for tensor in floating(item)]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *((name, "O5") for name in PARTS if name != "cell"),
        pytest.param("cell", "O5", marks=requires_gru),
        ("norm", "O3"),
    ],
)
def test_parts_that_are_called_directly_take_float32_inputs(level, name):
    make, make_inputs = PARTS[name]
    torch.manual_seed(0)
    model, inputs = Trainer(make()), make_inputs()
    amp.initialize(model, opt_level=level, loss_scale=1.0, verbosity=0)
    whole = floating(model(*inputs))
    alone = floating(model.part["inner"](*inputs))
    assert all(one.dtype is torch.float32 for one in whole)
    assert all(torch.equal(one, other.float()) for one, other in zip(whole, alone, strict=True))
    sum(one.float().sum() for one in alone).backward()
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, floating(copied.part["inner"](*inputs)), alone))
    amp.reset()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "saved tensors"])
@pytest.mark.parametrize("make", [Product, nn.PReLU, lambda: nn.Linear(4, 4)], ids=["own", "prelu", "linear"])
def test_a_checkpoint_around_a_part_computes_again_what_its_forward_computed(make, use_reentrant):
    gradients = []
    for has_checkpoint in (False, True):
        torch.manual_seed(0)
        model, x = Trainer(make()), torch.randn(3, 4, requires_grad=True)
        amp.initialize(model, opt_level="O5", loss_scale=1.0, verbosity=0)
        part = model.part["inner"]
        output = checkpoint(part, x, use_reentrant=use_reentrant) if has_checkpoint else part(x)
        output.float().square().sum().backward()
        gradients.append(x.grad)
        amp.reset()
    assert torch.equal(*gradients)


class Widens(nn.Module):
    def forward(self, inputs):
        return inputs.float()


class OnFloat32(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, inputs):
        return inputs @ self.weight.float()


def test_a_layer_gets_the_float32_that_another_one_hands_on():
    model = nn.Sequential(nn.Linear(4, 4), Widens(), OnFloat32())
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert model(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_attention_can_be_scripted_in_a_session_and_after():
    amp.initialize(Trainer(nn.MultiheadAttention(4, 2)), opt_level="O5", verbosity=0)
    torch.jit.script(nn.MultiheadAttention(4, 2))
    amp.reset()
    torch.jit.script(nn.MultiheadAttention(4, 2))


class Residual(nn.Module):
    """Hands float32 to a layer of its own on purpose, where only `x * w` is computed."""

    def __init__(self):
        super().__init__()
        self.inner = Scale()

    def forward(self, inputs):
        return self.inner(inputs.float() / 3)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen = []

    def forward(self, inputs):
        self.seen.append(inputs.dtype)
        return inputs * self.weight


def test_float32_that_a_module_hands_on_to_a_layer_stays_float32():
    model = Trainer(Residual())
    amp.initialize(model, opt_level="O5", verbosity=0)
    part = model.part["inner"]
    model(torch.ones(2, 4))
    part(torch.ones(2, 4))
    checkpoint(part, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert part.inner.seen == [torch.float32] * 4


def test_a_part_that_was_made_float32_again_is_not_given_16_bits():
    model = Trainer(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    amp.initialize(model, opt_level="O5", verbosity=0)
    model.part["inner"].float()
    assert model.part["inner"](torch.ones(2, 4)).dtype is torch.float32


def test_transformer_layers_keep_their_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = Trainer(nn.TransformerEncoder(layer, 1))
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert not any(part._forward_pre_hooks for part in model.part["inner"].layers.modules())


def test_a_model_in_16_bits_that_was_cast_to_float32_is_cast_back():
    model = nn.Linear(2, 2).bfloat16()
    options = {"num_losses": 1, "replace": False, "accept_low": True}
    current.initialize(make_policy("O0", {}), [model], [], **options)
    assert model.weight.dtype is torch.float32
    amp.reset()
    assert model.weight.dtype is BF16
