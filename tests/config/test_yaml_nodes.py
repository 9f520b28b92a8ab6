"""A well-formed YAML file is read as text with positions, and any other file raises one type of error with a position.

Guards: config/yaml_nodes, config/look_alikes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from amp_patch.config import yaml_nodes
from amp_patch.config.yaml_nodes import MAX_BYTES, MAX_DEPTH, Node, load_mapping
from amp_patch.errors import OpListError


@pytest.fixture(params=["c", "python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test with each of PyYAML's two parsers."""
    if request.param == "c" and not yaml.__with_libyaml__:
        pytest.skip("PyYAML is built without libyaml")
    monkeypatch.setattr(yaml_nodes, "_LOADER", yaml.CSafeLoader if request.param == "c" else yaml.SafeLoader)
    yield


def read(tmp_path: Path, data: bytes | str) -> Node:
    path = tmp_path / "file.yaml"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return load_mapping(path, OpListError)


def plain(node: Node) -> object:
    """The node without positions."""
    if isinstance(node.value, dict):
        return {key: plain(value) for key, value in node.value.items()}
    if isinstance(node.value, list):
        return [plain(item) for item in node.value]
    return node.value


@pytest.mark.usefixtures("parser")
class TestWellFormed:
    def test_scalars_stay_text(self, tmp_path: Path) -> None:
        words = ["no", "on", "true", "null", "~", "1", "2.10", "1e3", "0x1f", "2020-01-01", "1:30", ".inf", "=", "<<"]
        assert plain(read(tmp_path, "a: [" + ", ".join(words) + "]")) == {"a": words}

    def test_positions(self, tmp_path: Path) -> None:
        root = read(tmp_path, "# comment\nfirst: one\n\nsecond:\n  - two\n  - {deep: 'three'}\n")
        assert isinstance(root.value, dict)
        assert (root.line, root.column) == (2, 1)
        assert root.key_positions == {"first": (2, 1), "second": (4, 1)}
        assert root.value["first"] == Node("one", 2, 8)
        items = root.value["second"].value
        assert isinstance(items, list)
        assert items[0] == Node("two", 5, 5)
        assert items[1] == Node({"deep": Node("three", 6, 12, quoted=True)}, 6, 5, key_positions={"deep": (6, 6)})

    def test_quoted_and_empty(self, tmp_path: Path) -> None:
        for text, quoted in [("x", False), ("'x'", True), ('"x"', True), ("|-\n  x", True)]:
            root = read(tmp_path, f"a: {text}\n")
            assert isinstance(root.value, dict)
            assert (root.value["a"].value, root.value["a"].quoted) == ("x", quoted)
        assert plain(read(tmp_path, b"\xef\xbb\xbfa:\nno: ''\n<<: {c: d}\n")) == {"a": "", "no": "", "<<": {"c": "d"}}

    def test_deepest_allowed(self, tmp_path: Path) -> None:
        depth = MAX_DEPTH - 1  # the root is the first level
        read(tmp_path, "a: " + "[" * depth + "]" * depth)

    def test_largest_allowed(self, tmp_path: Path) -> None:
        head = b"a: b\n#"
        assert plain(read(tmp_path, head + b"x" * (MAX_BYTES - len(head)))) == {"a": "b"}


# beside those of wrong_files.yaml
BAD = {
    "only a comment": (b"# nothing\n", "1:1", "is empty"),
    "root is text": (b"\nword\n", "2:1", "must hold a mapping"),
    "root is null": (b"---\n", "2:1", "must hold a mapping"),
    "anchor on the root": (b"&x\na: 1\n", "1:1", "anchor &x"),
    "bare tag": (b"a: ! 1\n", "1:4", "tag '!'"),
    "tagged key": (b"!!str a: 1\n", "1:1", "tag "),
    "duplicate nested key": (b"a: {b: 1, 'b': 2}\n", "1:11", "'b' is already given at 1:5"),
    "list as key": (b"? [a]\n: 1\n", "1:3", "a key is a list"),
    "mapping as key": (b"a: {? {b: c} : 1}\n", "1:7", "a key is a mapping"),
    "bad version": (b"%YAML 9.9\n---\na: 1\n", "1:1", "not valid YAML"),
    "bad escape": (b'a: "\\UFFFFFFFF"\n', "1:", "not valid YAML"),
    "not UTF-8": (b"a: b\nc: \xff\n", "2:4", "byte 0xff is not UTF-8"),
    "not UTF-8 after a byte order mark": (b"\xef\xbb\xbfa: \xff\n", "1:4", "byte 0xff is not UTF-8"),
    "UTF-16": ("a: b\n".encode("utf-16"), "1:1", "not UTF-8"),
    "null byte": (b"a: b\nc: d\x00\n", "2:5", "U+0000"),
    "too deep": (b"a: " + b"[" * 16 + b"]" * 16, "1:19", "deeper than 16"),
    "far too deep": (b"[" * 500_000, "1:1", "deeper than 16"),  # libyaml of PyYAML 6.0.4 reads as far as 1:1001
    "far too deep block": (b"- " * 400_000, "1:33", "deeper than 16"),
    "too large": (b"a: b\n#" + b"x" * MAX_BYTES, "1:1", "larger than"),
}


@pytest.mark.usefixtures("parser")
def test_a_bad_file_is_an_error_with_a_place(tmp_path: Path) -> None:
    wrong = {}
    for name, (data, position, problem) in BAD.items():
        with pytest.raises(OpListError) as caught:
            read(tmp_path, data)
        message = str(caught.value)
        if not message.startswith(f"{tmp_path / 'file.yaml'}:{position}") or problem not in message:
            wrong[name] = message
    assert wrong == {}


def test_bad_path(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, problem in {
        tmp_path: "directory",
        tmp_path / "absent.yaml": "no such file",
        tmp_path / "pipe": "not a regular file",
        tmp_path / "null\0byte": "cannot be read",
        tmp_path / ("x" * 5000): "cannot be read",
    }.items():
        with pytest.raises(OpListError) as caught:
            load_mapping(path, OpListError)
        assert str(caught.value).startswith(f"{path}:1:1: ")
        assert problem in str(caught.value)
