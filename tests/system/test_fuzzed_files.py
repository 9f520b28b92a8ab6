"""A spoiled list or saved state is read, or refused by an error of amp_patch.

Guards: config/yaml_nodes, config/list_file, saving.
"""

import contextlib
import math
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amp_patch as amp
from amp_patch.cli.main import main
from amp_patch.config.op_lists import check_oplists, load_oplists
from amp_patch.config.shipped import lists_dir

SHIPPED = {path.name: path.read_text() for path in sorted(lists_dir().glob("*.yaml"))}
PIECES = [
    *("[", "]", "{", "}", ":", "- ", "\n", "  ", "\t", "'", '"', "? ", "|", "&a ", "*a", "<<: "),
    *("null", "0x1F", "1e400", "softmax", "match: '['", "extends: ", "!!python/object:os.system "),
    *("\x00", "\x1b[31m", '"\\e[31m"', "\ufeff", "\u202e", "é"),
]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e]")


def spoil(text: str, draw: random.Random) -> bytes:
    """Return a list with pieces put in, taken out, doubled and exchanged."""
    for _ in range(draw.randint(1, 6)):
        start = draw.randrange(len(text))
        end = min(len(text), start + draw.choice([0, 1, 5, 200]))
        text = text[:start] + draw.choice([*PIECES, text[start:end] * 2, ""]) + text[end:]
    data = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.1:
        place = draw.randrange(len(data))
        data = data[:place] + bytes([draw.randrange(256)]) + data[place:]
    return data


@pytest.mark.parametrize("seed", range(7))
def test_a_spoiled_list_is_read_or_refused(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    path = tmp_path / "mine.yaml"
    path.write_bytes(spoil(draw.choice(list(SHIPPED.values())), draw))
    is_read = True
    try:
        load_oplists(str(path))
    except amp.OpListError:
        is_read = False
    assert is_read is (check_oplists(path).errors == [])
    main(["lists", "check", str(path)])
    main(["lists", "show", str(path)])
    printed = "".join(capsys.readouterr())
    assert not CONTROL.search(printed)


numbers = (
    st.integers()
    | st.floats()
    | st.booleans()
    | st.none()
    | st.text(max_size=5)
    | st.sampled_from([10**400, 2**31, 1e39, math.inf])
)
tensors = st.sampled_from([torch.empty(0), torch.ones(2), torch.tensor(8.0), torch.empty((), device="meta")])
entries = st.dictionaries(st.sampled_from(["loss_scale", "unskipped", "hysteresis_tracker", "x"]), numbers | tensors)
states = st.dictionaries(st.sampled_from(["loss_scaler0", "loss_scaler1", "amp", 0]), entries | numbers, max_size=3)


@settings(max_examples=40)
@given(states)
def test_a_saved_state_is_loaded_or_changes_nothing(state: object) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(amp.reset)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
        before = amp.state_dict()
        try:
            amp.load_state_dict(state)
        except amp.AmpError:
            assert amp.state_dict() == before
        else:
            after = amp.state_dict()["loss_scaler0"]
            assert 0 < after["loss_scale"] < math.inf and 0 <= after["unskipped"] < 2**31
