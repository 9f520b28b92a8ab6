"""Public functions that apply rules (see `config.OpRule`) to the user's own functions, and functions that show the
patches of a session.

Rules cast only float16, bfloat16 and float32 tensors. Tensors of other dtypes stay as they are. An argument may be a
tensor, or a list or tuple with tensors. Tensors in named tuples, dictionaries and other objects are not cast. The body
of a generator or a coroutine runs later, without the rule of its function.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .casting import Registration
from .config import OpRule, op_arguments
from .errors import ArgumentTypeError, ArgumentValueError, did_you_mean
from .session import current as _current

Function = TypeVar("Function", bound=Callable[..., Any])


def half_function(function: Function) -> Function:
    """Decorator: while a session patches functions, cast the function's arguments to the low dtype, and run whitelisted
    and blacklisted ops in its body in the low dtype, too.

    Tensors in lists and tuples are cast, but not tensors in named tuples and dictionaries. Under `amp_patch.apex`, only
    the arguments are cast, as in Apex.

    Examples:
        >>> @amp.half_function
        ... def mix(x, y):
        ...     return x * y
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     mix(torch.ones(2), torch.ones(2)).dtype
        torch.bfloat16
    """
    return _decorate(function, OpRule.WHITELIST)  # type: ignore[no-any-return]


def float_function(function: Function) -> Function:
    """Decorator: while a session patches functions, cast the function's arguments to float32, and run whitelisted and
    blacklisted ops in its body in float32, too.

    Tensors in lists and tuples are cast, but not tensors in named tuples and dictionaries. Under `amp_patch.apex`, only
    the arguments are cast, as in Apex.

    Examples:
        >>> @amp.float_function
        ... def spread(x):
        ...     return (x @ x).exp()
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     spread(torch.ones(2, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return _decorate(function, OpRule.BLACKLIST)  # type: ignore[no-any-return]


def promote_function(function: Function) -> Function:
    """Decorator: while a session patches functions, cast the function's arguments to the widest dtype among them.

    The widest of float16 and bfloat16 is float32. A call with a float64, float8 or complex argument casts nothing.
    Tensors in lists or tuples, and tensors of integers, do not count. If those that count have one dtype, nothing is
    cast.

    Examples:
        >>> @amp.promote_function
        ... def blend(x, y):
        ...     return torch.lerp(x, y, 0.5)
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     blend(torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return _decorate(function, OpRule.PROMOTE)  # type: ignore[no-any-return]


def match_function(like: str) -> Callable[[Function], Function]:
    """Decorator: while a session patches functions, cast a function's arguments to the dtype of one of them.

    Use it for functions that call a kernel whose arguments must have one dtype. Gradients have the dtypes of the
    tensors that were passed. A call casts nothing if the argument `like` is None, or a tensor whose dtype is not
    float16, bfloat16 or float32. For a tensor of integers or bools, it may raise an error instead (see below).

    Args:
        like: the name of the argument.

    Raises ArgumentTypeError if `like` is not text, and OpListError if the function has no argument of this name. A call
    of the function raises OpListError if the argument `like` is neither None nor a tensor. It also raises OpListError
    if this argument is a tensor of integers or bools, and the other tensors have several of the three dtypes.

    Examples:
        >>> @amp.match_function("value")
        ... def attend(query, key, value):
        ...     return query * key * value
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     attend(torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """
    _check_like(like, "match_function")

    def decorate(function: Function) -> Function:
        decorated: Function = _decorate(function, OpRule.MATCH, like)
        op_arguments.find_position(function, like)
        return decorated

    return decorate


# as in `half_function` and `register_half_function`
_NAMES = {OpRule.WHITELIST: "half", OpRule.BLACKLIST: "float", OpRule.PROMOTE: "promote", OpRule.MATCH: "match"}


def _check_like(like: object, function: str) -> None:
    """Raise ArgumentTypeError if the name of an argument is no text. `function` is the name of the called function."""
    if not isinstance(like, str):
        given = getattr(like, "__name__", type(like).__name__)
        raise ArgumentTypeError(f"{function} takes the name of an argument as text, not {given}: write like='value'")


def _decorate(function: Any, rule: OpRule, like: str = "") -> Any:
    """Return a wrapper that runs a function under a rule while a session patches functions, and unchanged otherwise."""
    if isinstance(function, staticmethod):
        return staticmethod(_decorate(function.__func__, rule, like))
    if isinstance(function, classmethod):
        return classmethod(_decorate(function.__func__, rule, like))
    if not callable(function):
        raise ArgumentTypeError(
            f"{_NAMES[rule]}_function decorates a function, not {type(function).__name__}: pass the function itself, or"
            f" its module and name to register_{_NAMES[rule]}_function"
        )
    casts: Any = None
    cast_function = function

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal casts, cast_function
        session = _current.state.session
        if session is None or session.casts is None:
            return function(*args, **kwargs)
        # `cast_function` belongs to one session, so make it anew if there is another session than at the last call
        if casts is not session.casts:
            casts, cast_function = session.casts, session.casts.wrap(rule, function, like)
        return cast_function(*args, **kwargs)

    return wrapper


def register_half_function(module: Any, name: str) -> None:
    """Run `module.name` in the low dtype from the next session on, whatever the op lists say. An `initialize` that adds
    models to the session in force opens no session.

    Has no effect at opt_levels that patch no functions, such as O2.

    Raises ArgumentTypeError if `module` is text, `name` is not, or the attribute is not callable, and
    ArgumentValueError if `module` has no attribute of this name.

    Examples:
        >>> import types
        >>> layers = types.SimpleNamespace(mix=lambda x, y: x + y)
        >>> amp.register_half_function(layers, "mix")
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     layers.mix(torch.ones(2), torch.ones(2)).dtype
        torch.bfloat16
    """
    _register(module, name, OpRule.WHITELIST)


def register_float_function(module: Any, name: str) -> None:
    """Run `module.name` in float32 from the next session on (see `register_half_function`), whatever the op lists say.

    Raises the errors of `register_half_function`.

    Examples:
        >>> import types
        >>> layers = types.SimpleNamespace(mix=lambda x, y: x + y)
        >>> amp.register_float_function(layers, "mix")
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     layers.mix(torch.ones(2).bfloat16(), torch.ones(2).bfloat16()).dtype
        torch.float32
    """
    _register(module, name, OpRule.BLACKLIST)


def register_promote_function(module: Any, name: str) -> None:
    """Run `module.name` in the widest dtype of its arguments from the next session on (see `register_half_function`),
    whatever the op lists say.

    Raises the errors of `register_half_function`.

    Examples:
        >>> import types
        >>> layers = types.SimpleNamespace(mix=lambda x, y: x + y)
        >>> amp.register_promote_function(layers, "mix")
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     layers.mix(torch.ones(2), torch.ones(2).bfloat16()).dtype
        torch.float32
    """
    _register(module, name, OpRule.PROMOTE)


def register_match_function(module: Any, name: str, like: str) -> None:
    """Cast the tensors of `module.name` to the dtype of its argument `like` from the next session on (see
    `register_half_function`), whatever the op lists say.

    Raises the errors of `register_half_function`, ArgumentTypeError if `like` is no text, and OpListError if the
    function has no argument of this name.

    Examples:
        >>> import types
        >>> kernels = types.SimpleNamespace(attend=lambda query, key, value: query * key * value)
        >>> amp.register_match_function(kernels, "attend", like="value")
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     kernels.attend(torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """
    _check_like(like, "register_match_function")
    _register(module, name, OpRule.MATCH, like)


def check_owner(owner: Any, name: Any, function: str) -> None:
    """Raise ArgumentTypeError if `owner` is text, or if `name` is not. `function` is the name of the called function.

    Users often pass both as text, or both as objects.
    """
    if isinstance(owner, str):
        expected, shown_owner = f"the module or class itself, not the text {owner!r}", owner
    elif not isinstance(name, str):
        expected = f"the name of a function as text, not a {type(name).__name__}"
        shown_owner = getattr(owner, "__name__", "torch")
    else:
        return
    shown_name = name if isinstance(name, str) else getattr(name, "__name__", "matmul")
    raise ArgumentTypeError(f"{function} takes {expected}: write {function}({shown_owner}, {shown_name!r})")


def _register(module: Any, name: str, rule: OpRule, like: str = "") -> None:
    """Record a rule for `module.name`, in place of an earlier one. The next session applies it."""
    check_owner(module, name, f"register_{_NAMES[rule]}_function")
    owner = getattr(module, "__name__", module)
    if not hasattr(module, name):
        raise ArgumentValueError(
            f"{owner} has no function {name!r} to register: name a function in it.{did_you_mean(name, dir(module))}"
        )
    if not callable(getattr(module, name)):
        raise ArgumentTypeError(f"{owner}.{name} is not callable, so it cannot be registered: name a function")
    if rule is OpRule.MATCH:
        op_arguments.find_position(getattr(module, name), like)
    registered = _current.state.registered
    registered[:] = [entry for entry in registered if not (entry.owner is module and entry.name == name)]
    registered.append(Registration(module, name, rule, like))


def is_patched(owner: Any, name: str) -> bool:
    """Return whether `owner.name`, such as `(torch, "matmul")`, is patched now.

    Raises ArgumentTypeError if `owner` is text, or if `name` is not.

    Examples:
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     amp.is_patched(torch, "matmul"), amp.is_patched(torch, "relu")
        (True, False)
    """
    check_owner(owner, name, "is_patched")
    session = _current.state.session
    return session is not None and session.patcher.is_patched(owner, name)


def get_original(owner: Any, name: str) -> Any:
    """Return `owner.name` as it is without the patches of a session.

    Raises ArgumentTypeError if `owner` is text or `name` is not, and ArgumentValueError if `owner` has no such name.

    Examples:
        >>> original = torch.matmul
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     torch.matmul is original, amp.get_original(torch, "matmul") is original
        (False, True)
    """
    check_owner(owner, name, "get_original")
    session = _current.state.session
    original = None if session is None else session.patcher.get_original(owner, name)
    if original is None and not hasattr(owner, name):
        hint = did_you_mean(name, dir(owner))
        raise ArgumentValueError(f"{getattr(owner, '__name__', owner)} has no {name!r}: name a function in it.{hint}")
    if isinstance(original, (staticmethod, classmethod)):
        return original.__get__(None, owner)  # as `owner.name` reads it
    return getattr(owner, name) if original is None else original
