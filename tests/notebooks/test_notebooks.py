"""In a real IPython kernel, cells can run again, records are shown as tables, and cells that hold models or fail are
explained.

Guards: insight/notebook, insight/display, session/current, insight/sites.
"""

import os
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")

import nbformat  # noqa: E402  # nbclient needs it
from jupyter_client.manager import KernelManager  # noqa: E402

pytestmark = pytest.mark.xdist_group("notebooks")  # one kernel, since each imports torch

MODEL = """
torch.manual_seed(0)  # no weights by which the first scale overflows
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=1)'
STEP = """
loss = model(torch.ones(3, 4)).square().mean()
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""
CLEAN = """
amp.reset()
%reset -f out
model = optimizer = loss = scaled_loss = None
sys.last_exc = sys.last_value = sys.last_traceback = None
assert torch.matmul is plain
"""


class Notebook:
    """Runs cells, one after another, in one kernel."""

    def __init__(self, folder):
        root = str(Path(__file__).parents[2])
        manager = KernelManager(kernel_name="python3")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": str(folder),
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        }
        self._client = nbclient.NotebookClient(nbformat.v4.new_notebook(), km=manager, timeout=300, allow_errors=True)
        self._context = self._client.setup_kernel(env=environment)
        self._context.__enter__()

    def run(self, source):
        """Run a cell; returns the text that it printed, its result by type, and its error as (class, text)."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells = [cell]
        self._client.execute_cell(cell, 0)
        printed = "".join(one.text for one in cell.outputs if one.output_type == "stream")
        data = next((one.data for one in cell.outputs if one.output_type == "execute_result"), {})
        error = next(((one.ename, one.evalue) for one in cell.outputs if one.output_type == "error"), None)
        return printed, data, error

    def __call__(self, source):
        """Run a cell that fails not; returns what it printed."""
        printed, _, error = self.run(source)
        assert error is None, error
        return printed

    def close(self):
        self._context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    notebook = Notebook(tmp_path_factory.mktemp("ipython"))
    notebook("import sys, torch, amp_patch as amp\nplain = torch.matmul")
    yield notebook
    notebook.close()


@pytest.fixture
def cells(kernel):
    yield kernel
    kernel(CLEAN)


def test_a_cell_that_is_run_again_says_so_and_training_goes_on(cells):
    cells(MODEL)
    assert "opt_level O1, " in cells(INITIALIZE)
    cells(STEP)
    assert cells(INITIALIZE) == "amp_patch: opt_level O1 as before, for Sequential\n"
    cells(STEP)
    cells("assert amp.stats().steps == 2 and len(model._forward_hooks) == 1")
    cells(MODEL + INITIALIZE + STEP)  # the cell that makes the model, too
    cells("assert amp.stats().steps >= 1 and amp.is_patched(torch, 'matmul')")
    error = cells.run('amp.initialize(model, optimizer, opt_level="O4", verbosity=0)')[2]
    assert error[0] == "SessionError"
    assert error[1].startswith("this Sequential is initialized already, at O1, and O4 was asked for: call amp.reset()")
    cells('amp.initialize(model, optimizer, opt_level="O4", verbosity=0, replace=True); None')


def test_recordings_and_faults_are_shown_as_tables_and_name_cells(cells):
    source = MODEL + INITIALIZE.replace("verbosity=1", "verbosity=0") + "\nfrom amp_patch import insight\ndef step():"
    cells(source + STEP.replace("\n", "\n    "))
    html = cells.run("insight.explain(step)")[1]["text/html"]
    assert "<td>F.linear</td>" in html and re.search(r"<td>Cell In\[\d+\], line \d+</td>", html)
    cells("_ = model[0].weight.data.fill_(1e6)")
    html = cells.run("insight.trace(step, on_fault='record')")[1]["text/html"]
    assert re.search(r"F.linear at Cell In\[\d+\], line \d+, module 0", html) and "match: &quot;" in html
    assert "<th>try</th>" in cells.run("insight.trace(step, on_fault='record').records[0]")[1]["text/html"]


def test_outputs_of_cells_that_hold_a_model_are_explained(cells):
    cells(MODEL)
    cells.run('amp.initialize(model, optimizer, opt_level="O1", verbosity=0)')  # its result is shown, and so kept
    cells("model = optimizer = None")
    other = 'amp.initialize(torch.nn.Linear(2, 2), opt_level="O4", verbosity=0); None'
    name, text = cells.run(other)[2]
    assert name == "SessionError" and "Outputs of cells keep models alive (`%reset -f out`)" in text
    cells("%reset -f out")
    if error := cells.run(other)[2]:  # IPython lets go of the first output of a kernel by no `%reset`
        assert "call amp.reset()" in error[1]
        cells("amp.reset()\n" + other)
    cells("assert amp.stats().opt_level == 'O4'")


def test_a_traceback_that_holds_a_model_is_explained(cells):
    cells(MODEL + INITIALIZE)
    assert cells.run("model(torch.ones(3, 5))")[2][0] == "RuntimeError"  # a shape that does not fit
    cells("model = optimizer = None")
    other = 'amp.initialize(torch.nn.Linear(2, 2), opt_level="O4", verbosity=0); None'
    name, text = cells.run(other)[2]
    assert name == "SessionError"
    cells(re.search("`(sys.last_exc = .*?)`", text)[1])
    cells(other)


def test_a_scope_ends_with_a_cell_that_fails(cells):
    cells(MODEL)
    scope = 'with amp.scope(model, optimizer, opt_level="O2", verbosity=0):\n'
    inside = "".join(f"    {line}\n" for line in STEP.strip().splitlines())
    for _ in range(2):
        assert cells.run(scope + inside + "    1 / 0")[2][0] == "ZeroDivisionError"
        cells(
            "assert torch.matmul is plain and model[0].weight.dtype is torch.float32 and 'step' not in vars(optimizer)"
        )
    cells(scope + inside)
    cells("assert amp.stats().opt_level is None and torch.matmul is plain")


def test_lines_come_once_under_logging_as_a_notebook_sets_it_up(cells):
    cells("import logging; logging.basicConfig(force=True)")
    try:
        printed = cells(MODEL + INITIALIZE)
        assert len(re.findall("opt_level O1", printed)) == 1
    finally:
        cells("logging.basicConfig(force=True, handlers=[logging.NullHandler()])")
    cells("amp.reset()")
    assert len(re.findall("opt_level O1", cells(INITIALIZE))) == 1
