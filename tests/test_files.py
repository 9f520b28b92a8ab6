"""A file is written whole, or stays as it was.

Guards: files.
"""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from amp_patch.files import check_writable, write_file

OLD, LONG = "old\n", "x" * 2**20
SCRIPT = """
import os, resource, signal, sys
from amp_patch.files import write_file
how, path = sys.argv[1:]
if how == "killed":  # by the first rename, when all is written
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
else:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
write_file(path, "x" * 2**20)
"""


@pytest.mark.parametrize(("how", "was_there"), [("killed", True), ("full", True), ("full", False)])
def test_a_write_that_fails_leaves_what_was_there(how: str, was_there: bool, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    if was_there:
        path.write_text(OLD)
    done = subprocess.run([sys.executable, "-c", SCRIPT, how, path], check=False, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 1)
    assert path.exists() is was_there and (not was_there or path.read_text() == OLD)
    if how == "full":
        assert str(path) in done.stderr.splitlines()[-1]
        assert list(tmp_path.iterdir()) == [path] * was_there


def test_a_file_is_written_as_open_would(tmp_path: Path) -> None:
    path, link = tmp_path / "a.html", tmp_path / "link.html"
    write_file(path, OLD)
    path.chmod(0o640)
    link.symlink_to(path)
    write_file(link, LONG)
    assert link.is_symlink() and path.read_text() == LONG and path.stat().st_mode & 0o777 == 0o640
    write_file(path, b"\x89PNG")
    assert path.read_bytes() == b"\x89PNG"
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        write_file(pipe, OLD)
        assert reader.communicate()[0] == OLD


@pytest.mark.parametrize("is_pipe", [False, True], ids=["file", "pipe"])
def test_what_is_written_to_stdout_comes_between_other_output(is_pipe: bool, tmp_path: Path) -> None:
    script = """
from amp_patch.files import check_writable, write_file
print("before")
check_writable("/dev/stdout")
write_file("/dev/stdout", "content\\n")
print("after")
"""
    path = tmp_path / "out.txt"
    with path.open("w") as file:
        target = subprocess.PIPE if is_pipe else file
        done = subprocess.run([sys.executable, "-c", script], check=True, stdout=target, text=True)
    assert (done.stdout if is_pipe else path.read_text()) == "before\ncontent\nafter\n"


def test_a_file_system_that_is_read_only_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(OSError, match="Read-only") as caught:
        write_file(tmp_path / "out.yaml", OLD)
    assert caught.value.filename == str(tmp_path / "out.yaml")


def test_an_error_names_the_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "x.yaml", tmp_path):
        with pytest.raises(OSError, match=re.escape(path.name)) as caught:
            write_file(path, OLD)
        assert caught.value.filename == str(path)


def test_what_lies_beside_a_file_is_never_written_through(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "out.html"
    victim.write_text(OLD)
    for name in (f".{path.name}.{os.getpid()}.part", f"{path.name}.part"):
        (tmp_path / name).symlink_to(victim)
    before = set(tmp_path.iterdir())
    write_file(path, LONG)
    assert victim.read_text() == OLD and set(tmp_path.iterdir()) == before | {path}


@pytest.mark.parametrize(
    "name", ["x" * 255, "é" * 127, os.fsdecode(b"h\xff.html")], ids=["long", "umlauts", "no UTF-8"]
)
def test_any_name_that_the_system_takes_is_written(name: str, tmp_path: Path) -> None:
    check_writable(tmp_path / name)
    assert not list(tmp_path.iterdir())
    write_file(tmp_path / name, f"{name}\n")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("how", "number"), [("open", errno.EACCES), ("open", errno.EROFS), ("replace", errno.EACCES)])
def test_a_file_in_a_folder_that_may_not_be_written_is_written(
    how: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.html"
    path.write_text(OLD)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, how, refuse)
    check_writable(path)
    write_file(path, LONG)
    monkeypatch.undo()
    assert path.read_text() == LONG and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x" * 256, "absent/x", "."])
def test_what_cannot_be_written_is_known_before(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        check_writable(tmp_path / name)
    assert caught.value.filename == str(tmp_path / name)
