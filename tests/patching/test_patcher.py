"""`Patcher` installs all patches or none, and leaves no trace, whatever other code does to the same names in between.

Guards: patching/patcher, patching/slots.
"""

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import wrapt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from amp_patch.patching.patcher import Patch, Patcher

ABSENT = object()


def triple(value: int) -> int:
    """Three times the value."""
    return 3 * value


class Base:
    def double(self, value: int) -> int:
        """Twice the value."""
        return 2 * value


class Child(Base):
    def negate(self, value: int) -> int:
        return -value


def plus_100(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) + 100

    return wrapper


def failing(_: Callable[..., Any]) -> Callable[..., Any]:
    raise ZeroDivisionError("a factory that fails")


def make_module(name: str = "a_module") -> types.ModuleType:
    module = types.ModuleType(name)
    module.triple = triple  # type: ignore[attr-defined]
    return module


def make_serving_module() -> types.ModuleType:
    """A module that serves `triple` through `__getattr__`, as torch.nn.quantized and lazily loaded packages do."""
    module = types.ModuleType("serving")

    def serve(name: str) -> Any:
        if name == "triple":
            return triple
        raise AttributeError(name)

    module.__getattr__ = serve  # type: ignore[method-assign]
    return module


def make_classes() -> tuple[type, type]:
    """Fresh copies, so that no test can leave anything in another's class."""
    base = type("FreshBase", (), {"double": Base.__dict__["double"]})
    return base, type("FreshChild", (base,), {"negate": Child.__dict__["negate"]})


def held(owner: Any, name: str) -> Any:
    """What the owner itself holds under that name; ABSENT if it only inherits or serves it."""
    return vars(owner).get(name, ABSENT)


def call(owner: Any, name: str, value: int) -> int:
    return getattr(owner() if isinstance(owner, type) else owner, name)(value)


def targets() -> dict[str, tuple[Any, str]]:
    base, child = make_classes()
    return {
        "module": (make_module(), "triple"),
        "module-with-getattr": (make_serving_module(), "triple"),
        "class": (base, "double"),
        "class-that-inherits": (child, "double"),
    }


@pytest.fixture(params=list(targets()))
def target(request: pytest.FixtureRequest) -> tuple[Any, str]:
    return targets()[request.param]


# ---- one patch -------------------------------------------------------------------------------------------------------


def test_the_replacement_is_a_plain_function_with_the_original_s_name_and_docstring(target: tuple[Any, str]) -> None:
    owner, name = target
    original = getattr(owner, name)
    patcher = Patcher()
    patcher.install([Patch(owner, name, plus_100)])
    replacement = held(owner, name)
    assert type(replacement) is types.FunctionType
    assert (replacement.__name__, replacement.__doc__) == (original.__name__, original.__doc__)
    assert replacement.__wrapped__ is original


def test_factories_see_every_name_as_it_was_before_the_first_patch_of_the_call() -> None:
    base, child = make_classes()
    seen: list[Any] = []

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        seen.append(original)
        return plus_100(original)

    double = held(base, "double")
    patcher = Patcher()
    patcher.install([Patch(base, "double", looking), Patch(child, "double", looking)])
    assert seen == [double, double]
    assert child().double(1) == 102


# ---- others patch the same name --------------------------------------------------------------------------------------


def plain_closure(original: Callable[..., Any]) -> Callable[..., Any]:
    def theirs(*args: Any) -> Any:
        return original(*args) + 1000

    return theirs


