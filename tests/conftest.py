"""The environment in which all tests run, and the fixtures that any of them may use.

The data sets and weights next to a checkout are optional: tests that need them are skipped without them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.logger import configure_logging, get_logger
from utils.process.child import RESULT_VARIABLE, claim_result_file
from utils.process.signals import STOP_SIGNALS

pytest.register_assert_rewrite("tests.helpers", "tests.robustness")  # so that PYTHONOPTIMIZE leaves their checks in
from tests.helpers.preloaded import preloaded_python, python  # noqa: E402
from tests.helpers.repository import SHARED  # noqa: E402
from tests.helpers.session import keep_files_in_memory, open_session_folder  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start: their number decides how sums are rounded
    # The processes that run the tests, and those that they start, import the same modules: their bytecode is kept.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.pop("PYTHONOPTIMIZE", None)  # programs that tests start check with ``assert``
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:  # set by nohup or a shell's "&"; programs would inherit it
            signal.signal(number, usual)
    keep_files_in_memory()
    session = contextlib.ExitStack()
    folder = session.enter_context(open_session_folder())
    os.environ.setdefault("MPLCONFIGDIR", str(folder))  # Matplotlib lists the fonts of the machine once, not per test
    session.enter_context(preloaded_python())
    if config.getoption("tx", None):  # the processes of pytest-xdist also begin with torch imported
        config.option.tx = [f"popen//python={python()}" for _ in config.option.tx]
    config.add_cleanup(session.close)


def pytest_collection_finish() -> None:
    gc.freeze()  # a garbage collection would look through all modules, which takes a third of a second
    # pytest adds its handlers to each logger that does not propagate, six times a test. Torch has 56 of these.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    # The handler of torch's trace removes itself when it is first used; by then the record would be printed, too.
    logging.getLogger("torch.__trace").handlers.clear()


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    return SHARED


@pytest.fixture(scope="session")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return (tmp_path_factory.getbasetemp() / f"test{number}" for number in itertools.count())


@pytest.fixture
def tmp_path(_folders: Iterator[Path], request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder, which is removed unless the test or its set-up fails: those of a session hold a hundred thousand
    files.

    pytest's own takes milliseconds, as it looks through those of all tests before.
    """
    folder = next(_folders)
    folder.mkdir()
    failed_before = request.session.testsfailed
    yield folder
    if request.session.testsfailed == failed_before:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _own_folders_thread_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own working and cache folders, whatever lies in the user's, and runs its kernels on one
    thread, so that parallel test runs do not slow each other down.

    Its random tensors do not depend on the tests that ran before, which the load of the machine distributes to the
    processes.
    """
    import torch  # in here, as the process that hands out the tests also reads this file, and runs none

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Commands that ran in this process have set it; scripts that a test starts are imported from their folder.
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # init_process_group replaces it
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # the CPU's; torch.manual_seed takes longer


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that the tested code itself starts begin with torch imported: `tests.helpers.preloaded`."""
    monkeypatch.setattr(sys, "executable", python())


@pytest.fixture
def result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which commands that run in this process leave their results: `utils.process.child`."""
    path = tmp_path / "result.jsonl"
    monkeypatch.setenv(RESULT_VARIABLE, str(path))
    claim_result_file()
    yield path
    claim_result_file()  # none, as the variable is gone


@pytest.fixture(autouse=True)
def _restored_signals() -> Iterator[None]:
    """Restores signal handlers: a program that a test runs in this process until Ctrl-C leaves one for the next
    Ctrl-C."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _logger_as_imported() -> Iterator[None]:
    """Undoes what a test, or a fixture of its module before it, has configured."""

    def reset() -> None:
        configure_logging(is_main=False)  # drops the lines that waited for a configuration: they are not warnings
        logger = get_logger()
        for handler in logger.handlers:
            handler.close()
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True

    reset()
    yield
    reset()
