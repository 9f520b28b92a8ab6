"""References to patched functions outside torch are found wherever a program keeps them, without running its code, and
restored exactly.

Guards: patching/references, patching/search, patching/containers, patching/exchanges, patching/slots.
Guards: patching/pickling.
"""

import builtins
import copy
import functools
import gc
import importlib
import io
import pickle
import sys
import textwrap
import types
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_state import find_changes

import amp_patch as amp
from amp_patch.patching import pickling, search, slots

X = torch.ones(2, 4)
LOW = torch.bfloat16
HEAD = "import torch, torch.nn.functional as F\n"
LISTS = "extends: bfloat16\nwhitelist: [gelu, silu]\nblacklist: [torch.Tensor.sinc]\n"


@pytest.fixture
def lists(tmp_path):
    """A list that whitelists two functions that torch writes in C and in Python, and blacklists a method."""
    path = tmp_path / "lists.yaml"
    path.write_text(LISTS)
    return path


@pytest.fixture
def import_program(write_modules):
    """Returns a function that writes the source of a module with torch and F in it, and imports it."""

    def import_program(source):
        write_modules({"program_x": HEAD + textwrap.dedent(source)})
        return importlib.import_module("program_x")

    return import_program


def open_session(lists="bfloat16", model=None, **options):
    model = nn.Linear(4, 4) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", lists=lists, verbosity=0, **options)
    return model, optimizer


# ---- one kind of slot at a time -------------------------------------------------------------------------------------

SLOTS = {
    # timm.layers.norm: from torch.nn.functional import rms_norm
    "global": ("from torch.nn.functional import gelu", lambda m, x: m.gelu(x)),
    # kornia.losses.HausdorffERLoss: conv = torch.conv2d
    "class attribute, builtin": ("class C:\n    act = F.gelu", lambda m, x: m.C().act(x)),
    "class attribute, function": ("class C:\n    act = F.silu", lambda m, x: m.C.act(x)),
    "staticmethod": ("class C:\n    act = staticmethod(F.silu)", lambda m, x: m.C().act(x)),
    "static builtin": ("class C:\n    act = staticmethod(F.gelu)", lambda m, x: m.C().act(x)),
    "nested class": ("class C:\n    class D:\n        act = F.gelu", lambda m, x: m.C.D().act(x)),
    # kornia.geometry.ImageRegistrator(loss_fn=F.l1_loss), zoedepth of transformers (act=torch.softmax)
    "default": ("def f(x, n=1, act=F.gelu, *, k=2):\n    return act(x)", lambda m, x: m.f(x)),
    "keyword default": ("def f(x, *, act=F.gelu):\n    return act(x)", lambda m, x: m.f(x)),
    "default of a decorated function": (
        "@torch.no_grad()\ndef f(x, act=F.gelu):\n    return act(x)",
        lambda m, x: m.f(x),
    ),
    "partial as a default": (
        "import functools\ndef f(x, act=functools.partial(F.gelu, approximate='tanh')):\n    return act(x)",
        lambda m, x: m.f(x),
    ),
    "partial of a class": (
        "import functools\nclass C:\n    act = functools.partial(F.gelu, approximate='tanh')",
        lambda m, x: m.C.act(x),
    ),
    # transformers.activations.ACT2FN, up to 4.1
    "table": ("ACT = {'gelu': F.gelu, 'own': lambda x: x}", lambda m, x: m.ACT["gelu"](x)),
    # torchao.utils: what a class of tensors does with each function, by class
    "table in a table": ("class C:\n    TABLES = {'own': {'gelu': F.gelu}}", lambda m, x: m.C.TABLES["own"]["gelu"](x)),
    # functorch.dim.op_properties.pointwise
    "tuple": ("ACTS = ('gelu', (F.gelu,))", lambda m, x: m.ACTS[1][0](x)),
    "tuple of a class": ("class C:\n    acts = (F.gelu, F.silu)", lambda m, x: m.C.acts[1](x)),
    "tuple in a table": ("ACT = {'gelu': (F.gelu, 'tanh')}", lambda m, x: m.ACT["gelu"][0](x)),
    "list": ("ACTS = [None, F.gelu, {'silu': F.silu}]", lambda m, x: m.ACTS[2]["silu"](m.ACTS[1](x).float())),
    "set": ("ACTS = {F.gelu}", lambda m, x: next(iter(m.ACTS))(x)),
    "frozen set": ("ACTS = frozenset([F.gelu])", lambda m, x: next(iter(m.ACTS))(x)),
    # transformers.activations.gelu is a GELUActivation, which holds F.gelu
    "layer": (
        (
            "class Gelu(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        torch.nn.Module.__init__(self)\n"  # super() would be a closure that leads back to the class
            "        self.act = F.gelu\n"
            "    def forward(self, x):\n"
            "        return self.act(x)\n"
            "gelu = Gelu()\n"
            "LAYERS = {'gelu': gelu, 'other': torch.nn.Sequential(Gelu())}"
        ),
        lambda m, x: m.LAYERS["other"](m.gelu(x).float()),
    ),
}
"""Where modules keep functions: source, and a call from there. Beside each kind a published package that has it."""


