"""The example in the docstring of each public function runs as shown.

Guards: api, saving, functions.
"""

import doctest
import inspect

import pytest
import torch

import amp_patch as amp

FUNCTIONS = [name for name in amp.__all__ if inspect.isfunction(getattr(amp, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_function_runs_as_shown(name: str) -> None:
    docstring = inspect.getdoc(getattr(amp, name))
    assert docstring is not None
    test = doctest.DocTestParser().get_doctest(docstring, {"torch": torch, "amp": amp}, name, None, None)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert results.failed == 0, "".join(said)
