"""Plans the patches that make ops cast their arguments. A patch replaces one attribute, such as `torch.exp`.

`plan_ops` plans the patches of listed ops, one for each *spelling* (`torch.exp`, `Tensor.exp`, ...), and of functions
that the user registered. `DeferredOps` patches ops whose package is imported later. The functions at the end make
replacements of torch's functions that run, record or compile ops, such as checkpoints and tracers.

A *region* is a part of a thread's run in which one `Mode` says how patched ops cast. In the mode OFF, no op casts.
"""

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..config import OpLists, OpRule, op_lists
from ..dtypes import CASTABLE
from ..errors import OpListError
from ..patching import ImportWatch, Patch, Patcher, references
from ..reporting import logger, warn
from ..torch_dispatch import FLEX_ATTENTION, FLEX_CALLS
from ..torch_private import C_NN, find_cast_inputs, get_first_weight
from .autocast import ModuleRulesSwitch
from .compiling import is_dynamo_compiling
from .mode import Mode, Switch
from .replacement import OpFunction, run_in_region
from .tensor_cast import cast_tree, make_plain_cast
from .weight_cache import WeightCache
from .wrappers import OpCasts


class Registration(NamedTuple):
    """A function that the user registered: `getattr(owner, name)`.

    Attributes:
        rule: the name of its rule.
        like: for the rule that casts all arguments to the dtype of one of them: the name of that argument.
    """

    owner: Any
    name: str
    rule: str
    like: str = ""


def plan_ops(oplists: OpLists, registered: Sequence[Registration], casts: OpCasts) -> Iterator[Patch]:
    """Yield a patch for each listed spelling, and for each registration whose rule is not neutral.

    A registration overrides the lists. `OpCasts.choose` may decide that a listed spelling needs no patch.

    In a session that casts inside torch.autocast blocks, torch would also cast ops that the session's lists do not
    name. Each of these gets a patch that keeps torch from casting it.
    """
    decided = {(id(known.owner), known.name) for known in registered}  # the lists do not apply to these
    for spelling in oplists.spellings:
        chosen = casts.choose(spelling.entry)
        if chosen is not None and (id(spelling.owner), spelling.name) not in decided:
            yield plan_spelling(spelling, spelling.owner, chosen)
    for known in registered:
        if known.rule != OpRule.NEUTRAL:  # registered as neutral, a function casts nothing: it needs no patch
            yield plan_op(known.owner, known.name, known.rule, casts, like=known.like)
    if casts.autocast is not None and casts.autocast.torch_lists is not None:
        decided.update((id(spelling.owner), spelling.name) for spelling in oplists.spellings)
        for spelling in casts.autocast.torch_lists.spellings:
            if (id(spelling.owner), spelling.name) not in decided:
                yield plan_op(spelling.owner, spelling.name, OpRule.NEUTRAL, casts, "on no list")


# (a module whose functions are patched, a second module that holds some of the same functions)
_SECOND_PLACES = ((torch.nn.functional, C_NN), (torch, torch.functional))


def with_second_places(planned: Iterable[Patch]) -> Iterator[Patch]:
    """Yield each patch, and behind it the patches that it entails.

    A function of `torch.nn.functional` or `torch` is also patched in the second module that holds it, because torch.fx
    and nested tensors look it up there. A patch of flex_attention entails patches of the functions that it calls.
    """
    for patch in planned:
        yield patch
        if (getattr(patch.owner, "__name__", ""), patch.name) == (FLEX_ATTENTION, "flex_attention"):
            for name in FLEX_CALLS:
                yield Patch(patch.owner, name, functools.partial(_replace_call, patch=patch))
        for owner, second in _SECOND_PLACES:
            if patch.owner is not owner or patch.name not in vars(second):
                continue
            if vars(owner).get(patch.name) is vars(second)[patch.name]:
                yield Patch(second, patch.name, patch.factory, patch.note)