OWN = (dict, list, tuple, set, frozenset, staticmethod, classmethod, functools.partial, types.CellType, nn.Module)


def describe(module):
    """What a module, its classes, functions and tables hold, by identity."""
    held, pending = {}, [vars(module)]
    while pending:
        value = pending.pop()
        is_own = isinstance(value, OWN) or getattr(value, "__module__", None) == module.__name__
        if is_own and id(value) not in held and value is not vars(builtins):
            # from Python 3.13 on, the values are not among the referents of the namespace of an object
            is_layer = isinstance(value, nn.Module)
            inner = [vars(value), *vars(value).values()] if is_layer else gc.get_referents(value)
            inner = [one for one in inner if type(one) is not dict or one]  # which a function has once it is asked for
            held[id(value)] = list(map(id, inner))
            pending += inner
    return held


@pytest.fixture
def programs(write_modules):
    """Writes a program for each slot; returns a function that imports them, by the names of the slots."""
    names = {slot: f"program_x{index}" for index, slot in enumerate(SLOTS)}
    write_modules({name: HEAD + SLOTS[slot][0] for slot, name in names.items()})
    return lambda: {slot: importlib.import_module(name) for slot, name in names.items()}


@pytest.mark.parametrize("defaults", ["act=F.gelu", "*, act=F.gelu"], ids=["default", "keyword default"])
def test_a_function_that_another_package_has_imported_by_name_has_its_defaults_replaced(defaults, lists, write_modules):
    own = HEAD + f"def f(x, {defaults}):\n    return act(x)\n"
    write_modules({"program_of_losses": own, "program_that_trains": "from program_of_losses import f\n"})
    trains = importlib.import_module("program_that_trains")
    sys.modules["program_of_losses"] = sys.modules.pop("program_of_losses")  # comes after, as it does after a script
    open_session(lists)
    assert trains.f(X).dtype is LOW
    amp.reset()
    assert trains.f(X).dtype is torch.float32


def test_a_slot_is_redirected_and_given_back_exactly(programs, lists):
    modules = programs()
    before = {slot: describe(module) for slot, module in modules.items()}
    plain = {slot: SLOTS[slot][1](module, X) for slot, module in modules.items()}
    for _ in range(2):
        session = open_session(lists)
        for slot, module in modules.items():
            assert SLOTS[slot][1](module, X).dtype is LOW, slot
            with amp.disable_casts():
                assert SLOTS[slot][1](module, X).dtype is torch.float32, slot
        amp.reset()
        for slot, module in modules.items():
            assert describe(module) == before[slot], slot
            assert torch.equal(SLOTS[slot][1](module, X), plain[slot]), slot
        del session


