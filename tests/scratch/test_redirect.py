"""Under redirection a script sees its own files as it would see them in place, and the files from before stay.

Guards: scratch/redirect, scratch/view, scratch/system, scratch/libraries, scratch/guard.
"""

import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import file_programs
import pytest
from fork_server import ForkServer

PROGRAM = file_programs.__file__
EXAMPLES = int(os.environ.get("AMP_PATCH_EXAMPLES", 25))


@pytest.fixture(scope="module")
def server():
    server = ForkServer("import torch, numpy, amp_patch.torch_private")
    yield server
    server.close()


@pytest.fixture(scope="module")
def plain_server():
    server = ForkServer("import amp_patch.scratch, shutil, glob")
    yield server
    server.close()


def take_down(folder):
    """All of a folder that a write could change."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
        found[path] = (about.st_mode, about.st_mtime_ns, about.st_ino, content)
    return found


def test_a_random_program_gives_what_it_gives_in_place_and_changes_nothing(plain_server, tmp_path):
    commands, folders = [], []
    for seed in range(EXAMPLES):
        for kind in ("plain", "redirected"):
            folders.append(tmp_path / f"{seed}-{kind}")
            file_programs.make_files(folders[-1])
            scratch = [tmp_path / f"{seed}-scratch"] if kind == "redirected" else []
            start = f"import os, runpy, sys; os.chdir({str(folders[-1])!r}); sys.argv[0] = {PROGRAM!r}"
            commands.append(["-c", f"{start}; runpy.run_path({PROGRAM!r}, run_name='__main__')", seed, *scratch])
    before = {folder: take_down(folder) for folder in folders[1::2]}
    done = plain_server.run_together(commands, cwd=tmp_path, environments=[{}] * len(commands))
    for seed, (plain, redirected) in enumerate(zip(done[::2], done[1::2], strict=True)):
        assert plain.returncode == redirected.returncode == 0, plain.stderr + redirected.stderr
        ours, theirs = json.loads(redirected.stdout), json.loads(plain.stdout)
        assert ours == theirs, f"seed {seed}"
    assert {folder: take_down(folder) for folder in before} == before


WRITERS = {
    "open": 'open("old", "w").write("new")',
    "append": 'open("old", "a").write("new")',
    "update": 'open("old", "r+").write("n")',
    "through a link": 'open("link", "w").write("new")',
    "a new name": 'open("fresh", "w").write("new")',
    "with an opener": 'open("old", "w", opener=lambda path, flags: os.open(path, flags)).write("new")',
    "os.open": 'os.close(os.open("old", os.O_WRONLY | os.O_TRUNC))',
    "pathlib": 'pathlib.Path("old").write_text("new")',
    "os.replace": 'open("part", "w").close(); os.replace("part", "old")',
    "os.rename": 'os.rename("old", "moved")',
    "os.remove": 'os.remove("old"); assert not os.path.exists("old")',
    "rmtree": 'shutil.rmtree("folder"); assert "folder" not in os.listdir()',
    "copy": 'shutil.copy("old", "folder/in")',
    "move": 'shutil.move("old", "folder/in")',
    "copytree": 'shutil.copytree("folder", "again")',
    "mkdir": 'os.mkdir("made"); os.makedirs("made/more")',
    "rmdir": 'os.remove("folder/in"); os.rmdir("folder")',
    "truncate": 'os.truncate("old", 1)',
    "chmod": 'os.chmod("old", 0o600)',
    "utime": 'os.utime("old", (1, 1))',
    "hard link": 'os.link("old", "same"); open("same", "a").write("new")',
    "symlink": 'os.symlink("old", "to_old"); open("to_old", "a").write("new")',
    "in another folder": 'os.chdir("folder"); open("in", "w").write("new"); open("../old", "w").write("new")',
    "in its own folder": 'os.mkdir("made"); os.chdir("made"); open("x", "w").close(); assert os.listdir() == ["x"]',
    "by a descriptor of a folder": 'os.unlink("in", dir_fd=os.open("folder", os.O_RDONLY))',
    "temporary file here": 'tempfile.NamedTemporaryFile(dir=".", delete=False).close()',
    "tar": 'tarfile.open("old", "w").close()',
    "np.save": 'numpy.save("old.npy", numpy.ones(2)); assert numpy.load("old.npy").sum() == 2',
    "tofile": 'numpy.ones(2).tofile("old"); assert numpy.fromfile("old").sum() == 2',
    "memmap": 'numpy.memmap("old", mode="r+")[0] = 7; assert numpy.memmap("old", mode="r")[0] == 7',
    "torch.save": 'torch.save(1, "old.pt"); assert torch.load("old.pt") == 1',
    "torch.save, a path": 'torch.save(1, pathlib.Path("old.pt")); assert torch.load("old.pt") == 1',
    "torch.save, not ASCII": 'torch.save(1, "öld.pt"); assert torch.load("öld.pt") == 1',
    "torch.save, no archive": 'torch.save(1, "old.pt", _use_new_zipfile_serialization=False); torch.load("old.pt")',
    "torch.load, mapped": 'torch.save(torch.ones(2), "old.pt"); assert torch.load("old.pt", mmap=True).sum() == 2',
    "torch.from_file": 'torch.from_file("old", shared=True, size=1).fill_(7)',
    "torch.jit.save": 'torch.jit.save(torch.jit.script(torch.nn.ReLU()), "old.pt"); torch.jit.load("old.pt")',
    "sqlite3": 'base = sqlite3.connect("old.db"); base.execute("create table t(a)"); base.commit()',
    "sqlite3, a URI": 'base = sqlite3.connect("file:old.db", uri=True); base.execute("create table t(a)")',
    "safetensors": 'safetensors.torch.save_file({"a": torch.ones(2)}, "old"); safetensors.torch.load_file("old")',
    "a fork": 'os.waitpid(os.fork() or open("old", "w").write("x") * os._exit(0), 0); assert open("old").read() == "x"',
}
REFUSED = {
    "FileIO": 'io.FileIO("old", "w")',
    "posix": 'import posix; posix.unlink("old")',
    "sqlite3.Connection": 'sqlite3.Connection("old.db")',
}
START = """
import io, json, os, pathlib, shutil, sqlite3, sys, tarfile, tempfile, traceback
import numpy, torch
from amp_patch.scratch import redirect
"""
RUN_ALL = """
if "safetensors" in sys.argv[2:]:
    import safetensors.torch
