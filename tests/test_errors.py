"""Every error is an `AmpError` and the builtin a caller would catch; `did_you_mean` suggests a word only when one is
close.
"""

import copy
import inspect
import pickle
from pathlib import Path

import pytest

import amp_patch as amp
from amp_patch import errors
from amp_patch.errors import AmpError, did_you_mean

BUILTINS = {
    errors.PolicyError: ValueError,
    errors.OpListError: ValueError,
    errors.ModelError: ValueError,
    errors.OptimizerError: ValueError,
    errors.ArgumentTypeError: TypeError,
    errors.ArgumentValueError: ValueError,
    errors.LossIdError: IndexError,
    errors.SessionError: RuntimeError,
    errors.BannedOpError: NotImplementedError,
    errors.GradientOverflowError: FloatingPointError,
    errors.NonFiniteError: FloatingPointError,
    errors.CheckpointError: ValueError,
    errors.RecordError: ValueError,
    errors.SettingsError: ValueError,
    errors.MissingExtraError: ModuleNotFoundError,
}
PRESETS = ("O0", "O1", "O2", "O3", "O4", "O5")


@pytest.mark.parametrize(("error", "builtin"), BUILTINS.items(), ids=lambda value: value.__name__)
def test_an_error_is_caught_as_amp_error_and_as_its_builtin(error: type[AmpError], builtin: type[Exception]) -> None:
    for caught_as in (AmpError, builtin, RuntimeError):
        with pytest.raises(caught_as, match=r"^the message$") as raised:
            raise error("the message")
        assert type(raised.value) is error


def test_the_table_above_holds_every_error_of_the_module() -> None:
    defined = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, AmpError)}
    assert defined == {AmpError, *BUILTINS}


@pytest.mark.parametrize("error", [AmpError, *BUILTINS], ids=lambda error: error.__name__)
def test_an_error_is_public_and_documented(error: type[AmpError]) -> None:
    assert getattr(amp, error.__name__) is error
    assert error.__name__ in amp.__all__
    assert error.__doc__


@pytest.mark.parametrize("error", [errors.OpListError, errors.PolicyError], ids=lambda error: error.__name__)
def test_an_error_of_a_file_tells_its_place_and_keeps_it_when_it_is_pickled(
    error: type[errors.OpListError] | type[errors.PolicyError],
) -> None:
    for raised in (error("no such key", Path("a:b.yaml"), 3, 7), error("no such list")):
        again = pickle.loads(pickle.dumps(raised))
        for one in (raised, again, copy.copy(raised)):
            place = (one.path, one.line, one.column)
            if one.path is None:
                assert (str(one), place) == ("no such list", (None, None, None))
            else:
                assert (str(one), place) == ("a:b.yaml:3:7: no such key", ("a:b.yaml", 3, 7))


@pytest.mark.parametrize(
    ("word", "allowed", "suggested"),
    [
        ("float-16", ("float16", "float32"), "float16"),
        ("float61", ("float16", "float32", "bfloat16"), "float16"),
        ("BFLOAT", ("float16", "bfloat16"), "bfloat16"),
        ("whitelst", ("blacklist", "whitelist"), "whitelist"),
        ("keep_batchnorm", ("keep_batchnorm_fp32", "master_weights"), "keep_batchnorm_fp32"),
    ],
    ids=["case", "typo", "case-and-typo", "missing-letter", "prefix"],
)
def test_a_close_word_is_suggested_as_it_is_spelt(word: str, allowed: tuple[str, ...], suggested: str) -> None:
    assert did_you_mean(word, allowed) == f" Did you mean {suggested!r}?"


@pytest.mark.parametrize(
    ("word", "allowed"),
    [("zzz", PRESETS), ("", PRESETS), ("O1", ()), (None, PRESETS), (1, PRESETS), (b"O1", PRESETS)],
    ids=["far", "empty", "nothing-allowed", "none", "int", "bytes"],
)
def test_nothing_is_suggested_where_nothing_is_close(word: object, allowed: tuple[str, ...]) -> None:
    assert did_you_mean(word, allowed) == ""


def test_allowed_words_may_be_a_one_shot_iterator() -> None:
    assert did_you_mean("float61", iter(("float16",))) == " Did you mean 'float16'?"
