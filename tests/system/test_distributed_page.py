"""Every code block of the page on distributed training runs as it stands, on two ranks, without a warning of amp_patch.

Guards: docs/distributed.md.
"""

import re
import warnings
from pathlib import Path

import pytest
from ranks import RUNS_FSDP2

import amp_patch as amp

pytestmark = pytest.mark.xdist_group("ranks")  # one pair for all

PAGE = (Path(__file__).parent.parent.parent / "docs" / "distributed.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def run(rank, code):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = {"__name__": "__main__"}
        exec(compile(code, "distributed.md", "exec"), names)
    steps = amp.stats().steps + amp.stats().steps_skipped  # at 2**16 the first may overflow
    names.clear()
    amp.reset()
    return steps, [str(one.message) for one in caught if "amp" in str(one.message)]


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_blocks_run_on_every_rank(ranks, code):
    if "fully_shard" in code and not RUNS_FSDP2:
        pytest.skip("fully_shard of torch 2.6 does not run on a CPU")
    first, second = ranks(run, code)
    assert first == second == ((2 if "no_sync" in code else 0 if "dcp" in code else 1), [])


def test_there_is_nothing_but_blocks_that_run():
    assert PAGE.count("```") == 2 * len(BLOCKS) and len(BLOCKS) >= 6
