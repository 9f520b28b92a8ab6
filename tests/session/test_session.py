"""Sessions follow each other, adopt objects, refuse conflicts and leave nothing; casts can be turned off and on, and
names imported elsewhere are patched and restored.

Guards: session/session, session/current, session/bindings, session/installer, session/torch_patches, functions.
"""

import copy
import gc
import io
import os
import pickle
import re
import sys
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from torch_state import find_changes
from training import backward, take_step

import amp_patch as amp
from amp_patch import insight

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def initialize(level, seed=0, **options):
    model = make_model(seed)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.05), opt_level=level, verbosity=0, **options)


def step(model, optimizer, images, targets):
    loss = F.cross_entropy(model(images), targets)
    take_step(loss, optimizer)
    return loss.item()


def test_models_can_be_switched_with_replace_alone():
    batch = make_batches(1)[0]
    model, optimizer = initialize("O2")
    for level in LEVELS:
        amp.initialize(model, optimizer, opt_level=level, replace=True, verbosity=0)
        step(model, optimizer, *batch)
    assert amp.stats().opt_level == "O5"
    with pytest.raises(amp.SessionError, match=r"O5 is in force for Digits.*O2.*amp\.reset\(\).*replace=True"):
        initialize("O2", seed=1)
    other, _ = initialize("O1", seed=1, replace=True)
    assert model.fc.weight.dtype is torch.float32 and not hasattr(optimizer, "_amp_stash")
    assert amp.stats().opt_level == "O1" and other.fc.weight.dtype is torch.float32


def test_a_mistake_in_the_lists_does_not_close_the_session_it_was_to_replace():
    _model, _optimizer = initialize("O2")
    with pytest.raises(amp.OpListError):
        initialize("O1", seed=1, lists="no such list", replace=True)
    assert amp.stats().opt_level == "O2"


def test_a_model_that_is_refused_does_not_close_the_session_it_was_to_replace():
    model, _optimizer = initialize("O2")
    with pytest.raises(amp.ModelError, match="in 16 bits already"):
        amp.initialize(torch.nn.Linear(2, 2).half(), opt_level="O1", replace=True, verbosity=0)
    assert amp.stats().opt_level == "O2"
    part = amp.initialize(model.fc, opt_level="O5", replace=True, verbosity=0)  # in 16 bits for the old session alone
    assert part is model.fc and amp.stats().opt_level == "O5"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_same_call_again_changes_nothing(level, capsys):
    model, optimizer = initialize(level, loss_scale=8.0)
    batches = make_batches(2)
    step(model, optimizer, *batches[0])
    # a window is open, which a cell run again does not end
    backward(F.cross_entropy(model(batches[1][0]), batches[1][1]), optimizer, delay_unscale=True)
    held = [(id(p), p.data_ptr(), None if p.grad is None else p.grad.clone()) for p in amp.master_params(optimizer)]
    hooks = [len(hooks) for name, hooks in vars(model).items() if name.endswith("_hooks")]
    methods = optimizer.step, optimizer.zero_grad
    returned = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0)
    assert returned[0] is model and returned[1] is optimizer
    assert [len(hooks) for name, hooks in vars(model).items() if name.endswith("_hooks")] == hooks
    assert methods == (optimizer.step, optimizer.zero_grad)
    now = [(id(p), p.data_ptr(), p.grad) for p in amp.master_params(optimizer)]
    assert [one[:2] for one in now] == [one[:2] for one in held]
    assert all(torch.equal(a[2], b[2]) if b[2] is not None else a[2] is None for a, b in zip(now, held, strict=True))
    assert capsys.readouterr().out == f"amp_patch: opt_level {level} as before, for Digits\n"
    assert amp.stats().steps == 1


def test_a_known_model_may_come_with_a_new_optimizer_and_a_known_optimizer_with_no_other_model():
    model, optimizer = initialize("O2")
    other = torch.optim.Adam(model.parameters())
    assert amp.initialize(model, [optimizer, other], opt_level="O2", verbosity=0)[1] == [optimizer, other]
    assert [id(p) for p in amp.master_params(other)] == [id(p) for p in amp.master_params(optimizer)]
    with pytest.raises(amp.OptimizerError, match="initialized before"):
        amp.initialize(make_model(1), optimizer, opt_level="O2", verbosity=0)