def test_a_slot_that_was_made_during_a_session_gets_the_original(programs, lists):
    _session = open_session(lists)
    modules = programs()
    amp.reset()
    for slot, module in modules.items():
        held = set().union(*describe(module).values())
        assert held & {id(F.gelu), id(F.silu)} and not held & set(pickling.get_originals()), slot
        assert SLOTS[slot][1](module, X).dtype is torch.float32, slot


def test_a_program_run_as_a_script_is_redirected(tmp_path, fork_server):
    script = """
        import warnings
        warnings.simplefilter("error", UserWarning)
        import torch, torch.nn.functional as F, amp_patch as amp
        ACT = {"gelu": F.gelu}
        def f(x, act=F.gelu):
            return act(x)
        model = torch.nn.Linear(2, 2)
        amp.initialize(model, opt_level="O4", lists="lists.yaml", verbosity=0)
        assert ACT["gelu"](torch.ones(2)).dtype is f(torch.ones(2)).dtype is torch.bfloat16
        amp.reset()
        assert ACT["gelu"] is F.gelu and f.__defaults__ == (F.gelu,)
    """
    (tmp_path / "lists.yaml").write_text(LISTS)
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = fork_server.run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_methods_of_tensors_are_redirected_too(import_program, lists):
    source = "OPS = {'sinc': torch.Tensor.sinc}\nclass Mine(torch.Tensor):\n    my_sinc = torch.Tensor.sinc"
    module, low = import_program(source), X.bfloat16()
    original = module.OPS["sinc"]
    _session = open_session(lists)
    assert module.OPS["sinc"](low).dtype is low.as_subclass(module.Mine).my_sinc().dtype is torch.float32
    amp.reset()
    assert module.OPS["sinc"] is vars(module.Mine)["my_sinc"] is original


def test_what_the_user_changed_during_the_session_stays(import_program, lists):
    source = """
        act = F.gelu
        ACT = {"gelu": F.gelu, "gone": F.gelu}
        class C:
            act = F.gelu
        def f(x, act=F.gelu):
            return act(x)
    """
    module = import_program(source)
    _session = open_session(lists)
    module.act = module.ACT["gelu"] = module.C.act = mine = abs
    del module.ACT["gone"]
    module.f.__defaults__ = (mine,)
    amp.reset()
    assert module.act is module.C.act is mine and {"gelu": mine} == module.ACT and module.f.__defaults__ == (mine,)


def test_places_that_are_gone_by_the_end_are_no_trouble(import_program, lists):
    module = import_program("class C:\n    act = F.gelu\ndef f(x, act=F.gelu):\n    pass")
    _session = open_session(lists)
    gone = weakref.ref(module.C), weakref.ref(module.f)
    del module.C, module.f
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    amp.reset()


# ---- what must not happen --------------------------------------------------------------------------------------------

TRAPS = """
    import types

    def fail(*args):
        raise AssertionError("ran the program's code")

    class Meta(type):
        __getattribute__ = __setattr__ = fail

    class Guarded(metaclass=Meta):
        act = F.gelu
        entries = ()

    class Descriptor:
        __get__ = __set__ = fail

    class Plain:
        attribute = Descriptor()
        prop = property(fail)
        act = F.gelu

    class Instance:
        __getattribute__ = __getattr__ = __eq__ = __hash__ = __len__ = __iter__ = __bool__ = fail

    class Table(dict):
        __getitem__ = __setitem__ = __iter__ = items = values = keys = get = __len__ = fail

    class Liar:
        __class__ = property(fail)

    instance, liar, plain = object.__new__(Instance), object.__new__(Liar), Plain()
    table = Table(gelu=F.gelu)

    def __getattr__(name):
        fail()
"""


