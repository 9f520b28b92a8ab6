"""A script that asks for 16 bits runs in float32 as a reference, as if it had been written so, and torch is as before.

Guards: native/float32_script, native/asked_dtypes, insight/comparing/campaign, insight/runs.
"""

import copy
import io
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_state import find_changes

import amp_patch as amp
from amp_patch import insight
from amp_patch.native.float32_script import Float32Script, as_written, find_asked_dtype

LOW = torch.bfloat16


@pytest.fixture
def script():
    script = Float32Script()
    end = script.start()
    yield script
    end()
    end()
    assert torch.get_default_dtype() is torch.float32 and not find_changes()
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.zeros(1).half().dtype is torch.float16


def use_default(dtype):
    torch.set_default_dtype(dtype)
    try:
        return nn.Linear(2, 2).weight
    finally:
        torch.set_default_dtype(torch.float32)


def save_and_load(tensor, **options):
    file = io.BytesIO()
    with as_written():
        torch.save({"a": tensor.to(LOW)}, file)
    file.seek(0)
    return torch.load(file, **options)["a"]


ASKED = {
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to": lambda x: x.to(LOW),
    "to with a device": lambda x: x.to("cpu", LOW),
    "to by keyword": lambda x: x.to(dtype=LOW),
    "type by name": lambda x: x.type("torch.HalfTensor"),
    "type by class": lambda x: x.type(torch.BFloat16Tensor),
    "module": lambda x: nn.Linear(2, 2).to(LOW).weight,
    "module made so": lambda x: nn.Linear(2, 2, dtype=LOW).weight,
    "buffer": lambda x: nn.BatchNorm1d(2).half().running_var,
    "factory": lambda x: torch.zeros(2, dtype=LOW),
    "from a list": lambda x: torch.tensor([1.0], dtype=LOW),
    "like": lambda x: torch.ones_like(x, dtype=LOW),
    "new": lambda x: x.new_zeros(2, dtype=LOW),
    "reduction": lambda x: x.sum(dtype=LOW),
    "softmax": lambda x: F.softmax(x, 0, dtype=LOW),
    "default": lambda x: use_default(LOW),
    "loaded": save_and_load,
    "loaded as a pickle": lambda x: save_and_load(x, weights_only=False),
    "copied": lambda x: copy.deepcopy(nn.Linear(2, 2).half()).weight,
    "bytes": lambda x: torch.tensor([0, 0x3F, 0x80, 0x3F], dtype=torch.uint8)[:2].clone().view(LOW),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_request_for_16_bits_gives_float32(ask, script):
    given = ask(torch.ones(2))
    assert given.dtype is torch.float32 and find_asked_dtype(given) in (torch.float16, LOW)
    assert script.has_acted and not script.not_widened


@pytest.mark.parametrize(
    "make", [lambda: torch.from_numpy(numpy.ones(2, "float16")), lambda: torch.HalfTensor([1, 1])], ids=["numpy", "old"]
)
def test_what_no_patch_sees_is_widened_when_it_is_used(make, script):
    given = make()
    assert (given * 2).dtype is torch.float32
    assert given.add_(1) is given and given.dtype is torch.float32


def test_other_dtypes_and_other_casts_stay():
    with_script, plain = [], []
    for results in (with_script, plain):
        script = Float32Script()
        end = script.start() if results is with_script else str
        x = torch.ones(3)
        results += [x.double(), x.to(torch.int64), x.to("cpu"), x.type(torch.float64), torch.arange(3)]
        results += [x.view(torch.int32), torch.zeros(2, dtype=torch.complex64), x.to(torch.zeros(1).double())]
        assert x.to(torch.float32) is x and x.float() is x
        end()
        assert not script.has_acted
    assert [x.dtype for x in with_script] == [x.dtype for x in plain]
    assert all(map(torch.equal, with_script, plain))


def test_a_cast_copies_where_the_script_would_get_a_copy(script):
    weight = torch.ones(2)
    low = weight.half()
    low.add_(1)
    master = low.float()
    master.add_(1)
    assert [x.tolist() for x in (weight, low, master)] == [[1, 1], [2, 2], [3, 3]]
    assert low.half() is low and master.float() is master
    for old in (torch.FloatTensor, "torch.FloatTensor"):
        assert low.type(old) is not low and master.type(old) is master


def test_random_numbers_are_those_of_the_script():
    def draw():
        torch.manual_seed(0)
        linear, noise = nn.Linear(40, 50, dtype=LOW), torch.randn(300, dtype=LOW)
        return [linear.weight, noise, torch.randn_like(noise), torch.empty(99, dtype=LOW).uniform_(), torch.rand(9)]

    plain = draw()
    end = Float32Script().start()
    widened = draw()
    end()
    assert all(torch.equal(a.float(), b) and b.dtype is torch.float32 for a, b in zip(plain, widened, strict=True))


def test_weights_that_were_low_before_are_widened_once_and_narrow_again():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(LOW)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    weights = list(model.parameters())
    model[0].bias.grad = torch.ones_like(model[0].bias)
    end = Float32Script().start()
    for _ in range(2):
        model(torch.ones(3, 2)).square().sum().backward()
        optimizer.step()
    assert all(a is b and a.dtype is torch.float32 for a, b in zip(model.parameters(), weights, strict=True))
    assert model[1].running_mean.dtype is torch.float32
    end()
    gradients = [weight.grad for weight in weights]
    assert {tensor.dtype for tensor in (*weights, *gradients, model[1].running_mean)} == {LOW}


def test_a_model_in_another_thread_is_in_float32_too(script):
    results = []

    def work():
        results.append(nn.Linear(2, 2).half()(torch.ones(1, 2, dtype=torch.half)).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [torch.float32]


def take_steps(optimizer, steps, each=lambda: None):
    from amp_patch import events

    for _ in range(steps):
        each()
        events.tell(as_written(), "step_ended", optimizer)


def test_the_mode_is_left_after_steps_in_which_it_had_nothing_to_do(script):
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    take_steps(optimizer, 3, lambda: model(torch.ones(1, 2).half()))
    assert script.is_timed and not torch.overrides._get_current_function_mode_stack()
    assert torch.ones(2).half().dtype is torch.float32  # casts are seen for as long as the run lasts


def test_a_mode_that_is_needed_stays_and_the_time_is_not_that_of_the_script(script):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    take_steps(optimizer, 9, lambda: torch.zeros(2, dtype=torch.half))
    assert not script.is_timed and torch.zeros(2, dtype=torch.half).dtype is torch.float32


# ---- in commands -----------------------------------------------------------------------------------------------------


def make_train(dtype, check=lambda net: None):
    def train():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).to(dtype)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        check(net)
        for _ in range(4):
            x = torch.randn(32, 8)
            with torch.autocast("cpu", LOW, enabled=dtype is torch.float32):
                loss = F.mse_loss(net(x.to(dtype)).float(), x[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def test_the_reference_of_a_16_bit_script_is_the_script_in_float32():
    found = insight.compare(make_train(LOW), steps=4)
    in_float32 = insight.compare(make_train(torch.float32), ["O0"], steps=4)
    assert [(run.run, run.low, run.failed) for run in found.runs] == [("O0", "", ""), ("script", "bf16", "")]
    assert found.curves("O0")[0].losses == in_float32.curves("O0")[0].losses
    assert found.runs[1].has_equal_weights and 1e-4 < found.runs[1].gradient_error < 0.2
    assert "script: " in found.table() and "against" not in found.table()


def test_a_reference_that_must_keep_16_bits_is_called_script_with_the_reason():
    def check(net):
        assert net[0].weight.dtype is LOW, "this kernel takes bfloat16"

    found = insight.compare(make_train(LOW, check), ["O0", "as-is"], steps=2)
    assert [run.run for run in found.runs] == ["script", "as-is"] and not found.failed
    assert found.about.reference == "script" and found.rows()[0].run.low == "bf16"
    assert (
        "script: there is no O0, since the script cannot run in float32: AssertionError: this kernel" in found.table()
    )


def test_a_region_beside_initialize_is_in_float32_too():
    results = []

    def train():
        model = nn.Linear(2, 2)
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O4", verbosity=0)
        with torch.autocast("cpu", LOW):
            results.append(F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype)
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()

    assert not insight.compare(train, ["O0"], steps=1).failed
    assert set(results) == {torch.float32}


def test_tune_compares_with_float32_where_the_script_casts_by_itself():
    def train():
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            positions = torch.arange(1000.0, 1016.0).to(LOW)[:, None].float()
            with torch.autocast("cpu", LOW):
                loss = F.mse_loss(net(torch.sin(positions * torch.arange(1.0, 5.0))).float(), torch.randn(16, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    result = insight.tune(train, log=lambda line: None)
    assert not result.is_reached and result.trials[-1].verdict.worst > 0.1
