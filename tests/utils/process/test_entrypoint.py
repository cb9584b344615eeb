"""Exit codes and last lines of scripts."""

import contextlib
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.helpers.processes import Processes
from tests.helpers.repository import ROOT
from utils.errors import FailedCheck, PeerFailure, Stopped, UserError
from utils.process.entrypoint import run_main
from utils.process.result_file import RESULT_VARIABLE, read_result
from utils.process.spawn import spawn


def wrapped_interrupt() -> RuntimeError:
    """Returns what Python before 3.12 raises for a Ctrl-C that comes while it makes a class."""
    error = RuntimeError("Error calling __set_name__ on 'Field' instance 'weights' in 'DetectConfig'")
    error.__cause__ = KeyboardInterrupt()
    return error


def failing(error: BaseException) -> Callable:
    """Returns a main function that raises ``error``."""

    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("data.yaml:3: no such\n folder"), 2, "error: data.yaml:3: no such folder\n"),
        (FailedCheck("a.onnx: differs"), 1, "error: a.onnx: differs\n"),
        (PeerFailure("rank 0 failed"), 2, ""),
        (PeerFailure("rank 0 failed", 70), 70, ""),
        (Stopped(75), 75, ""),
        (KeyboardInterrupt(), 130, ""),
        (wrapped_interrupt(), 130, ""),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 2, "error: runs/x: the disk is full;"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk or /dev/shm is full;"),
        (OSError(errno.EIO, "Input/output error", "set/a.png"), 2, "error: set/a.png: input/output error; the disk or"),
        (
            OSError(errno.ENOTDIR, "Not a directory", "a/b"),
            2,
            "error: a/b: not a directory; fix that or choose another",
        ),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), 2, "error: a/b: read-only file system; fix that"),
        (OSError(errno.EFBIG, "File too large", "a/b"), 2, "error: a/b: file too large; fix that or choose another"),
        (OSError(errno.EEXIST, "File exists", __file__), 2, f"error: {__file__}: is a file, not a folder; choose"),
    ],
)
def test_each_way_to_end_has_its_exit_code_and_output(error, code, line, capsys, monkeypatch):
    monkeypatch.setattr("utils.process.entrypoint.PEER_GRACE_S", 0)
    with pytest.raises(SystemExit) as stop:
        run_main(failing(error))
    assert stop.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == bool(line)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (LookupError("no such\nkey"), "LookupError: no such"),
        # Not that of standard output, but of a callback's socket or of a program that it has started.
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),
    ],
)
def test_a_bug_has_a_traceback_and_a_code_of_its_own(tmp_path, monkeypatch, capsys, error, line):
    """1 is the code of findings, 2 that of refusals: a CI job can tell them from a bug."""
    monkeypatch.setenv(RESULT_VARIABLE, str(tmp_path / "result.jsonl"))
    with pytest.raises(SystemExit) as stop:
        run_main(failing(error))
    assert stop.value.code == 70
    error_output = capsys.readouterr().err
    assert error_output.startswith("Traceback (most recent call last):")
    assert error_output.endswith(f"in main\n    raise error\n{type(error).__name__}: {error}\n")
    assert read_result(tmp_path / "result.jsonl") == {"error": line, "cause": "command"}


def test_a_bug_whose_text_cannot_be_read_ends_like_another(tmp_path, monkeypatch, capsys):
    """It ends with the exit code of a bug, and its parent reads a reason."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise LookupError

    monkeypatch.setenv(RESULT_VARIABLE, str(tmp_path / "result.jsonl"))
    with pytest.raises(SystemExit) as stop:
        run_main(failing(Silent()))
    assert stop.value.code == 70
    assert "raise error\n" in capsys.readouterr().err
    assert read_result(tmp_path / "result.jsonl") == {"error": "Silent: Silent", "cause": "command"}


def test_a_closed_output_pipe_causes_no_traceback():
    program = (
        "from utils.process.entrypoint import run_main\nrun_main(lambda _: [print('x' * 1000) for _ in range(10000)])"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(write)
    assert ended.returncode == 141
    assert ended.stderr == b""


def test_a_ctrl_c_in_a_callback_of_an_import_is_not_lost(capsys, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    class Callback:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def main(_: object) -> None:
        Callback()
        time.sleep(20)
        pytest.fail("Ctrl-C has not ended the call that waits")

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            run_main(main)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


SPAWNING = """
import sys
from utils.process.entrypoint import run_main
from utils.process.result_file import RESULT_VARIABLE, read_result
from utils.process.spawn import spawn

