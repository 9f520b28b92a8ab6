"""A file that is written is there whole, or as it was before."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from amp_patch.files import write_file

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