def test_no_code_of_the_program_is_run(import_program, lists):
    module = import_program(TRAPS)
    lazy = type("Lazy", (types.ModuleType,), {"__getattribute__": vars(module)["fail"]})("lazy_x")
    namespace_of, attributes_of = slots.namespace_of, slots.attributes_of
    namespace_of(lazy)["gelu"] = F.gelu
    sys.modules.update({"lazy_x": lazy, "no_module_x": module.instance})
    try:
        _session = open_session(lists)
        held = [namespace_of(lazy)["gelu"], dict.get(module.table, "gelu")]
        held += [module.plain.act, attributes_of(module.Guarded)["act"].__func__]
        assert all(value is F.gelu and value(X).dtype is LOW for value in held)
        amp.reset()
        held = [namespace_of(lazy)["gelu"], dict.get(module.table, "gelu")]
        assert all(
            value is F.gelu
            for value in (*held, attributes_of(module.Plain)["act"], attributes_of(module.Guarded)["act"])
        )
    finally:
        del sys.modules["lazy_x"], sys.modules["no_module_x"]


@pytest.mark.parametrize("kind", ["dict", "OrderedDict"])
def test_keys_of_tables_follow_in_their_order_and_come_back(kind, import_program, lists):
    """`__torch_function__` is given what the public name holds, and looks it up: in tensordict, and in torch itself."""
    source = f"""
        from collections import OrderedDict
        HANDLERS = {kind}({{'a': 1, F.gelu: 'mine', 'b': 2}})
        gelu = F.gelu
    """
    module = import_program(source)
    original, table = module.gelu, module.HANDLERS
    _session = open_session(lists)
    assert module.gelu is not original and list(table.items()) == [("a", 1), (module.gelu, "mine"), ("b", 2)]
    table[torch.softmax] = "added under the patches"
    amp.reset()
    assert module.HANDLERS is table
    assert list(table) == ["a", original, "b", torch.softmax] and not hasattr(torch.softmax, "__wrapped__")


def test_modules_are_walked_at_the_end_only_where_somebody_holds_a_replacement(monkeypatch):
    monkeypatch.setattr(pickling, "_functions", {})  # those of earlier sessions
    walks, search_modules = [], search.Search.search_modules
    monkeypatch.setattr(search.Search, "search_modules", lambda self: (walks.append(1), search_modules(self)))
    counts = []
    for is_held in (True, False):
        _session = open_session()
        held = [F.linear] * is_held
        amp.reset()
        counts.append(len(walks))
        del held
        gc.collect()
    assert counts == [2, 3]


# ---- what cannot be redirected ---------------------------------------------------------------------------------------

STUCK = """
    import functools, types, typing

    class Slots:
        __slots__ = ("act",)
    class Instance:
        pass
    class Pair(typing.NamedTuple):
        act: object
    pair = Pair(F.gelu)
    frozen = types.MappingProxyType({"gelu": F.gelu})
    slots, instance = Slots(), Instance()
    slots.act = instance.act = F.gelu
    HALF = {"fine": F.gelu, "stuck": Pair(F.gelu)}
    class C:
        act = functools.partialmethod(F.gelu)
    fine, NAMES = F.gelu, ("gelu",)
"""


def warnings_of(open_it):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_it()
    return [w for w in caught if "cannot be replaced" in str(w.message)]


def test_what_cannot_be_redirected_is_named_in_one_warning(import_program, lists):
    module = import_program(STUCK)
    before = describe(module)
    (warning,) = warnings_of(lambda: amp.initialize(nn.Linear(2, 2), opt_level="O4", lists=lists, verbosity=0))
    named = {name for name in vars(module) if f"program_x.{name} (" in str(warning.message)}
    assert named == {"pair", "frozen", "slots", "instance", "HALF"}
    assert "program_x.C.act (partialmethod)" in str(warning.message)
    assert "more" not in str(warning.message)
    assert warning.filename == __file__
    assert module.HALF["fine"] is module.fine is F.gelu
    amp.reset()
    assert describe(module) == before


PARTIALS = """
    import functools

    def loss(a, b, scale=1.0):
        return (a @ b.T).sum() * scale
    gelu = functools.partial(F.gelu, approximate="tanh")
    TABLE = {"gelu": functools.partial(F.gelu)}
    def make():
        return functools.partial(loss, scale=2.0)
"""