home, said = os.getcwd(), {}
for name, code in json.loads(pathlib.Path(sys.argv[1]).read_text()).items():
    os.chdir(os.path.join(home, name))
    undo = redirect(os.path.join(home, name + "-scratch"), [], "")
    try:
        exec(code)
        said[name] = ""
    except Exception:
        said[name] = traceback.format_exc()
    undo()
    os.chdir(home)
pathlib.Path("said").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def ran(server, tmp_path_factory):
    """Of each script that was run in a folder of its own: what was raised, and whether the folder is as before."""
    home = tmp_path_factory.mktemp("ran")
    scripts = WRITERS | REFUSED
    has_safetensors = importlib.util.find_spec("safetensors") is not None
    if not has_safetensors:
        del scripts["safetensors"]
    before = {}
    for name in scripts:
        (home / name / "folder").mkdir(parents=True)
        for file in ("old", "old.pt", "old.npy", "old.db", "öld.pt", "folder/in"):
            (home / name / file).write_text("" if file == "old.db" else "old content")
        (home / name / "link").symlink_to("old")
        before[name] = take_down(home / name)
    (home / "scripts").write_text(json.dumps(scripts))
    done = server.run("-c", START + RUN_ALL, "scripts", *["safetensors"] * has_safetensors, cwd=home)
    assert done.returncode == 0, done.stderr
    said = json.loads((home / "said").read_text())
    return {name: (said[name], take_down(home / name) == before[name], home / f"{name}-scratch") for name in scripts}


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_there_stays_bit_by_bit(name, ran):
    if name not in ran:
        pytest.skip("safetensors is not installed")
    said, is_as_before, scratch = ran[name]
    assert said == "" and is_as_before
    assert {path.name for path in scratch.iterdir()} & {"files", "gone"}  # it did not just do nothing


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_redirected_is_refused(name, ran):
    said, is_as_before, _ = ran[name]
    assert "NotRedirectedError" in said and "--in-place" in said and is_as_before


def test_a_database_that_changes_no_file_is_let_through(server, tmp_path):
    code = f"""{START}
sqlite3.Connection("old.db").close()
undo = redirect(sys.argv[1], [], "")
sqlite3.Connection(":memory:").close()
for uri in ("file:old.db?mode=ro", "file:new.db?mode=memory", "file::memory:"):
    sqlite3.Connection(uri, uri=True).close()
"""
    done = server.run("-c", code, tmp_path / "scratch", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_undone_every_name_is_what_it_was(server, tmp_path):
    code = f"""
import builtins, io, os, tempfile, torch
spaces = [os, io, builtins, tempfile, torch, torch._C, torch._C.PyTorchFileWriter, torch.UntypedStorage]
before = [dict(vars(space)) for space in spaces] + [dict(os.environ)]
{START}
undo = redirect(sys.argv[1], [], "")
assert dict(vars(os)) != before[0]
undo()
assert [dict(vars(space)) for space in spaces] + [dict(os.environ)] == before
open("here", "w").close()
"""
    done = server.run("-c", code, tmp_path / "scratch", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here").exists()


def test_each_process_of_a_run_sees_what_the_others_wrote(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "old").write_text("old")
    (tmp_path / "script.py").write_text(f"""
import sys
sys.path[0] = {str(Path(PROGRAM).parents[2])!r}
from amp_patch.scratch import redirect
redirect({str(tmp_path / "scratch")!r}, [], "")
import subprocess
if sys.argv[1:]:
    open("old", "a").write(sys.argv[1])
else:
    open("old", "a").write(", first")
    subprocess.run([sys.executable, __file__, ", second"], check=True)
    assert open("old").read() == "old, first, second"
""")
    subprocess.run([sys.executable, tmp_path / "script.py"], check=True, cwd=tmp_path / "work")
    assert (tmp_path / "work" / "old").read_text() == "old"