def work(argv):
    import torch, time
    time.sleep(60)

def main(argv):
    print("begun", flush=True)
    spawn(work, 2, (argv,))

if __name__ == "__main__":
    run_main(main)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.7, 1.4])
def test_ctrl_c_while_spawned_processes_start_ends_them_without_traceback(tmp_path, seconds):
    """They are starting, or importing torch, or have done so. Each gets the signal twice: also from the parent."""
    (tmp_path / "starts.py").write_text(SPAWNING)
    with Processes(tmp_path / "log", real=True) as launch:
        launch.start([launch.python, str(tmp_path / "starts.py")], PYTHONPATH=str(ROOT))
        launch.until(lambda: len(launch.alive()) == 4)  # the parent, multiprocessing's tracker, and two
        time.sleep(seconds)
        for pid in launch.alive():  # as a terminal does
            with contextlib.suppress(ProcessLookupError):  # its parent was faster
                os.kill(pid, signal.SIGINT)
        assert launch.codes() == [130]
        launch.wait_gone()
        assert launch.output() == "begun\n"


MISSPELLED = """
import multiprocessing, sys
from multiprocessing import resource_tracker
from importlib import import_module
from utils.process.entrypoint import run_main
weights, none = sys.argv[1:]
resource_tracker.ensure_running()
multiprocessing.set_executable("/bin/false")  # the processes that --spawn starts
for name, *flags in (
    ("train", "--data", f"{none}.yaml"), ("train", "--model", f"{none}.yaml"), ("train", "--weights", f"{none}.pt"),
    ("train", "--resume", f"{none}.pt"), ("train", "--hyp", none), ("val", "--weights", f"{none}.pt"),
    ("val", "--weights", weights, "--data", f"{none}.yaml"), ("detect", "--weights", f"{none}.pt", "--source", "0"),
    ("detect", "--weights", weights, "--source", f"{none}.jpg"), ("export", "--weights", f"{none}.pt"),
    ("export", "--weights", weights, "--data", f"{none}.yaml"), ("export", "--weights", weights, "--half", "--int8"),
    ("tools.kfold.__main__", "--data", f"{none}.yaml"),
    ("tools.check.__main__", "demo", "--weights", f"{none}.pt"), ("train", "--spawn", "2", "--device", "cpu"),
    ("val", "--weights", weights, "--spawn", "2", "--device", "cpu"),
):
    try:
        run_main(import_module(name).main, flags)
    except SystemExit as ended:
        refused = 1 if "--spawn" in flags else 2  # 1: that of /bin/false
        assert ended.code == refused, (name, flags)
    assert "torch" not in sys.modules, (name, flags)
"""


def test_misspelled_paths_are_refused_and_processes_spawned_before_torch_is_imported(tmp_path):
    """Importing it takes seconds, which the parent would add to the start of its processes."""
    weights = tmp_path / "best.pt"
    weights.touch()
    command = [sys.executable, "-c", MISSPELLED, str(weights), str(tmp_path / "none")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 14  # those that /bin/false ends print nothing
    assert all(line.startswith("error: ") for line in lines)


def print_start_method() -> None:
    print(multiprocessing.get_start_method(), flush=True)


def test_spawned_processes_fork_their_loader_workers(capfd):
    """Spawning would import torch again in each worker, which takes seconds."""
    usual = multiprocessing.get_context().get_start_method()
    spawn(print_start_method, 2)
    assert capfd.readouterr().out.split() == [usual, usual]
