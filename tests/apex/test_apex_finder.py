"""After `amp_patch.apex.install()`, `import apex` gives the stand-in, beside or before an installed `apex`, and
uninstalling leaves nothing behind.

Guards: apex/_finder, apex/_gone, apex/_metadata.
"""

import importlib
import importlib.metadata
import importlib.util
import pickle
import sys
import types

import pytest
import wrapt
from apex_training import make_model, make_optimizer, state_of_a_new_process  # noqa: F401 - the last is a fixture

import amp_patch
import amp_patch.apex
from amp_patch.apex.amp._amp_state import _amp_state

ROOTS = ("apex", "amp_C", "apex_C", "fused_adam_cuda")


def held():
    """What the process holds under the names that are served."""
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ROOTS}


@pytest.fixture(scope="module")
def finder_of_wrapt():
    """The finder that wrapt puts in for the first hook of a process, and keeps: no test here is to be the first."""
    wrapt.register_post_import_hook(lambda module: None, "a_module_that_nobody_imports")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(finder_of_wrapt):
    """A test starts without `apex`, and `uninstall` must leave what was there."""
    finders = list(sys.meta_path)
    assert held() == {}
    yield
    amp_patch.apex.uninstall()
    for name in held():
        del sys.modules[name]
    assert sys.meta_path == finders


def write_package(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    importlib.invalidate_caches()


def names_after(*lines):
    names = {}
    for line in lines:
        exec(line, names)
    return names


# ---- what is served --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "name", "real"),
    [
        (["import apex"], "apex", "amp_patch.apex"),
        (["from apex import amp"], "amp", "amp_patch.apex.amp"),
        (["import apex", "a = apex.optimizers"], "a", "amp_patch.apex.optimizers"),
        (["from apex.amp import amp"], "amp", "amp_patch.apex.amp.amp"),
        (["import apex.amp.scaler as a"], "a", "amp_patch.apex.amp.scaler"),
        (["from apex.amp import __version__"], "__version__", "amp_patch.apex.amp.__version__"),
        (["import amp_C"], "amp_C", "amp_patch.apex.amp_C"),
    ],
)
def test_a_module_is_one_object_under_both_names(lines, name, real):
    with amp_patch.apex.install():
        assert names_after(*lines)[name] is importlib.import_module(real)
        assert importlib.import_module(real).__spec__.name == real
    assert held() == {}


@pytest.mark.parametrize("line", ["from apex.amp._amp_state import _amp_state", "from apex.amp import _amp_state"])
def test_the_state_is_the_object_whatever_is_imported_first(line):
    with amp_patch.apex.install():
        names = names_after(line, "import apex", "from apex.amp._amp_state import master_params, maybe_print")
        assert names["_amp_state"] is _amp_state is names["apex"].amp._amp_state


def test_questions_are_answered():
    assert importlib.util.find_spec("apex") is None
    with amp_patch.apex.install():
        assert importlib.util.find_spec("apex") is not None and importlib.util.find_spec("apex.amp.handle") is not None
        import apex

        assert not hasattr(apex, "transformer") and hasattr(apex.optimizers, "FusedAdam") and "amp" in dir(apex)
        assert importlib.util.find_spec("apex.nonsense") is None
        assert apex.amp.__path__ and issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    assert importlib.util.find_spec("apex") is None


@pytest.mark.parametrize("form", ["import {0}", "from {1} import {2}", "import {0}.below", "from {0} import Thing"])
def test_what_is_not_here_says_what_to_use(form):
    for name in ("apex.RNN", "apex.amp.wrap", "apex.fp16_utils.FP16Model", "apex.contrib.fmha"):
        parent, _, last = name.rpartition(".")
        with amp_patch.apex.install(), pytest.raises(ModuleNotFoundError) as raised:
            exec(form.format(name, parent, last))
        assert f"no {name} (" in str(raised.value) and "use" in str(raised.value)


