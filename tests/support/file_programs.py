"""A random program of file operations: `python file_programs.py SEED [SCRATCH]` runs it in the working directory, under
redirection to a folder if one is given, and prints what each operation gave, and the files that there are at the end.
"""

import glob
import json
import os
import random
import shutil
import stat
import sys
from pathlib import Path

NAMES = ["a", "b", "d", "d/a", "d/e", "d/e/x", "l", "l/a", "f", "f/g", "f/g/h", "n", "n/m", "dead", "d/up", "./a"]
NAMES.append("d/../b")
MODES = ["w", "a", "r+", "x", "w+"]
FLAGS = [
    os.O_WRONLY,
    os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    os.O_WRONLY | os.O_APPEND,
    os.O_WRONLY | os.O_CREAT | os.O_EXCL,
]
OPERATIONS = 40


def make_files(folder):
    """What is there before."""
    for name in ("a", "d/a", "d/e/x", "f/g/h"):
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"old {name}")
    for name, target in (("l", "d"), ("dead", "nowhere"), ("d/up", "../a")):
        Path(folder, name).symlink_to(target)


class Program:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.base = os.getcwd()

    def name(self):
        return self.random.choice(NAMES)

    def path(self):
        """A name in one of the ways to write it."""
        name = self.name()
        return self.random.choice([str, Path, os.fsencode, os.path.abspath])(name)

    def any_of(self, *functions):
        return self.random.choice(functions)

    def write(self):
        with open(self.path(), self.random.choice(MODES)) as file:
            file.write("written")

    def write_by_descriptor(self):
        descriptor = os.open(self.path(), self.random.choice(FLAGS), 0o640)
        os.write(descriptor, b"q")
        os.close(descriptor)

    def read(self):
        with open(self.path()) as file:
            return file.read()

    def make(self):
        self.any_of(os.mkdir, os.makedirs, lambda path: os.makedirs(path, exist_ok=True))(self.path())

    def remove(self):
        self.any_of(os.remove, os.unlink, os.rmdir, shutil.rmtree)(self.path())

    def move(self):
        self.any_of(os.rename, os.replace, shutil.move)(self.name(), self.name())

    def copy(self):
        source, target = self.name(), self.name()
        if not os.path.realpath(target).startswith(os.path.realpath(source) + os.sep):
            self.any_of(shutil.copy, shutil.copy2, shutil.copyfile, shutil.copytree)(source, target)

    def link(self):
        self.any_of(os.link, os.symlink)(self.name(), self.name())

    def change(self):
        path = self.path()
        self.any_of(
            lambda: os.chmod(path, 0o640),
            lambda: os.utime(path, (1, 2)),
            lambda: os.truncate(path, 1),
            lambda: Path(os.fsdecode(path)).touch(),
        )()

    def look(self):
        path = self.path()
        return self.any_of(
            lambda: sorted(map(os.fsdecode, os.listdir(path))),
            lambda: sorted([os.fsdecode(one.name), one.is_dir(), one.is_symlink()] for one in os.scandir(path)),
            lambda: [os.path.exists(path), os.path.isdir(path), os.path.isfile(path), os.path.lexists(path)],
            lambda: os.path.relpath(os.path.realpath(os.fsdecode(path)), self.base),
            lambda: os.fsdecode(os.readlink(path)),
            lambda: sorted(glob.glob("**/*", recursive=True)),
        )()

    def go(self):
        os.chdir(self.any_of(self.base, self.base, "d", "f/g", "n"))
        return os.path.relpath(os.getcwd(), self.base)

    def run(self):
        names = ["write", "write_by_descriptor", "read", "make", "remove", "move", "copy", "link", "change", "go"]
        names += ["look"] * 3
        given = []
        for _ in range(OPERATIONS):
            name = self.random.choice(names)
            try:
                given.append([name, getattr(self, name)()])
            except (OSError, shutil.Error):
                given.append([name, "error"])
            if not os.path.isdir("."):
                os.chdir(self.base)
        os.chdir(self.base)
        return given


def describe(folder):
    """Every name in a folder: kind, mode and content."""
    found = []
    for above, folders, files in os.walk(folder):
        for path in (os.path.join(above, name) for name in sorted(folders + files)):
            mode, content = os.lstat(path).st_mode, ""
            if stat.S_ISLNK(mode):
                content = os.readlink(path)
            elif stat.S_ISREG(mode):
                content = Path(path).read_text()
            found.append([path, stat.S_IFMT(mode), 0 if stat.S_ISDIR(mode) else mode & 0o777, content])
    return sorted(found)


if __name__ == "__main__":
    if sys.argv[2:]:
        from amp_patch.scratch import redirect

        redirect(sys.argv[2], [], sys.argv[2])
    print(json.dumps([Program(int(sys.argv[1])).run(), describe(".")]))
