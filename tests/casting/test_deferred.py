"""Listed ops of packages that are imported after the session has opened are patched then, and plain again after reset.

Guards: casting/op_patches, patching/import_hook.
"""

import gc
import importlib
import os
import sys
import textwrap
import types
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch_state import find_changes

import amp_patch as amp
from amp_patch.patching import import_hook

X = torch.ones(2, 4)
LOW = torch.bfloat16

OPS = """
    import torch

    def roi_align(x, scale=1):
        return x * scale

    def double_(x, y):
        return x.mul_(2), y

    class Attention:
        def forward(self, x):
            return x

        @staticmethod
        def score(x):
            return x
"""
LISTS = """
    extends: bfloat16
    whitelist: [lib_x.ops.roi_align, lib_x.ops.Attention.forward]
    blacklist: [lib_x.ops.Attention.score, lib_x.ops.double_]
"""


@pytest.fixture
def write(write_modules):
    """Returns a function that writes modules: `lib_x__ops` is lib_x.ops."""
    return lambda **sources: write_modules({name.replace("__", "."): source for name, source in sources.items()})


@pytest.fixture
def lists(tmp_path):
    path = tmp_path / "lists.yaml"
    path.write_text(textwrap.dedent(LISTS))
    return path


@pytest.fixture
def library(write):
    write(lib_x="", lib_x__ops=OPS)


def write_list(tmp_path, text):
    path = tmp_path / "lists.yaml"
    path.write_text(f"extends: bfloat16\n{text}\n")
    return path


def open_session(lists, level="O4"):
    model = nn.Linear(4, 4)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, lists=lists, verbosity=0)


def import_ops():
    return importlib.import_module("lib_x.ops")


