"""Living beside torch.compile: tables built before the patches go in, and compiled code forgotten when they come or go.

Dynamo guards patched functions but not patched Tensor methods, its rule tables are built from names at first use, and
the on-disk cache keys on graphs that look the same with and without casts. So: build the tables first, forget compiled
code at each change, and tag the cache key.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch


def prime() -> None:
    """Have Dynamo and torch.overrides build their tables of torch functions now, while every name is torch's own."""
    # not at the top: it takes most of a second, and optimizers import it anyway
    import torch._dynamo.trace_rules as trace_rules

    torch.overrides.get_overridable_functions()
    trace_rules.get_torch_obj_rule_map()
    trace_rules.get_tensor_method()


def write_into_graphs(*functions: Callable[..., None]) -> None:
    """Have Dynamo write calls of these functions into its graphs, and nobody remove them for having no result."""
    import torch._dynamo  # as above

    for function in functions:
        torch._dynamo.allow_in_graph(function)
        torch.fx.node.has_side_effect(function)


def forget_compiled_code() -> None:
    """Drop what torch.compile has compiled in this process; it no longer knows which casts are in force."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@contextlib.contextmanager
def cache_key(tag: str) -> Iterator[None]:
    """Make the on-disk compile caches of a patched process differ from those of any other.

    Without `cache_key_tag` in torch, do nothing.
    """
    config = getattr(torch.compiler, "config", None)
    if config is None or not hasattr(config, "cache_key_tag"):
        yield
        return
    before = config.cache_key_tag
    config.cache_key_tag = f"{before}|{tag}"
    try:
        yield
    finally:
        config.cache_key_tag = before
