"""Every error is an `AmpError` and also the builtin that a caller would catch.

Guards: errors.
"""

import copy
import inspect
import pickle
from pathlib import Path

import pytest

import amp_patch as amp
from amp_patch import errors
from amp_patch.errors import AmpError

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


def test_an_error_is_caught_as_amp_error_and_as_its_builtin() -> None:
    for error, builtin in BUILTINS.items():
        for caught_as in (AmpError, builtin, RuntimeError):
            with pytest.raises(caught_as, match=r"^the message$") as raised:
                raise error("the message")
            assert type(raised.value) is error


def test_the_table_above_holds_every_error_of_the_module() -> None:
    defined = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, AmpError)}
    assert defined == {AmpError, *BUILTINS}


def test_an_error_is_public_and_documented() -> None:
    for error in [AmpError, *BUILTINS]:
        assert getattr(amp, error.__name__) is error
        assert error.__name__ in amp.__all__
        assert error.__doc__


def test_an_error_of_a_file_tells_its_place_and_keeps_it_when_it_is_pickled() -> None:
    for error in [errors.OpListError, errors.PolicyError]:
        for raised in (error("no such key", Path("a:b.yaml"), 3, 7), error("no such list")):
            again = pickle.loads(pickle.dumps(raised))
            for one in (raised, again, copy.copy(raised)):
                place = (one.path, one.line, one.column)
                if one.path is None:
                    assert (str(one), place) == ("no such list", (None, None, None))
                else:
                    assert (str(one), place) == ("a:b.yaml:3:7: no such key", ("a:b.yaml", 3, 7))
