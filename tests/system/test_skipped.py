"""The list of tests that no environment ran is made from the reports of all environments.

Guards: tools/skipped.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent.parent / "tools" / "skipped.py"
RAN = "def test_it(): pass\n"
LATER = "import sys, pytest\ndef test_it():\n    if 'a.xml' in sys.argv[-1]: pytest.skip('not here')\n"
NEVER = "import pytest\n@pytest.mark.skip(reason='no such device')\ndef test_it(): pass\n"
LACKING = "import pytest\npytest.importorskip('no_such_package', reason='needs no_such_package: make')\n" + RAN
FAILING = "def test_it(): assert False\n"


@pytest.fixture(scope="module")
def list_skipped(tmp_path_factory):
    """Returns a function that runs modules in two environments, and gives the list's exit code and lines."""

    def list_skipped(**sources):
        folder = tmp_path_factory.mktemp("reports")
        for name, source in sources.items():
            (folder / f"test_{name}.py").write_text(source)
        (folder / "pytest.ini").write_text("[pytest]\n")
        for environment in ("a", "b"):
            options = ["-q", "-p", "no:cacheprovider", f"--junitxml={environment}.xml"]
            subprocess.run([sys.executable, "-m", "pytest", *options], cwd=folder, capture_output=True)
        command = [sys.executable, str(TOOL)]
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()

    return list_skipped


def test_what_ran_somewhere_is_not_listed_and_the_rest_is_with_its_reason(list_skipped):
    code, lines = list_skipped(ran=RAN, later=LATER, never=NEVER)
    assert code == 0 and lines[-1] == "2 passed, 0 failed"
    assert lines[1:-1] == ["  no such device", "    test_never.test_it"]


@pytest.mark.parametrize("source", [LACKING, FAILING], ids=["a package that is nowhere", "a failure"])
def test_what_must_not_be_fails(list_skipped, source):
    code, lines = list_skipped(ran=RAN, wrong=source)
    assert code == 1 and lines[-1] == "1 passed, 1 failed"
