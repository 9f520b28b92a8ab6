"""`Level`: the facts of an optimization level, such as its low dtype. Code that asks for a fact need not know the names
of levels.

Presets files define levels. `read_levels` reads the shipped file, `lists/presets.yaml`, and needs no torch, so commands
and the doctor use it. For a session, the module `presets` reads any presets file, and makes a `Policy` of a level.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PolicyError
from .shipped import shipped_presets
from .yaml_nodes import Node, load_mapping

DEFAULT_LEVEL = "O1"
"""The level of a call that does not name one, as in Apex."""


@dataclass(frozen=True, slots=True)
class Level:
    """The facts of a level.

    Attributes:
        low: the 16-bit dtype, "float16" or "bfloat16"; empty for a level that runs in float32.
        patches_functions: functions of torch are patched to cast their arguments by op lists; weights stay float32.
        has_masters: the optimizer steps on float32 copies of 16-bit weights.
        has_dynamic_scale: the loss scale grows and backs off, and a step with an overflow is skipped.
        lists: the names of the op lists, separated by commas; empty if there are none.
    """

    name: str
    low: str
    patches_functions: bool
    has_masters: bool
    has_dynamic_scale: bool
    lists: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the level runs in float32."""
        return not self.low

    @property
    def keeps_small_updates(self) -> bool:
        """Whether the optimizer steps on float32 weights. 16-bit weights lose updates below their precision."""
        return self.is_plain or self.patches_functions or self.has_masters

    @property
    def fits_autocast(self) -> bool:
        """Whether a script with torch.autocast can run at the level.

        In an autocast region, op lists decide which ops are cast. A level that casts the model casts no op by
        lists, so it does not fit. A float32 level fits, because it casts nothing.
        """
        return self.is_plain or self.patches_functions

    @property
    def needs_loss_scale(self) -> bool:
        """Whether small gradients underflow without a loss scale, because the low dtype has few exponent bits."""
        return self.low == "float16"

    @property
    def fits_whole_script(self) -> bool:
        """Whether a script without amp can run at the level: its ops are cast, and its losses need no scale."""
        return self.patches_functions and not self.needs_loss_scale


def read_levels() -> tuple[Level, ...]:
    """Return the levels that come with the package, in the order of the file."""
    root = load_mapping(shipped_presets(), PolicyError).value
    assert isinstance(root, dict)
    return tuple(_make_level(name, _merge(name, root)) for name in root)


def find_plain_level() -> Level:
    """Return the first level that runs in float32."""
    return next(level for level in read_levels() if level.is_plain)


def find_patching_level(low: str) -> Level:
    """Return the first level that patches functions, so that listed ops run in the dtype `low`."""
    return next(level for level in read_levels() if level.patches_functions and level.low == low)


def find_master_level(low: str) -> Level:
    """Return the first level that casts the model to `low` and keeps float32 master weights."""
    return next(level for level in read_levels() if level.has_masters and level.low == low)


def _merge(name: str, levels: Mapping[str, Node]) -> dict[str, Any]:
    """Return the properties of a level, also the ones from the level that it extends. Numbers and booleans are text."""
    stated = levels[name].value
    assert isinstance(stated, dict)
    properties = {key: node.value for key, node in stated.items()}
    base = properties.pop("extends", None)
    if not isinstance(base, str):
        return properties
    return {**_merge(base, levels), **properties}


def _make_level(name: str, properties: Mapping[str, Any]) -> Level:
    """Return a level of the shipped file, which writes booleans as `true` and `false`, and dtypes by their names."""
    patches_functions = properties["patch_torch_functions"] == "true"
    low = properties["patch_torch_functions_type" if patches_functions else "cast_model_type"]
    if low == "float32":
        low = ""
    lists = ""
    if patches_functions:
        # without the key `lists`, `make_policy` uses the shipped list with the name of the dtype, such as "float16"
        lists = properties.get("lists", low)
    return Level(
        name,
        low=low,
        patches_functions=patches_functions,
        has_masters=properties["master_weights"] == "true",
        has_dynamic_scale=properties["loss_scale"] == "dynamic" or isinstance(properties["loss_scale"], dict),
        lists=lists,
    )