def test_the_loss_scale_starts_anew_with_another_optimizer_but_stays_as_loaded(capsys):
    model, optimizer = initialize("O1")
    for _ in range(3):
        backward(model(make_batches(1)[0][0]).sum() * float("inf"), optimizer)
        optimizer.step()
    assert amp.stats().loss_scales == (2.0**13,)
    teacher = amp.initialize(make_model(1), opt_level="O1", verbosity=0)  # trains nothing
    assert amp.stats().loss_scales == (2.0**13,) and teacher is not model
    saved = amp.state_dict()
    other = make_model(2)
    amp.initialize(other, torch.optim.SGD(other.parameters(), lr=0.05), opt_level="O1")
    assert amp.stats().loss_scales == (2.0**16,) and "starts anew at 65536" in capsys.readouterr().out
    amp.load_state_dict(saved)
    another = make_model(3)
    amp.initialize(another, torch.optim.SGD(another.parameters(), lr=0.05), opt_level="O1", verbosity=0)
    assert amp.stats().loss_scales == (2.0**13,)


@pytest.mark.parametrize("which", ["the same model", "another model"])
def test_a_list_that_has_changed_is_an_error_while_models_live(which, tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("extends: float16\n")
    model, optimizer = initialize("O1", lists=path)
    path.write_text("extends: float16  # with a comment\n")
    amp.initialize(model, optimizer, opt_level="O1", lists=path, verbosity=0)
    path.write_text("extends: float16\nmodules: [{match: '*', run: float32}]\n")
    given = (model, optimizer) if which == "the same model" else (make_model(1), None)
    with pytest.raises(amp.SessionError, match="lists whose files have changed"):
        amp.initialize(*given, opt_level="O1", lists=path, verbosity=0)
    amp.initialize(*given, opt_level="O1", lists=path, verbosity=0, replace=True)
    assert amp.is_patched(torch, "matmul")


def test_other_arguments_for_the_same_model_are_named():
    model, optimizer = initialize("O1")
    for options, told in (
        ({"opt_level": "O4"}, ", at O1, and O4 was asked for: call amp.reset() first"),
        ({"loss_scale": 128}, "loss_scale 128 instead of dynamic was asked for"),
        ({"lists": "apex"}, "lists apex instead of float16 was asked for"),
        ({"cast_model_outputs": "float32"}, "cast_model_outputs float32 instead of - was asked for"),
        ({"max_loss_scale": 8.0}, "the same level with other bounds of the loss scale"),
    ):
        with pytest.raises(amp.SessionError, match="^this Digits is initialized already.*" + re.escape(told)):
            amp.initialize(model, optimizer, verbosity=0, **{"opt_level": "O1", **options})
    step(model, optimizer, *make_batches(1)[0])


def test_ten_rounds_leave_memory_flat_and_nothing_wrapped_twice():
    counts = []
    for round_number in range(10):
        model = optimizer = None
        model, optimizer = initialize(LEVELS[1 + round_number % 5])
        step(model, optimizer, *make_batches(1)[0])
        gc.collect()
        counts.append(
            sum(isinstance(o, torch.Tensor) for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter))
        )
        if amp.is_patched(torch, "matmul"):
            assert not hasattr(amp.get_original(torch, "matmul"), "__wrapped__")
    assert counts[5:] == counts[:5]


def test_models_that_come_and_go_beside_one_that_stays_leave_nothing():
    kept, kept_optimizer = initialize("O5")
    counts = []
    for _ in range(4):
        model, optimizer = initialize("O5")
        step(model, optimizer, *make_batches(1)[0])
        del model, optimizer
        gc.collect()
        counts.append(sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects()))
    assert counts[1:] == counts[:1] * 3
    step(kept, kept_optimizer, *make_batches(1)[0])


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_copies_and_pickles_run_their_own_weights(level):
    model, _ = initialize(level)
    images, _ = make_batches(1)[0]
    model.eval()
    twin = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    expected = model(images)
    for other in (twin, loaded, pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(images), expected)
        with torch.no_grad():
            other.fc.weight.zero_()
            other.fc.bias.fill_(1.0)
        assert torch.equal(other(images), torch.ones_like(expected))
    assert torch.equal(model(images), expected)


