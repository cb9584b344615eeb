"""The description of the machine, also where git is missing or OpenCV is too old."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from benchmarks import environment
from benchmarks.gpu import checks
from tests.benchmarks.gpu.stand_ins import lines_and_failure

pytestmark = pytest.mark.benchmarks


def test_the_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert environment.commit() == "unknown"


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (SimpleNamespace(__version__="4.11.0"), "no imdecodeWithMetadata"),
        (SimpleNamespace(__version__="4.12.0", imdecodeWithMetadata=None), ""),
        (None, "cannot be imported"),
    ],
)
def test_an_opencv_that_cannot_decode_is_named_first(monkeypatch: pytest.MonkeyPatch, module, problem: str):
    monkeypatch.setitem(sys.modules, "cv2", module)
    lines, reason = lines_and_failure(checks.environment(Namespace()))
    assert lines[0].startswith("OpenCV ")
    assert problem in lines[0]
    assert problem in reason
    assert bool(reason) == bool(problem)
    assert lines[-1].startswith("commit ")
