"""The notebook of examples/ runs from top to bottom, and its own checks hold.

Guards: examples/nan.ipynb.
"""

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("sklearn", reason="needs scikit-learn")

import nbformat  # noqa: E402  # nbclient needs it

pytestmark = pytest.mark.xdist_group("notebooks")

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_notebook_finds_a_nan_and_repairs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    book = nbformat.read(EXAMPLES / "nan.ipynb", as_version=4)
    nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown = [str(cell.get("outputs", "")) for cell in book.cells]
    (traced,) = [text for cell, text in zip(book.cells, shown, strict=True) if "insight.trace(" in cell.source]
    assert "mul" in traced and "inf" in traced  # the op that overflowed