def test_a_name_imported_elsewhere_is_patched_and_restored(monkeypatch):
    module = types.ModuleType("a_user_module")
    exec("from torch.nn.functional import linear\nfrom torch import matmul as product\nother = 3\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "a_user_module", module)
    original = module.linear
    _model, _optimizer = initialize("O4")
    assert module.linear(torch.ones(2, 3), torch.ones(4, 3)).dtype is torch.bfloat16
    assert module.product(torch.ones(2, 3), torch.ones(3, 3)).dtype is torch.bfloat16
    assert amp.get_original(module, "linear") is original
    assert amp.is_patched(F, "linear") and amp.get_original(F, "linear") is original is not F.linear
    assert not amp.is_patched(torch, "no_such_name")
    amp.reset()
    assert module.linear is original and module.product is torch.matmul
    assert not amp.is_patched(F, "linear") and amp.get_original(F, "linear") is original


def test_the_original_of_a_method_is_bound_as_an_attribute_reads_it():
    class Layers:
        @staticmethod
        def scale(x):
            return x * 2

        @classmethod
        def make(cls, x):
            return x + 1

    before = Layers.scale
    for name in ("scale", "make"):
        amp.register_half_function(Layers, name)
    _model, _optimizer = initialize("O4")
    assert amp.get_original(Layers, "scale") is before is not Layers.scale
    assert amp.get_original(Layers, "make")(torch.ones(2)).dtype is torch.float32
    assert Layers.make(torch.ones(2)).dtype is torch.bfloat16


# ---- casts off and on ------------------------------------------------------------------------------------------------


def product_dtype():
    return torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_disable_casts_nests_decorates_and_survives_exceptions():
    _model, _optimizer = initialize("O4")
    decorated = amp.disable_casts()(product_dtype)
    with amp.disable_casts():
        with amp.disable_casts():
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.float32
    assert [decorated(), product_dtype(), decorated()] == [torch.float32, torch.bfloat16, torch.float32]
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert product_dtype() is torch.bfloat16


def test_disable_casts_leaves_other_threads_alone():
    _model, _optimizer = initialize("O4")
    device = torch.get_default_device()  # of this thread
    dtypes = []

    def multiply_there():
        with device:
            dtypes.append(product_dtype())

    with amp.disable_casts():
        thread = threading.Thread(target=multiply_there)
        thread.start()
        thread.join()
        dtypes.append(product_dtype())
    assert dtypes == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_recomputes_what_the_forward_computed(use_reentrant):
    _model, _optimizer = initialize("O4")
    seen = []

    def block(x):
        product = x @ x
        seen.append(product.dtype)
        return product.float().tanh()

    x = torch.randn(4, 4, requires_grad=True)
    with amp.disable_casts():
        loss = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant).sum()
    loss.backward()
    loss = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant).sum()
    with amp.disable_casts():
        loss.backward()
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2


def test_casts_are_inert_in_a_forked_child():
    _model, _optimizer = initialize("O4")
    child = os.fork()
    if child == 0:
        try:
            ok = product_dtype() is torch.float32
            model, optimizer = initialize("O5", seed=1, compute="native")  # a session of its own works there
            ok = ok and not amp.is_patched(torch, "matmul") and model.fc.weight.dtype is torch.bfloat16
            amp.reset()
            ok = ok and find_changes() == []
            os._exit(0 if ok else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert product_dtype() is torch.bfloat16


def test_tensors_of_other_kinds_are_never_touched():
    _model, _optimizer = initialize("O4")
    assert (torch.ones(2, 2).double() @ torch.ones(2, 2).double()).dtype is torch.float64
    assert (torch.ones(2, 2).cfloat() @ torch.ones(2, 2).cfloat()).dtype is torch.complex64
    assert (torch.ones(2, 2).long() @ torch.ones(2, 2).long()).dtype is torch.int64
    assert (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).dtype is torch.float32
    assert F.softmax(torch.ones(2, dtype=torch.float64), 0).dtype is torch.float64


# ---- code without a model --------------------------------------------------------------------------------------------


def test_a_session_block_casts_code_without_a_model_until_it_ends():
    for _ in range(2):
        with pytest.raises(KeyError), amp.session(opt_level="O4", device=torch.get_default_device()):
            assert product_dtype() is torch.bfloat16 and amp.stats().opt_level == "O4"
            with pytest.raises(amp.SessionError, match="O4 is in force already"), amp.session(opt_level="O1"):
                pass
            assert product_dtype() is torch.bfloat16
            raise KeyError
        assert find_changes() == []
    with amp.session(opt_level="O0", device=torch.get_default_device()):
        assert product_dtype() is torch.float32


# ---- the user's own functions ----------------------------------------------------------------------------------------


def dtypes_of(*tensors):
    return [tensor.dtype for tensor in tensors]


@pytest.mark.parametrize(
    ("decorate", "expected"),
    [
        (amp.half_function, [torch.bfloat16, torch.bfloat16]),
        (amp.float_function, [torch.float32, torch.float32]),
        (amp.promote_function, [torch.float32, torch.float32]),
    ],
    ids=["half", "float", "promote"],
)
def test_decorators_act_while_a_session_patches(decorate, expected):
    decorated = decorate(dtypes_of)
    tensors = torch.ones(2), torch.ones(2).bfloat16()
    assert decorated.__name__ == "dtypes_of"
    assert decorated(*tensors) == [torch.float32, torch.bfloat16]
    _model, _optimizer = initialize("O4")
    assert decorated(*tensors) == expected
    with amp.disable_casts():
        assert decorated(*tensors) == [torch.float32, torch.bfloat16]
    amp.reset()
    _model, _optimizer = initialize("O5")
    assert decorated(*tensors) == [torch.float32, torch.bfloat16]


def test_decorators_work_on_methods_static_methods_and_functions():
    class Square(torch.autograd.Function):
        @staticmethod
        @amp.float_function
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @amp.float_function
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            assert x.dtype is gradient.dtype is torch.float32
            return 2 * x * gradient

    class Owner:
        @amp.half_function
        def method(self, x):
            return x.dtype

        @amp.half_function
        @staticmethod
        def static(x):
            return x.dtype

    _model, _optimizer = initialize("O4")
    x = torch.full((3,), 3.0).bfloat16().requires_grad_()
    y = Square.apply(x)
    assert y.dtype is torch.float32
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0).bfloat16())
    assert Owner().method(torch.ones(1)) is torch.bfloat16
    assert Owner.static(torch.ones(1)) is torch.bfloat16