def test_the_function_of_a_partial_is_redirected_and_a_function_of_the_script_wherever_the_partial_is(
    import_program, tmp_path
):
    module = import_program(PARTIALS)
    held_here = module.make()
    partials = [module.gelu, module.TABLE["gelu"], held_here]
    before = [(one.func, one.args, one.keywords) for one in partials]
    path = tmp_path / "lists.yaml"
    path.write_text("extends: null\nwhitelist: [gelu]\nblacklist: [program_x.loss]\n")
    amp.initialize(nn.Linear(2, 2), opt_level="O4", lists=str(path), verbosity=0)
    x = torch.ones(2, 2)
    assert [module.gelu(x).dtype, module.TABLE["gelu"](x).dtype] == [torch.bfloat16] * 2
    assert held_here(x.bfloat16(), x.bfloat16()).dtype is torch.float32
    amp.reset()
    assert [(one.func, one.args, one.keywords) for one in partials] == before


# ---- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.act(self.linear(x))


def make_encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation=F.gelu, batch_first=True)


@pytest.mark.parametrize(
    "make", [make_encoder, lambda: nn.Sequential(Block(F.gelu), Block(F.silu))], ids=["encoder layer", "own"]
)
def test_functions_that_a_model_holds_are_redirected_and_given_back(make, lists):
    model = make()
    holders = {
        (module, name): vars(module)[name]
        for module in model.modules()
        for name in ("act", "activation")
        if name in vars(module)
    }
    assert holders
    open_session(lists, model)
    for (module, name), original in holders.items():
        assert vars(module)[name] is getattr(F, original.__name__) is not original
        assert amp.is_patched(module, name) and amp.get_original(module, name) is original
        assert vars(module)[name](X).dtype is LOW
    amp.reset()
    for (module, name), original in holders.items():
        assert vars(module)[name] is original
        assert not amp.is_patched(module, name) and amp.get_original(module, name) is original


@pytest.mark.parametrize(
    "hold",
    [
        lambda act: lambda x, act=act: act(x),
        lambda act: lambda x, *, act=act: act(x),
    ],
    ids=["default", "keyword default"],
)
def test_what_a_function_that_a_model_holds_refers_to_is_redirected_and_given_back(hold, lists):
    model = nn.Sequential(Block(hold(torch.sinc)), Block(hold(F.gelu)))
    originals = [one.act(X.to(LOW)).dtype for one in model], model[1].act(X).dtype
    found = warnings_of(lambda: open_session(lists, model))
    assert found == []
    assert model[1].act(X).dtype is LOW
    amp.reset()
    assert ([one.act(X.to(LOW)).dtype for one in model], model[1].act(X).dtype) == originals
    assert originals[1] is torch.float32


def test_a_model_whose_function_refers_to_it_is_let_go(lists):
    class Biased(Block):
        def __init__(self):
            super().__init__(None)
            self.act = lambda x, act=F.gelu: act(x) + self.linear.bias

    model, optimizer = open_session(lists, Biased())
    assert model.act.__defaults__[0] is F.gelu
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_models_that_a_session_adopts_are_redirected_too(lists):
    first, second = Block(F.gelu), Block(F.gelu)
    original = first.act
    open_session(lists, first)
    assert second.act is original
    open_session(lists, second)
    assert second.act is first.act is F.gelu is not original
    amp.reset()
    assert second.act is first.act is original