def wraps_closure(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(original)(plain_closure(original))


@pytest.mark.parametrize(
    ("foreign", "is_stuck"),
    [(wraps_closure, True), (plain_closure, False), (lambda _: triple, False), (lambda _: ABSENT, False)],
    ids=["on top", "on top, and nothing says so", "restored", "deleted"],
)
def test_what_others_made_of_the_name_stays_and_a_stuck_patch_is_reported_once(
    foreign: Callable[[Any], Any], is_stuck: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module, patcher = make_module("torch_like"), Patcher()
    patcher.install([Patch(module, "triple", plus_100)])
    theirs = foreign(held(module, "triple"))
    if theirs is ABSENT:
        del module.triple  # type: ignore[attr-defined]
    else:
        module.triple = theirs  # type: ignore[attr-defined]
    with caplog.at_level(logging.DEBUG, logger="amp_patch"):
        patcher.undo()
        patcher.undo()
    assert held(module, "triple") is theirs
    assert not patcher.is_patched(module, "triple")
    assert ["torch_like.triple" in message for message in caplog.messages] == [True] * is_stuck


def test_undo_restores_what_was_there_before_the_first_patch() -> None:
    module, patcher = make_module(), Patcher()
    module.triple = theirs = wraps_closure(module.triple)  # type: ignore[attr-defined]
    for _ in range(2):
        patcher.install([Patch(module, "triple", plus_100)])
    assert module.triple(1) == 1203
    assert patcher.get_original(module, "triple") is theirs
    patcher.undo()
    assert held(module, "triple") is theirs


def test_a_wrapt_proxy_on_top_stays_while_ours_goes_from_under_it(target: tuple[Any, str]) -> None:
    owner, name = target
    before, plain = held(owner, name), call(owner, name, 7)

    def add_1000(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **kwargs) + 1000

    patcher = Patcher()
    patcher.install([Patch(owner, name, plus_100)])
    proxy = wrapt.wrap_function_wrapper(owner, name, add_1000)
    assert call(owner, name, 7) == plain + 1100
    patcher.undo()
    assert held(owner, name) is proxy
    assert call(owner, name, 7) == plain + 1000
    wrapt.unwrap_object(owner, name, proxy)
    assert call(owner, name, 7) == plain
    if before is not ABSENT:
        assert held(owner, name) is before


# ---- covers ----------------------------------------------------------------------------------------------------------


def plus_10000(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: replacement(*args) + 10000


def test_a_cover_acts_until_it_is_taken_off(target: tuple[Any, str]) -> None:
    owner, name = target
    before, plain = held(owner, name), call(owner, name, 7)
    patcher = Patcher()
    patcher.install([Patch(owner, name, plus_100)])
    replacement = held(owner, name)
    for _ in range(2):
        patcher.cover(plus_10000)
        assert call(owner, name, 7) == plain + 10100  # once, however often it is covered
        assert held(owner, name).__wrapped__ is replacement
        with patcher.suspended():
            assert held(owner, name) is before
    for _ in range(2):
        patcher.uncover()
        assert held(owner, name) is replacement
    patcher.cover(plus_10000)
    patcher.undo()
    assert held(owner, name) is before


def test_covers_that_cannot_be_made_leave_none() -> None:
    module, base = make_module(), make_classes()[0]
    patcher = Patcher()
    patcher.install([Patch(module, "triple", plus_100), Patch(base, "double", plus_100)])
    replacements = held(module, "triple"), held(base, "double")

    def fail_late(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        return failing(replacement) if owner is base else plus_10000(owner, name, replacement)

    with pytest.raises(ZeroDivisionError):
        patcher.cover(fail_late)
    assert (held(module, "triple"), held(base, "double")) == replacements
    theirs = module.triple = wraps_closure(module.triple)  # type: ignore[attr-defined]
    patcher.cover(lambda owner, name, replacement: None if owner is base else plus_10000(owner, name, replacement))
    assert (held(module, "triple"), held(base, "double")) == (theirs, replacements[1])  # below theirs, and left alone


# ---- any sequence ----------------------------------------------------------------------------------------------------


class Interrupting(type):
    """A metaclass whose classes may raise while an attribute is set: before it is in, or after."""

    raise_before = raise_after = ""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == Interrupting.raise_before:
            Interrupting.raise_before = ""
            raise KeyboardInterrupt
        super().__setattr__(name, value)
        if name == Interrupting.raise_after:
            Interrupting.raise_after = ""
            raise KeyboardInterrupt


class PatcherMachine(RuleBasedStateMachine):
    """Two patchers and a stranger work on the same names in any order. A name that the stranger never covered while
    ours was below must end up the identical object (or absent), and at every moment a call through any name gives the
    original answer plus what is on it.
    """

    @initialize()
    def start(self) -> None:
        Interrupting.raise_before = Interrupting.raise_after = ""
        base = Interrupting("MachineBase", (), {"double": Base.__dict__["double"], "negate": Child.__dict__["negate"]})
        child = Interrupting("MachineChild", (base,), {})
        self.names: list[tuple[Any, str]] = [
            (make_module(), "triple"),
            (make_serving_module(), "triple"),
            (base, "double"),
            (base, "negate"),
            (child, "double"),
        ]
        self.before = [held(owner, name) for owner, name in self.names]
        self.plain = [call(owner, name, 7) for owner, name in self.names]
        self.patcher = Patcher()
        self.installed: list[int] = []
        self.foreign: dict[int, tuple[Any, Any]] = {}  # what the stranger put on top, and what was there before

    def free(self, indexes: list[int]) -> list[int]:
        return [index for index in dict.fromkeys(indexes) if index not in self.foreign]

    @rule(indexes=st.lists(st.integers(0, 4), min_size=1, max_size=5))
    def install(self, indexes: list[int]) -> None:
        chosen = self.free(indexes)
        self.patcher.install([Patch(*self.names[index], plus_100) for index in chosen])
        self.installed += chosen

    @rule(indexes=st.lists(st.integers(0, 4), max_size=4))
    def install_with_a_factory_that_fails(self, indexes: list[int]) -> None:
        patches = [Patch(*self.names[index], plus_100) for index in self.free(indexes)]
        with pytest.raises(ZeroDivisionError):
            self.patcher.install([*patches, Patch(*self.names[0], failing)])

    @rule(
        indexes=st.lists(st.integers(0, 4), max_size=4),
        interrupted=st.integers(2, 4),
        when=st.sampled_from(["raise_before", "raise_after"]),
    )
    def install_with_an_interrupt(self, indexes: list[int], interrupted: int, when: str) -> None:
        if interrupted in self.foreign:
            return
        name = self.names[interrupted][1]
        chosen = [index for index in self.free(indexes) if self.names[index][1] != name]
        setattr(Interrupting, when, name)
        with pytest.raises(KeyboardInterrupt):
            self.patcher.install(Patch(*self.names[index], plus_100) for index in [*chosen, interrupted])

    @rule(index=st.integers(0, 4))
    def stranger_patches(self, index: int) -> None:
        if index not in self.foreign:
            owner, name = self.names[index]
            below = held(owner, name)
            theirs = wraps_closure(getattr(owner, name))
            self.foreign[index] = (theirs, below)
            setattr(owner, name, theirs)

    @rule(index=st.integers(0, 4))
    def stranger_unpatches(self, index: int) -> None:
        if index in self.foreign:
            owner, name = self.names[index]
            below = self.foreign.pop(index)[1]
            delattr(owner, name) if below is ABSENT else setattr(owner, name, below)

    @rule()
    def undo(self) -> None:
        covered = [index for index in self.foreign if index in self.installed]
        self.patcher.undo()
        assert len(self.patcher) == 0
        for index in covered:  # left in place, as the contract says; the stranger now takes both off
            owner, name = self.names[index]
            assert held(owner, name) is self.foreign.pop(index)[0]
            delattr(owner, name) if self.before[index] is ABSENT else setattr(owner, name, self.before[index])
        self.installed.clear()
        for index, (owner, name) in enumerate(self.names):
            assert held(owner, name) is (self.foreign[index][0] if index in self.foreign else self.before[index])

    @invariant()
    def calls_give_what_is_on_them(self) -> None:
        if not hasattr(self, "names"):
            return
        for index, (owner, name) in enumerate(self.names):
            if index == 4 and self.before[4] is held(owner, name):
                continue  # inherits whatever the parent has
            if index == 4:
                assert call(owner, name, 7) >= self.plain[index] + 100
            else:
                assert call(owner, name, 7) == self.plain[index] + 100 * self.installed.count(index) + 1000 * (
                    index in self.foreign
                )
            assert self.patcher.is_patched(owner, name) is (index in self.installed)

    def teardown(self) -> None:
        if hasattr(self, "names"):
            for index in list(self.foreign):
                self.stranger_unpatches(index)
            self.undo()


PatcherMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestPatcherMachine = PatcherMachine.TestCase