def test_what_apex_never_had_is_missing_as_usual():
    with amp_patch.apex.install():
        with pytest.raises(ModuleNotFoundError, match=r"^No module named 'apex\.nonsense'$"):
            importlib.import_module("apex.nonsense")
        assert importlib.import_module("apex._finder") is amp_patch.apex._finder  # no second copy of it
        with pytest.raises(AttributeError, match="nonsense"):
            _ = importlib.import_module("apex").nonsense
        with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
            exec("from apex import nonsense")


def test_classes_unpickle_under_the_paths_that_apex_wrote():
    """An FP16_Optimizer's file: a pickle by reference to `apex.amp.scaler.LossScaler`, with the state as a dict."""
    state = {"dynamic": True, "_loss_scale": 512.0, "_unskipped": 3, "_scale_seq_len": 20, "_has_overflow": False}
    # without the header and the final STOP
    by_hand = b"\x80\x02capex.amp.scaler\nLossScaler\n)\x81" + pickle.dumps(state, 2)[2:-1] + b"b."
    with amp_patch.apex.install():
        scaler = pickle.loads(by_hand)
        assert (scaler.loss_scale(), scaler._unskipped, scaler._scale_seq_len) == (512.0, 3, 20)
        assert scaler.dynamic
        assert type(scaler) is importlib.import_module("apex.amp.scaler").LossScaler
        again = pickle.loads(pickle.dumps(scaler))
    assert type(pickle.loads(pickle.dumps(again))) is type(scaler)


# ---- in and out ------------------------------------------------------------------------------------------------------


def test_installing_and_uninstalling_twice_is_harmless():
    finders = list(sys.meta_path)
    first, second = amp_patch.apex.install(), amp_patch.apex.install()
    assert len(sys.meta_path) == len(finders) + 1
    second.remove()
    import apex

    assert apex is amp_patch.apex
    for undo in (first.remove, first.remove, amp_patch.apex.uninstall):
        undo()
        assert sys.meta_path == finders and held() == {}
    amp_patch.apex.install()
    amp_patch.apex.uninstall()
    assert sys.meta_path == finders


def test_a_block_that_raises_uninstalls():
    with pytest.raises(ZeroDivisionError), amp_patch.apex.install():
        import apex.amp  # noqa: F401

        _ = 1 / 0
    assert held() == {}


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_arguments_that_belong_to_the_level_go_with_it(level, capsys):
    model = make_model()
    with amp_patch.apex.install(opt_level=level):
        amp_patch.initialize(
            model, make_optimizer(model), opt_level="O5", optimizer_state_type="bfloat16", split_masters=True
        )
        said = f"opt_level {level} instead of O5, without the script's optimizer_state_type, split_masters"
        assert said in capsys.readouterr().out


def test_settings_come_and_go_with_their_install(capsys):
    def level(**options):
        model = make_model()
        amp_patch.apex.amp.initialize(model, make_optimizer(model), **options)
        amp_patch.reset()
        return _amp_state.opt_properties.opt_level

    with amp_patch.apex.install(opt_level="O5"):
        assert level(opt_level="O2", keep_batchnorm_fp32=True) == "O5"
        with amp_patch.apex.install(opt_level="O1"):
            assert level(opt_level="O2", keep_batchnorm_fp32="True", loss_scale="64") == "O1"
            assert "opt_level O1 instead of O2, without the script's keep_batchnorm_fp32" in capsys.readouterr().out
            assert _amp_state.opt_properties.loss_scale == 64.0
        assert level(opt_level="O0") == "O5"
    assert level(opt_level="O0") == "O0"


# ---- beside and before an apex that is installed ---------------------------------------------------------------------

WITH_AMP = {
    "apex/__init__.py": "from . import amp\n",
    "apex/amp/__init__.py": "theirs = True\n",
    "amp_C.py": "theirs = True\n",
}
WITHOUT_AMP = {
    "apex/__init__.py": "from . import optimizers\n",
    "apex/optimizers/__init__.py": "theirs = True\n",
    "apex/transformer/__init__.py": "theirs = True\n",
    "apex/contrib/__init__.py": "",
    "apex/contrib/xentropy/__init__.py": "theirs = True\n",
}


