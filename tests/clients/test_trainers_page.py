"""Every code block of the page on trainers runs as it stands, if its trainer is installed.

Guards: docs/trainers.md.
"""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent.parent / "docs" / "trainers.md").read_text()
BLOCKS = dict(re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))
NEEDS = {"Lightning": "lightning", "The transformers Trainer": "transformers", "Accelerate": "accelerate"}


@pytest.mark.parametrize("trainer", NEEDS)
def test_a_block_runs(trainer, tmp_path, monkeypatch):
    pytest.importorskip(NEEDS[trainer], reason=f"needs {NEEDS[trainer]}: make test-clients")
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[trainer], "trainers.md", "exec"), {"__name__": "__main__"})


def test_there_is_nothing_but_blocks_that_run():
    assert set(BLOCKS) == set(NEEDS) and PAGE.count("```") == 2 * len(NEEDS)
