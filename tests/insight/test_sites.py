"""A module states the role of its code between an op and the script itself, so moving its file changes no report.

Guards: insight/sites.
"""

import sys
import types

import pytest

from amp_patch.insight import sites


@pytest.fixture
def own_modules(monkeypatch):
    """Returns a function that puts modules of the package into sys.modules, with the roles that they name."""

    def put(**roles):
        for name, role in roles.items():
            module = types.ModuleType(name)
            if role is not None:
                module.__role__ = role
            monkeypatch.setitem(sys.modules, f"amp_patch.{name.replace('__', '.')}", module)

    return put


@pytest.mark.parametrize(
    ("roles", "role"),
    [
        ({"wing": "cast", "wing__room": None}, "cast"),
        ({"wing": "cast", "wing__room": "border"}, "border"),
        ({"wing": "cast", "wing__room": ""}, ""),
        ({"wing": None, "wing__room": None}, "amp"),
        ({}, "amp"),
    ],
    ids=["of the package", "of its own", "none of its own", "nobody names one", "not imported"],
)
def test_a_module_has_its_own_role_or_that_of_the_package_around_it(own_modules, roles, role):
    own_modules(**roles)
    assert sites._find_own_role(("wing", "room")) == role


def test_the_roles_of_the_package_are_known_words():
    import amp_patch.apex.optimizers  # noqa: F401

    named = {
        name: vars(module)["__role__"]
        for name, module in sys.modules.items()
        if name.startswith("amp_patch.") and "__role__" in vars(module)
    }
    assert {"amp_patch.casting", "amp_patch.training.model_hooks", "amp_patch.apex.optimizers"} <= named.keys()
    assert set(named.values()) <= {"", "cast", "border", "amp", "optimizer"}


def test_lines_that_name_a_dtype_of_16_bits(tmp_path):
    lines = [
        "x = x.half()",
        "x = x.type(torch.HalfTensor)",
        "x = x.to(torch.bfloat16)",
        "x = halve(x)  # half of it",
        "with torch.autocast('cpu', torch.bfloat16):",
    ]
    script = tmp_path / "train.py"
    script.write_text("\n".join(lines))
    assert sites.find_low_lines(str(script)) == ["train.py:1", "train.py:2", "train.py:3"]