@pytest.mark.parametrize("imported", [True, False], ids=["imported-before", "imported-after"])
def test_an_apex_that_has_amp_is_left_alone(imported, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    write_package(tmp_path, WITH_AMP)
    before = dict(vars(importlib.import_module("apex"))) if imported else None
    with amp_patch.apex.install():
        import amp_C
        import apex
        from apex import amp

        assert amp.theirs and apex.amp is amp and amp_C.theirs
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("apex.optimizers")
    assert any(str(tmp_path) in message and "force=True" in message for message in caplog.messages)
    assert sys.modules["apex"] is apex and (before is None or set(vars(apex)) == set(before))


@pytest.mark.parametrize("imported", [True, False], ids=["imported-before", "imported-after"])
def test_force_stands_before_it_and_gives_it_back(imported, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_package(tmp_path, WITH_AMP)
    if imported:
        importlib.import_module("apex.amp")
        importlib.import_module("amp_C")
    before = held()
    with amp_patch.apex.install(force=True):
        import amp_C
        from apex import amp

        assert amp is amp_patch.apex.amp and amp_C is sys.modules["amp_patch.apex.amp_C"]
    assert held() == before
    assert importlib.import_module("apex.amp").theirs and importlib.import_module("amp_C").theirs


@pytest.mark.parametrize("imported", [True, False], ids=["imported-before", "imported-after"])
def test_an_apex_without_amp_keeps_its_own_and_gets_the_rest(imported, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    write_package(tmp_path, WITHOUT_AMP)
    before = set(vars(importlib.import_module("apex"))) if imported else None
    with amp_patch.apex.install():
        import apex

        assert apex.amp is amp_patch.apex.amp and apex.optimizers.theirs
        from apex import parallel, transformer
        from apex.amp import scaler
        from apex.contrib import clip_grad, xentropy

        assert parallel.__name__ == "amp_patch.apex.parallel" and scaler.__name__ == "amp_patch.apex.amp.scaler"
        assert transformer.theirs and xentropy.theirs and clip_grad.__name__ == "amp_patch.apex.contrib.clip_grad"
        with pytest.raises(ModuleNotFoundError, match="MultiheadAttention"):
            importlib.import_module("apex.contrib.multihead_attn")
        with pytest.raises(AttributeError, match="nonsense"):
            _ = apex.nonsense
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("amp_C")  # its optimizers would take ours for the compiled one
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("apex")  # it speaks for itself
    assert caplog.records == []
    assert {name for name in held() if "amp_patch" in held()[name].__name__} == set()
    assert not hasattr(apex, "amp") and not hasattr(apex, "parallel") and not hasattr(apex.contrib, "clip_grad")
    if before is not None:
        assert before <= set(vars(apex)) and set(vars(apex)) - before <= {"transformer", "contrib"}


def test_a_project_of_that_name_is_stepped_in_front_of_and_named(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    write_package(tmp_path, {"apex.py": "theirs = True\n"})
    with amp_patch.apex.install():
        import apex.amp

        assert apex is amp_patch.apex
    assert any(str(tmp_path / "apex.py") in message for message in caplog.messages)


@pytest.mark.parametrize("kind", ["checkout", "stub"])
def test_what_is_no_package_does_not_count(kind, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    if kind == "checkout":
        write_package(tmp_path, {"apex/setup.py": "", "apex/apex/amp/__init__.py": ""})
    else:
        sys.modules["apex"] = stub = types.ModuleType("apex")
    with amp_patch.apex.install():
        from apex import amp

        assert amp is amp_patch.apex.amp
    assert caplog.records == []
    assert sys.modules.get("apex") is (stub if kind == "stub" else None)


def test_an_amp_C_that_is_installed_is_used(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_package(tmp_path, {"amp_C.py": "theirs = True\n"})
    with amp_patch.apex.install():
        assert importlib.import_module("amp_C").theirs
        assert importlib.import_module("apex") is amp_patch.apex
