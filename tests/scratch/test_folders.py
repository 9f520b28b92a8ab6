"""`Folders` gives each run an empty folder, keeps only the files that runs wrote, and names them.

Guards: scratch/folders.
"""

import importlib
from pathlib import Path

import pytest

from amp_patch.scratch import Folders, find_inductor_cache


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files. The test runs in another one, "work"."""
    for name in ("work", "temp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    return tmp_path / "temp"


def write(root: str, path: Path, size: int) -> None:
    """Write a file as a run does: below "files" in its folder, at its whole path."""
    file = Path(root) / "files" / path.relative_to("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))


def test_files_of_the_working_directory_are_at_the_top_and_all_are_counted(temporary):
    folders = Folders("compare")
    root = folders.begin("O1")
    write(root, Path.cwd() / "best.pt", 1500)
    write(root, Path.cwd() / "samples" / "1", 500)
    write(root, Path("/data/cache"), 500)
    (Path(root) / "gone").mkdir()
    folders.end(root, keep=True)
    (top,) = temporary.iterdir()
    files = {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}
    assert files == {"O1/best.pt", "O1/samples/1", "O1/elsewhere/data/cache"}
    assert folders.describe() == [
        f"the runs wrote 3 files (2.5 kB) to {top}, not over yours:",
        "  O1: best.pt, elsewhere/ (1 file), samples/ (1 file)",
    ]


def test_runs_that_write_nothing_or_are_not_kept_leave_nothing(temporary):
    folders = Folders("tune")
    for keep in (True, False):
        root = folders.begin("a run")
        assert list(Path(root).iterdir()) == []
        if not keep:
            write(root, Path.cwd() / "best.pt", 10)
        folders.end(root, keep=keep)
        assert folders.describe() == [] and list(temporary.iterdir()) == []


def test_a_size_has_three_digits(temporary):
    folders = Folders("tune")
    root = folders.begin("O1")
    write(root, Path.cwd() / "best.pt", 999_600)
    folders.end(root, keep=True)
    assert "(1 MB)" in folders.describe()[0]


def test_the_cache_of_a_user_without_a_name_is_torchs(monkeypatch):
    def raise_error():
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("getpass.getuser", raise_error)
    cache = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    assert find_inductor_cache() == cache.default_cache_dir()
