"""Shared fixtures. The data sets and weights next to a checkout are optional: tests that need them are skipped without
them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from utils.logger import get_logger

pytest.register_assert_rewrite("tests.helpers", "tests.robustness")  # so that PYTHONOPTIMIZE leaves their checks in
from tests.helpers.preloaded import preloaded_python, python  # noqa: E402

SHARED = Path(__file__).parents[2] / "shared"


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("PYTHONOPTIMIZE", None)  # programs that tests start check with ``assert``
    session = contextlib.ExitStack()
    session.enter_context(preloaded_python())
    if "MPLCONFIGDIR" not in os.environ:  # Matplotlib lists the fonts of the machine once, not once per test
        os.environ["MPLCONFIGDIR"] = session.enter_context(tempfile.TemporaryDirectory())
    config.add_cleanup(session.close)


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    return SHARED


@pytest.fixture(autouse=True)
def _one_thread_and_own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every test has its own working and cache folders, whatever lies in the user's, and runs its kernels on one
    thread, so that parallel test runs do not slow each other down."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that the tested code itself starts begin with torch imported: `tests.helpers.preloaded`."""
    monkeypatch.setattr(sys, "executable", python())


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    logger = get_logger()
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