# ---- imported during the session -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("is_package_imported", [False, True])
def test_ops_are_patched_when_they_are_imported_until_reset(is_package_imported, lists):
    if is_package_imported:
        importlib.import_module("lib_x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _session = open_session(lists)
        names = amp.stats().names_patched
        ops = import_ops()
    assert ops.roi_align(X).dtype is ops.Attention().forward(X).dtype is LOW
    assert ops.Attention.score(X.to(LOW)).dtype is torch.float32
    in_place = ops.double_(X.to(LOW), X)  # in the dtype of what it changes
    assert [value.dtype for value in in_place] == [LOW, LOW]
    assert amp.stats().names_patched == names + 4
    with amp.disable_casts():
        assert ops.roi_align(X).dtype is torch.float32
    targets = [(ops, "roi_align"), (ops.Attention, "forward"), (ops.Attention, "score")]
    assert all(amp.is_patched(*target) for target in targets)
    originals = [amp.get_original(*target) for target in targets]
    amp.reset()
    for (owner, name), original in zip(targets, originals, strict=True):
        assert getattr(owner, name) is original and not amp.is_patched(owner, name)
        assert getattr(original, "__func__", original).__code__.co_filename == ops.__file__
    assert ops.roi_align(X).dtype is torch.float32
    assert find_changes() == []


def test_a_name_that_the_package_passes_on_is_patched_where_the_list_says(write, tmp_path):
    inner = "def f(x):\n    return x"
    write(
        lib_x="from .inner_x import f\nfrom .other_x import g",
        lib_x__inner_x=inner,
        lib_x__other_x="from .inner_x import f as g",
    )
    _session = open_session(write_list(tmp_path, "whitelist: [lib_x.f]"))
    lib = importlib.import_module("lib_x")
    assert lib.f(X).dtype is LOW
    assert lib.g is lib.other_x.g is lib.inner_x.f is lib.f  # names of one and the same function
    amp.reset()
    assert lib.g is lib.other_x.g is lib.inner_x.f is lib.f and lib.f(X).dtype is torch.float32


def test_a_name_that_stands_for_a_patched_function_of_torch_follows_its_own_rule(write, tmp_path):
    write(lib_x="from torch.nn.functional import linear")
    _session = open_session(write_list(tmp_path, "blacklist: [lib_x.linear]"))
    lib = importlib.import_module("lib_x")
    original = amp.get_original(torch.nn.functional, "linear")
    assert lib.linear(X, X).dtype is torch.float32 and torch.nn.functional.linear(X, X).dtype is LOW
    assert amp.get_original(lib, "linear") is original
    amp.reset()
    assert lib.linear is torch.nn.functional.linear is original


@pytest.mark.usefixtures("library")
def test_a_function_that_the_user_registered_keeps_the_users_rule(lists):
    ops = import_ops()
    amp.register_float_function(ops, "roi_align")
    _session = open_session(lists)
    assert ops.roi_align(X.to(LOW)).dtype is torch.float32


# ---- sessions come and go --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
def test_sessions_share_one_hook_for_each_module(lists):
    import wrapt.importer

    for _ in range(5):
        open_session(lists)
        amp.reset()
    assert [len(wrapt.importer._post_import_hooks[name]) for name in ("lib_x", "lib_x.ops", "lib_x.ops.Attention")] == [
        1,
        1,
        1,
    ]
    _session = open_session(lists)
    assert import_ops().roi_align(X).dtype is LOW
    assert len(import_hook._watches) == 2  # the other one is for torch.distributed.checkpoint
    amp.reset()
    assert len(import_hook._watches) == 0
    for name in ("lib_x.ops", "lib_x"):
        del sys.modules[name]
    ops = import_ops()  # the session is over
    assert not hasattr(ops.roi_align, "__wrapped__") and ops.roi_align(X).dtype is torch.float32


@pytest.mark.usefixtures("library")
def test_a_session_is_not_kept_by_what_it_waits_for(lists):
    model, optimizer = open_session(lists)
    session = weakref.ref(sys.modules["amp_patch.session.current"].state.session)
    amp.reset()
    del model, optimizer
    gc.collect()
    assert session() is None


@pytest.mark.usefixtures("library")
def test_a_forked_child_imports_plainly(lists):
    _session = open_session(lists)
    child = os.fork()
    if child == 0:
        try:
            ops = import_ops()
            os._exit(0 if ops.roi_align(X).dtype is torch.float32 and not hasattr(ops.roi_align, "__wrapped__") else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert import_ops().roi_align(X).dtype is LOW


# ---- entries that are wrong ------------------------------------------------------------------------------------------

WRONG = {
    "no function": ("lib_x.ops.roi_algin", "'lib_x.ops' has no 'roi_algin'. Did you mean 'roi_align'?"),
    "no module": ("lib_x.opps.roi_align", "'lib_x' has no 'opps'"),
    "a class": (
        "lib_x.ops.Attention",
        "'lib_x.ops.Attention' is a class, a module, a constant or part of the standard library",
    ),
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("case", WRONG)
def test_an_entry_that_turns_out_wrong_is_warned_of_once_with_its_place(case, tmp_path):
    op, problem = WRONG[case]
    path = write_list(tmp_path, f"whitelist: [lib_x.ops.roi_align, {op}]")
    _session = open_session(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ops = import_ops()
    assert len(caught) == 1 and caught[0].category is UserWarning
    assert str(caught[0].message).startswith(f"{path}:2:34: ") and problem in str(caught[0].message)
    assert (caught[0].filename, caught[0].lineno) == (str(path), 2)
    assert ops.roi_align(X).dtype is LOW  # the others are patched all the same


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("how", ["warnings are errors", "a class that refuses"])
def test_nothing_that_goes_wrong_breaks_the_import(how, tmp_path, write, caplog):
    if how == "a class that refuses":
        refuse = "class Meta(type):\n    def __setattr__(*a):\n        raise ZeroDivisionError\n"
        write(lib_x__ops=f"{refuse}class C(metaclass=Meta):\n    def f(self): pass")
    _session = open_session(write_list(tmp_path, "whitelist: [lib_x.ops.C.f, lib_x.ops.no]"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops = import_ops()
    assert sys.modules["lib_x.ops"] is ops and sys.modules["lib_x"].ops is ops
    assert "lib_x.ops" in caplog.text and ("ZeroDivisionError" in caplog.text) is (how == "a class that refuses")


def test_an_entry_that_cannot_come_any_more_is_warned_of_when_the_session_opens(write, tmp_path):
    write(lib_x="", lib_x__ops=OPS)
    importlib.import_module("lib_x")
    with pytest.warns(UserWarning, match=r"lists.yaml:2:13: 'lib_x' has no 'opps'"):
        _session = open_session(write_list(tmp_path, "whitelist: [lib_x.opps.f]"))


def test_a_module_whose_import_fails_is_patched_when_it_succeeds(write, tmp_path):
    write(lib_x="1 / 0")
    _session = open_session(write_list(tmp_path, "whitelist: [lib_x.f]"))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("lib_x")
    write(lib_x="def f(x):\n    return x")
    assert importlib.import_module("lib_x").f(X).dtype is LOW


# ---- torchvision, which the shipped lists name: see also tests/clients -----------------------------------------------

VISION_OPS = ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


@pytest.mark.parametrize("lists", ["float16", "bfloat16", "paper", "autocast-cpu", "autocast-cuda"])
def test_ops_of_torchvision_run_in_float32_by_the_shipped_lists(lists, write):
    if "torchvision" in sys.modules:
        pytest.skip("torchvision is imported")
    write(torchvision="", torchvision__ops="".join(f"def {name}(x):\n    return x.dtype\n" for name in VISION_OPS))
    with warnings.catch_warnings(), amp.session("O4", device="cpu", lists=lists):
        warnings.simplefilter("error")
        ops = importlib.import_module("torchvision.ops")
        assert {getattr(ops, name)(X.to(LOW)) for name in VISION_OPS} == {torch.float32}
    assert ops.nms(X.to(LOW)) is LOW


@pytest.mark.parametrize("stub", [None, types.ModuleType("torchvision")], ids=["not to be imported", "a stub"])
def test_without_ops_of_torchvision_nobody_hears_of_them(stub, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torchvision", stub)
    with warnings.catch_warnings(), amp.session("O4", device="cpu"):
        warnings.simplefilter("error")
        assert "torchvision" not in caplog.text