def test_a_model_that_could_not_be_adopted_keeps_its_own_functions(lists, monkeypatch):
    first, second = Block(F.gelu), Block(F.gelu)
    original = first.act
    open_session(lists, first)

    class Interrupted(slots.WeakAttribute):
        def write(self, value):
            super().write(value)
            raise KeyboardInterrupt

    monkeypatch.setattr(search, "WeakAttribute", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        amp.initialize(second, opt_level="O4", lists=lists, verbosity=0)
    assert vars(second)["act"] is original and not second._forward_hooks
    assert first.act is F.gelu is not original


def test_a_class_of_a_model_that_no_module_holds_is_redirected(lists):
    class Local(nn.Linear):
        act = F.gelu

        def forward(self, x, last=F.silu):
            return last(self.act(super().forward(x)))

    model, forward, defaults = Local(4, 4), Local.forward, Local.forward.__defaults__
    open_session(lists, model)
    assert model.act(X).dtype is LOW and forward.__defaults__ == (F.silu,) is not defaults
    amp.reset()
    assert vars(Local)["act"] is F.gelu and forward.__defaults__ is defaults


def save(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    return stream.getvalue()


def load(data):
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize("act", ["gelu", "silu"], ids=["builtin", "function"])
@pytest.mark.parametrize("moment", ["during", "after"])
def test_a_model_can_be_copied_and_saved(act, moment, lists):
    model = Block(getattr(F, act))
    plain = model(X)
    open_session(lists, model)
    cast = model(X)
    copies = [
        copy.deepcopy(model),
        load(save(model)),
        pickle.loads(pickle.dumps(model)),
        load(save(copy.deepcopy(model))),
    ]
    if moment == "after":
        amp.reset()
        copies += [copy.deepcopy(model), load(save(model)), *[load(save(other)) for other in copies]]
    for other in copies:
        assert torch.equal(other(X), cast if moment == "during" else plain)


def test_a_copy_from_one_session_takes_part_in_the_next(lists):
    """As an average of a model of transformers does, whose GELUActivation holds F.gelu."""
    model = Block(F.gelu)
    original = model.act
    open_session(lists, model)
    twin, saved = copy.deepcopy(model), load(save(model))
    amp.reset()
    assert twin(X).dtype is saved(X).dtype is torch.float32
    for other in (twin, saved):
        open_session(lists, other)
        assert other.act is F.gelu and other(X).dtype is LOW
        amp.reset()
        assert other.act is original


def test_a_copy_that_is_saved_after_its_session_loads_in_another_process(lists, tmp_path, fork_server):
    model = nn.TransformerEncoderLayer(4, 2, 8, activation=F.gelu)
    open_session(lists, model)
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "during.pt")
    amp.reset()
    torch.save(twin, tmp_path / "copy.pt")
    torch.save(model, tmp_path / "after.pt")
    script = (
        "import torch\n"
        "for name in ('during', 'copy', 'after'):\n"
        "    assert torch.load(f'{name}.pt', weights_only=False).activation is torch.nn.functional.gelu, name\n"
    )
    done = fork_server.run("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_partial_that_a_model_holds_is_made_anew_and_given_back(lists):
    """GELUTanh of transformers, ResnetBlock2D of diffusers and Attend of x-transformers hold one."""
    partial = functools.partial(F.gelu, approximate="tanh")
    model = nn.Sequential(Block(partial))
    assert warnings_of(lambda: open_session(lists, model)) == []
    assert model[0].act(X).dtype is LOW and model[0].act.keywords == {"approximate": "tanh"}
    copied = copy.deepcopy(model)
    amp.reset()
    assert model[0].act is partial
    assert torch.equal(copied[0].act(X), F.gelu(X, approximate="tanh"))


def test_what_a_model_holds_in_an_object_of_its_own_is_named(lists):
    model = nn.Sequential(Block(functools.partial(functools.partialmethod, F.gelu)))
    (warning,) = warnings_of(lambda: open_session(lists, model))
    assert "Sequential.0.act (partial)" in str(warning.message)


# ---- asking, and originals for a while -------------------------------------------------------------------------------


def test_is_patched_and_get_original_know_globals_and_class_attributes(import_program, lists):
    source = "act = F.gelu\nclass C:\n    raw = F.gelu\n    static = staticmethod(F.silu)\n    n = 1"
    module = import_program(source)
    expected = {(module, "act"): F.gelu, (module.C, "raw"): F.gelu, (module.C, "static"): F.silu}
    assert not any(amp.is_patched(*target) for target in expected)
    _session = open_session(lists)
    for (owner, name), original in expected.items():
        assert amp.is_patched(owner, name) and amp.get_original(owner, name) is original is not getattr(owner, name)
    assert not amp.is_patched(module.C, "n") and not amp.is_patched(type("C", (), {}), "raw")
    amp.reset()
    assert not any(amp.is_patched(*target) for target in expected)


def test_suspended_puts_every_original_back_and_every_replacement_in_again(programs, lists):
    modules = list(programs().values())
    model = Block(F.gelu)
    before = [describe(module) for module in modules], model.act
    open_session(lists, model)
    during = [describe(module) for module in modules], model.act
    patcher = sys.modules["amp_patch.session.current"].state.session.patcher
    with pytest.raises(KeyError), patcher.suspended():
        assert ([describe(module) for module in modules], model.act) == before
        raise KeyError
    assert ([describe(module) for module in modules], model.act) == during != before


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", ["global", "class attribute", "default"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_slots_are_written_undoes_all(slot, when, import_program, lists, monkeypatch):
    source = """
        act = F.gelu
        class C:
            act = F.gelu
        def f(x, act=F.gelu):
            pass
    """
    module = import_program(source)
    before = describe(module)
    kind = slots.Entry if slot == "global" else slots.WeakAttribute
    write = kind.write

    def interrupted(self, value):
        if slot == "default" and self.key != "__defaults__":
            return write(self, value)
        monkeypatch.undo()
        if when == "after":
            write(self, value)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_session(lists)
    monkeypatch.undo()
    assert describe(module) == before
    assert find_changes() == []


def test_a_class_that_cannot_be_assigned_to_is_no_trouble(import_program, lists):
    """An enumeration refuses to have its members replaced, and holds them twice."""
    module = import_program("import enum\nclass Act(enum.Enum):\n    GELU = F.gelu")
    before = describe(module)
    (warning,) = warnings_of(lambda: open_session(lists))
    assert "program_x.Act.GELU (Act)" in str(warning.message)
    amp.reset()
    assert describe(module) == before and module.Act(F.gelu) is module.Act.GELU


def test_modules_may_come_and_go_meanwhile(import_program, lists, monkeypatch):
    module, namespace_of = import_program("ACT = {'gelu': F.gelu}"), search.namespace_of

    def look(module):
        if sys.modules.pop("churn_x", None) is None:
            sys.modules["churn_x"] = types.ModuleType("churn_x")
        return namespace_of(module)

    monkeypatch.setattr(search, "namespace_of", look)
    _session = open_session(lists)
    sys.modules.pop("churn_x", None)
    assert module.ACT["gelu"](X).dtype is LOW


TUPLES = """
    PAIR = ("gelu", F.gelu)
    IN_LIST, IN_LISTS, IN_DICT = [PAIR], [[PAIR]], {"pair": PAIR}
"""


def test_a_tuple_is_exchanged_in_every_place_that_holds_it(import_program, lists):
    module = import_program(TUPLES)
    find = {
        "itself": lambda: module.PAIR,
        "list": lambda: module.IN_LIST[0],
        "lists": lambda: module.IN_LISTS[0][0],
        "dict": lambda: module.IN_DICT["pair"],
    }
    before = {name: get() for name, get in find.items()}
    amp.initialize(nn.Linear(2, 2), opt_level="O4", lists=lists, verbosity=0)
    assert {name: get()[1](X).dtype for name, get in find.items()} == dict.fromkeys(find, LOW)
    amp.reset()
    assert all(get() is before[name] for name, get in find.items())


# ---- every package that is imported ----------------------------------------------------------------------------------


@pytest.mark.searches_all
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_session_among_all_packages_of_the_tests_trains_as_without_them_and_leaves_them_as_found(level, monkeypatch):
    from scipy.special import softmax  # noqa: F401  (packages of some size, beside those that pytest has imported)
    from sklearn import linear_model  # noqa: F401

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="some objects hold patched functions")  # tests do, on purpose
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        amp.reset()
        return [weight.detach() for weight in model.parameters()]

    among_all = train()
    monkeypatch.setattr(search, "SKIPPED_PACKAGES", search.SKIPPED_PACKAGES | {*sys.modules})
    assert all(map(torch.equal, among_all, train()))