def _replace_call(original: Callable[..., Any], patch: Patch) -> OpFunction:
    """Return the replacement of a function that flex_attention calls. It applies the rule of flex_attention's `patch`.

    Scripts often call `torch.compile(flex_attention)` before `initialize`. The compiled function does not run the patch
    of flex_attention. But it looks up by name the functions that flex_attention calls.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    call.__module__ = FLEX_ATTENTION  # a function of torch
    # for the rule `match`, which may name query, key or value: the first arguments of all these functions
    call.__signature__ = inspect.signature(getattr(patch.owner, patch.name))  # type: ignore[attr-defined]
    return patch.factory(call)


def plan_spelling(spelling: op_lists.Spelling, owner: Any, casts: OpCasts) -> Patch:
    """Return the patch that makes a listed op, `spelling.name` of `owner`, follow its rule."""
    entry = spelling.entry
    return plan_op(owner, spelling.name, spelling.rule, casts, entry.location, entry.like)


def plan_op(owner: Any, name: str, rule: str, casts: OpCasts, location: str = "", like: str = "") -> Patch:
    """Return the patch that makes `owner.name` follow a rule.

    Args:
        location: where a list file states the rule; "on no list" if none does; "" for the rule of a registration.
        like: the argument that the rule names, as in `Registration`; "" for other rules.
    """
    described = op_lists.RULES[rule].describe(like)
    note = f"Patched by amp_patch until amp_patch.reset(): {described}, {location or 'registered'}."
    return Patch(owner, name, lambda original: casts.wrap(rule, original, like, location), note)


class DeferredOps:
    """The listed ops of one session whose packages are not imported yet.

    From `open` to `close`, it patches each op when the op's package is imported.

    Args:
        oplists: the lists of the session.
        overridden: owner and name of the functions that the user registered; the lists do not apply to them.
        casts: makes the replacements.
        patcher: installs the patches.
        lock: held while ops are patched, because imports happen in any thread.
    """

    def __init__(
        self,
        oplists: OpLists,
        overridden: Iterable[tuple[Any, str]],
        casts: OpCasts,
        patcher: Patcher,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._spellings = list(oplists.deferred)
        self._overridden = {(id(owner), name) for owner, name in overridden}
        self._casts = casts
        self._patcher = patcher
        self._lock = lock
        self._process_id = os.getpid()
        self._watch = ImportWatch(self.patch_module)

    def __len__(self) -> int:
        return len(self._spellings)

    def open(self) -> None:
        """Watch for imports of the packages. Warn of listed functions that the script itself does not define yet."""
        for spelling in tuple(self._spellings):
            if spelling.owner_name == "__main__":
                location, name = spelling.entry.location, spelling.name
                warn(
                    f"{location}: the script has no function {name!r} yet, so the entry has no effect until amp.reset()"
                )
            path = spelling.owner_name.split(".")
            self._watch.watch(".".join(path[:length]) for length in range(1, len(path) + 1))

    def close(self) -> None:
        """Stop patching. A second call does nothing."""
        self._watch.close()
        with self._lock:
            self._spellings.clear()

    def patch_module(self, module_name: str) -> None:
        """Patch the deferred ops of a module that was just imported, and of the modules and classes in it.

        Runs inside the user's import. So an op that does not exist or cannot be patched causes a warning, and no error.
        """
        if os.getpid() != self._process_id:
            return  # a fork ends the session, so nothing is patched in the child
        functions: dict[int, Callable[..., Any]] = {}
        problems: list[tuple[op_lists.Spelling, str]] = []
        with self._lock:
            candidates: list[op_lists.Spelling] = []
            for spelling in self._spellings:
                if f"{spelling.owner_name}.".startswith(f"{module_name}."):
                    candidates.append(spelling)
            for spelling in candidates:
                try:
                    owner = op_lists.find_owner(spelling)
                    if owner is None:
                        continue  # a submodule that is imported later may define it
                    functions |= self._patch(spelling, owner)
                except OpListError as exc:
                    problems.append((spelling, str(exc)))
                except Exception as exc:
                    at = f"{spelling.entry.location}: {spelling.entry.op!r}"
                    problems.append((spelling, f"{at} cannot be patched ({type(exc).__name__}: {exc})"))
                self._spellings.remove(spelling)
            unreplaced = references.redirect([(self._patcher, functions)], ())
            if unreplaced:
                problems.append((candidates[0], references.describe_unreplaced(unreplaced)))
        for spelling, message in problems:  # after the lock is released: showing a warning may import modules
            try:
                warnings.warn_explicit(message, UserWarning, spelling.entry.path, spelling.entry.line)
            except UserWarning:  # the user turns warnings into errors, but this must not stop the import
                logger.warning("%s", message)

    def _patch(self, spelling: op_lists.Spelling, owner: Any) -> dict[int, Callable[..., Any]]:
        """Patch an op. Return {id of the original: its replacement}; empty if the op needs no patch."""
        name, casts = spelling.name, self._casts.choose(spelling.entry)
        if casts is None or (id(owner), name) in self._overridden:
            return {}
        held = vars(owner).get(name)
        for original, replacement in self._patcher.functions():
            if replacement is held:
                # The module has imported an already patched function under this name. Put the original in its place
                # first, because `install` would wrap the replacement a second time.
                setattr(owner, name, original)
        self._patcher.install(with_second_places([plan_spelling(spelling, owner, casts)]))
        return {id(self._patcher.get_original(owner, name)): vars(owner)[name]}


# ---- torch's functions around ops ------------------------------------------------------------------------------------


def replay_regions(original: Callable[..., Any], switch: Switch | ModuleRulesSwitch) -> Callable[..., Any]:
    """Return a checkpoint function that recomputes in the mode of the forward pass, in whatever region backward runs.

    `original` is torch's function, such as `torch.utils.checkpoint.checkpoint`.
    """

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The first run of `replayed` is the forward, and stores its mode. Reading the mode before `original` runs could
        # be too early, because `original` may first enter the region that `native/whole_script.py` puts around a whole
        # script. Dynamo cannot trace a `replayed` that stores something, so under Dynamo the mode is read here.
        modes = [switch.mode_here()] if is_dynamo_compiling() else []

        def replayed(*inner_args: Any, **inner_kwargs: Any) -> Any:
            if not modes:
                modes.append(switch.mode_here())
            if switch.mode_here() is modes[0]:
                return function(*inner_args, **inner_kwargs)
            with switch.region(modes[0]):
                return function(*inner_args, **inner_kwargs)

        return original(replayed, *args, **kwargs)

    return checkpoint


def run_without_casts(original: OpFunction, switch: Switch | ModuleRulesSwitch) -> OpFunction:
    """Return a replacement that runs `original` without casts.

    It is for functions that torch implements in Python by several ops, but that count as one op.
    """
    return run_in_region(original, Mode.OFF, switch)


def plan_custom_functions(casts: OpCasts) -> Iterator[Patch]:
    """Yield patches for autograd functions and modules whose `forward` is decorated with
    `torch.amp.custom_fwd(cast_inputs=...)` for the device type of the session.

    As under torch.autocast, their inputs are cast to `cast_inputs`, and their bodies run without casts. Patches of the
    decorators `custom_fwd` and `custom_bwd` do the same for functions that are decorated during the session.
    """
    yield Patch(torch.amp, "custom_fwd", lambda original: _decorate_forward(original, casts))
    yield Patch(torch.amp, "custom_bwd", lambda original: _decorate_backward(original, casts.switch))
    waiting: list[Any] = [torch.autograd.Function, torch.nn.Module]
    seen: set[int] = set()
    patched: set[tuple[int, str]] = set()
    while waiting:
        kind = waiting.pop()
        if id(kind) in seen:
            continue
        seen.add(id(kind))
        waiting += kind.__subclasses__()
        if issubclass(kind, torch.nn.Module):
            forward_owner = kind if "forward" in vars(kind) else None
            backward_owner = None
        else:
            forward_owner = _find_static(kind, "forward")
            backward_owner = _find_static(kind, "backward")
        forward = None if forward_owner is None else vars(forward_owner)["forward"]
        requested = find_cast_inputs(getattr(forward, "__func__", forward))
        if requested is None or requested[0] != casts.device_type:
            continue
        if (id(forward_owner), "forward") not in patched:
            yield Patch(
                forward_owner, "forward", functools.partial(_cast_as_decorated, casts=casts, dtype=requested[1])
            )
        if backward_owner is not None and (id(backward_owner), "backward") not in patched:
            yield Patch(backward_owner, "backward", lambda original: _run_as_forward(original, casts.switch))
        patched |= {(id(forward_owner), "forward"), (id(backward_owner), "backward")}


def _find_static(kind: type, name: str) -> type | None:
    """Return the first class of `kind.__mro__` that defines `name`.

    Return None if that is torch.autograd.Function itself, if the definition is no static method, or if there is none.
    """
    for owner in kind.__mro__:
        if name in vars(owner):
            is_static = isinstance(vars(owner)[name], staticmethod)
            return owner if is_static and owner is not torch.autograd.Function else None
    return None


def _decorate_forward(original: Callable[..., Any], casts: OpCasts) -> Callable[..., Any]:
    """Return a `custom_fwd` for functions that are decorated during the session.

    After the session, the decorated functions cast as torch's `custom_fwd` does.
    """

    def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
        def decorate(fwd: Any) -> Any:
            decorated = original(fwd, device_type=device_type, cast_inputs=cast_inputs)
            if cast_inputs is None or device_type != casts.device_type:
                return decorated
            return functools.update_wrapper(_cast_as_decorated(decorated, casts, cast_inputs), decorated)

        return decorate if fwd is None else decorate(fwd)

    return custom_fwd


def _decorate_backward(original: Callable[..., Any], switch: Switch | ModuleRulesSwitch) -> Callable[..., Any]:
    """Return a `custom_bwd` for functions that are decorated during the session."""

    def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
        def decorate(bwd: Any) -> Any:
            decorated = original(bwd, device_type=device_type)
            return functools.update_wrapper(_run_as_forward(decorated, switch), decorated)

        return decorate if bwd is None else decorate(bwd)

    return custom_bwd


def _cast_as_decorated(original: OpFunction, casts: OpCasts, dtype: torch.dtype) -> OpFunction:
    """Return a `forward` that casts its inputs to `dtype`, and runs `original` without casts.

    While the mode is OFF or FLOAT32, it only calls `original`.
    """
    switch, cast = casts.switch, make_plain_cast(dtype, casts.device_type)
    in_region = run_in_region(original, Mode.OFF, switch)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # as in torch, where custom_fwd casts nothing while autocast is disabled
        if switch.mode_here() in (Mode.OFF, Mode.FLOAT32):
            return original(*args, **kwargs)
        result = in_region(*[cast_tree(value, cast) for value in args], **cast_tree(kwargs, cast))
        if args and isinstance(args[0], torch.autograd.function.FunctionCtx):
            vars(args[0])["ran_without_amp"] = True
        return result

    return forward


def _run_as_forward(original: OpFunction, switch: Switch | ModuleRulesSwitch) -> OpFunction:
    """Return a `backward` that runs without casts if `_cast_as_decorated` ran its forward without casts."""
    in_region = run_in_region(original, Mode.OFF, switch)

    def backward(ctx: Any, *gradients: Any) -> Any:
        run = in_region if getattr(ctx, "ran_without_amp", False) else original
        return run(ctx, *gradients)

    return backward


def check_shapes_only(original: Callable[..., Any], casts: OpCasts) -> Callable[..., Any]:
    """Return a `check_input` of recurrent layers that, while ops cast, accepts an input in another castable dtype than
    the weights.

    Such an input is no error, because a listed op casts both later. The shapes are checked as before.
    """

    def check_input(module: torch.nn.RNNBase, input: torch.Tensor, batch_sizes: torch.Tensor | None) -> None:
        weight = get_first_weight(module)
        if weight is not None and {input.dtype, weight.dtype} <= CASTABLE and casts.switch.is_on_here():
            # torch checks an empty tensor with the same shape and the expected dtype
            input = torch.empty_like(input, dtype=weight.dtype, device="meta")
        original(module, input, batch_sizes)

    return check_input


def read_originals(original: Callable[..., Any], patcher: Patcher) -> Callable[..., Any]:
    """Return a `torch.jit.script` that runs without patches.

    It compiles the functions that it finds under torch's names, and it cannot compile their replacements.
    """

    def script(*args: Any, **kwargs: Any) -> Any:
        with patcher.suspended():
            return original(*args, **kwargs)

    return script


def trace_without_cache(original: Callable[..., Any], cache: WeightCache) -> Callable[..., Any]:
    """Return a tracer that runs without the weight cache: a tracer would record a cached copy as a constant."""

    def trace(*args: Any, **kwargs: Any) -> Any:
        with cache.bypassed():
            return original(*args, **kwargs)

    return trace


def invalidate_too(original: Callable[..., Any], cache: WeightCache) -> Callable[..., Any]:
    """Return a `torch.clear_autocast_cache` that also drops the copies in `cache`."""

    def clear_autocast_cache() -> None:
        original()
        cache.invalidate_all()

    return clear_autocast_cache
