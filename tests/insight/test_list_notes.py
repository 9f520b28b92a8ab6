"""`explain` counts the casts back after norms on q and k, and the line that it gives avoids them. It says which rule of
autocast another torch has for an op that ran.

Guards: insight/list_notes, config/explain.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_state import VERSION

import amp_patch as amp
from amp_patch import insight


class Attention(nn.Module):
    """Attention with norms on q and k, which may be rotated by a float32 table in between."""

    def __init__(self, *, is_rotary: bool = False) -> None:
        super().__init__()
        self.project, self.norm_q, self.norm_k = nn.Linear(8, 24), nn.RMSNorm(8), nn.RMSNorm(8)
        self.is_rotary = is_rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        q, k = self.norm_q(q) * 0.5, self.norm_k(k)
        if self.is_rotary:
            table = torch.linspace(0, 1, 8).cos()
            q, k = q * table, k * table
        return F.scaled_dot_product_attention(q, k, v)


def explain(model: nn.Module, lists: list[str], level: str = "O4") -> tuple[str, int]:
    """The text about a step, and the number of casts that undo casts of the norms."""
    torch.manual_seed(0)
    amp.initialize(model, opt_level=level, lists=lists, verbosity=0)
    with insight.recording() as recording:
        model(torch.randn(1, 1, 3, 8)).sum().backward()
    undone = sum(cast.calls for cast in recording.undone if cast.producer == "F.rms_norm")
    return insight.format_recording(recording), undone


LINES = {"fast": None, "written": "whitelist: [rms_norm]"}


@pytest.mark.parametrize("line", LINES.values(), ids=list(LINES))
@pytest.mark.parametrize(("level", "lists"), [("O4", "bfloat16"), ("O1", "float16"), ("O4", "autocast-cuda")])
def test_casts_back_after_norms_are_counted_and_avoided(
    tmp_path: Path, level: str, lists: str, line: str | None
) -> None:
    if VERSION < (2, 13):
        pytest.skip("the list fast leaves rms_norm of this torch alone")
    text, undone = explain(Attention(), [lists], level)
    low = "bf16" if level == "O4" else "f16"
    assert (
        f"rms_norm computes in float32 inside: lists=['{lists}', 'fast'], or `whitelist: [rms_norm]` in a list, keeps"
        f" the results in {low} and avoids 2 casts back"
    ) in text
    amp.reset()
    overlay = "fast"
    if line is not None:
        overlay = str(tmp_path / "line.yaml")
        Path(overlay).write_text(line)
    text, left = explain(Attention(), [lists, overlay], level)
    assert "computes in float32 inside" not in text
    assert (undone, left) == (2, 0)


def test_a_table_in_float32_makes_the_casts_back_necessary() -> None:
    text, undone = explain(Attention(is_rotary=True), ["bfloat16"])
    assert undone == 0 and "computes in float32 inside" not in text


@pytest.mark.parametrize(("lists", "is_told"), [("autocast-cuda", True), ("bfloat16", False), ("autocast-cpu", False)])
def test_a_rule_that_a_version_of_torch_changed_is_told_once(lists: str, is_told: bool) -> None:
    is_told = is_told and VERSION >= (2, 12)  # before, rms_norm is on no list of autocast
    text, _ = explain(Attention(), [lists])
    told = [line for line in text.splitlines() if line.startswith("torch 2.12 changed")]
    assert (
        told
        == [
            "torch 2.12 changed what its autocast does to rms_norm on cuda: unlisted -> blacklist (amp-patch lists diff"
            " autocast-cuda@2.11 autocast-cuda@2.12)"
        ]
        * is_told
    )


def test_entries_of_own_lists_that_no_call_met_are_named(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("extends: bfloat16\nblacklist: [softmax, silu]\nneutral: [rms_norm, exp]\n")
    text, _ = explain(Attention(), [str(own)])
    assert text.endswith("\nno recorded call of: softmax (own.yaml:2), silu (own.yaml:2)")
    text, _ = explain(Attention(), ["bfloat16"])
    assert "no recorded call" not in text