def test_registered_functions_win_over_the_lists_in_every_later_session():
    module = types.ModuleType("library")
    module.scale = lambda x: x * 2
    original = module.scale
    amp.register_half_function(module, "scale")
    amp.register_float_function(torch, "matmul")
    for _ in range(2):
        _model, _optimizer = initialize("O4")
        assert module.scale(torch.ones(2)).dtype is torch.bfloat16
        assert product_dtype() is torch.float32
        amp.reset()
        assert module.scale is original


def test_a_session_block_at_a_level_that_patches_nothing_is_refused(tmp_path):
    path = tmp_path / "levels.yaml"
    path.write_text("Mine: {extends: O4, loss_scale: 2}\n")
    with (
        pytest.raises(amp.PolicyError, match=r"opt_level 'O2' casts models .*patch functions: O1, O4, Mine\. "),
        amp.session(opt_level="O2", device="cpu", presets=path),
    ):
        pass
    assert amp.stats().opt_level is None


class Trainer:
    """Holds itself, too, so that it and what it holds are only gone after a garbage collection."""

    def __init__(self, *held):
        self.held = {"models": held}
        self.itself = self


@pytest.fixture
def collections():
    """How often garbage was collected on demand."""
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.enable()


@pytest.mark.parametrize("level", ["O1", "O4"], ids=["same level", "another level"])
def test_a_session_whose_models_are_gone_but_for_a_reference_cycle_is_closed_first(level, collections):
    Trainer(initialize("O1", num_losses=3))
    kept = initialize(level)
    assert amp.stats().opt_level == level and len(amp.state_dict()) == 1
    del kept


def test_no_garbage_is_collected_where_a_model_is_initialized_again(collections):
    model, optimizer = initialize("O1")
    collections.clear()
    amp.initialize([model, nn.Linear(2, 2)], optimizer, opt_level="O1", verbosity=0)
    assert collections == []


def test_a_conflict_says_what_to_do_and_keeps_nothing_alive():
    """Notebooks get advice of their own, which is tested with notebooks."""
    model = nn.Linear(5, 5)
    amp.initialize(model, opt_level="O4", verbosity=0)
    with pytest.raises(amp.SessionError, match=r"O4 is in force for Linear, still in use, .* call amp.reset\(\) first"):
        amp.initialize(nn.Linear(2, 5), opt_level="O5", verbosity=0)
    del model
    amp.initialize(nn.Linear(2, 5), opt_level="O5", verbosity=0)


def test_lists_by_which_no_op_is_low_are_warned_of(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, is_said in (
        ("blacklist: [hardtanh]", True),
        ("extends: null\nblacklist: [hardtanh]", False),
        ("extends: bfloat16\nblacklist: [hardtanh]", False),
        ("whitelist: [linear]", False),
        ("modules: [{match: '**', run: low}]", False),
    ):
        path.write_text(text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with amp.session("O4", device="cpu", lists=path):
                pass
        said = [str(warning.message) for warning in caught if "no op runs in bfloat16" in str(warning.message)]
        assert len(said) == is_said and all("extends: bfloat16" in message for message in said)


def test_functions_that_say_nothing_of_where_they_are_from_may_be_registered():
    def double(x):
        return x * 2

    double.__module__ = None
    owner = types.SimpleNamespace(double=double)
    amp.register_half_function(owner, "double")
    for _ in range(2):
        with amp.session(opt_level="O1"), insight.recording() as found:
            assert owner.double(torch.ones(2)).dtype is torch.float16
        assert owner.double is double and found.ops
