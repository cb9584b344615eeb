"""A command within a program: the bits of its own process, and the program as it was."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import run_python
from tests.lockstep.hooks import SMALL, Fail, Interrupt, run_script
from utils.errors import FailedCheck, UserError
from utils.files.torch_file import read_checkpoint

FLAGS = ["--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0", "--amp", "off", "--noplots"]


def weights(run: lockstep.Run) -> dict[str, torch.Tensor]:
    return read_checkpoint(run.last)["model"]


def state_of_program() -> dict[str, Any]:
    """Returns what a command could change."""
    logger = logging.getLogger("lockstep")
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "hooks": [sys.excepthook, threading.excepthook],
        "logger": [list(logger.handlers), logger.level, logger.propagate],
        "generators": [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()],  # noqa: NPY002
        "torch": [
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
        ],
    }


@pytest.fixture
def odd_program() -> Iterator[None]:
    """A program with settings of torch that no new process has."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.backends.cudnn.benchmark = True
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.backends.cudnn.benchmark = False
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_two_trainings_have_the_bits_of_two_processes_and_leave_the_program_as_it_was(data, tmp_path, odd_program):
    state_of_program()  # opens what it opens
    before = state_of_program()
    handler = logging.NullHandler()
    logging.getLogger("lockstep").addHandler(handler)
    before["logger"][0] = [handler]
    settings: dict[str, Any] = {**SMALL, "deterministic": True, "epochs": 1}
    settings["model"] = tmp_path / "tiny.yaml"
    runs = [lockstep.train(data, seed=seed, **settings) for seed in (0, 1)]
    assert state_of_program() == before
    for seed, run in enumerate(runs):
        name = f"process{seed}"
        words = ["--data", data, "--model", tmp_path / "tiny.yaml", *FLAGS, "--epochs", "1", "--deterministic"]
        words += ["--threads", "1", "--seed", seed, "--project", tmp_path, "--name", name]
        run_python(ROOT / "train.py", *words, folder=tmp_path)
        assert_same_content(weights(run), weights(lockstep.Run(tmp_path / name)))


def test_lines_are_printed_or_given_to_the_handlers_of_the_program(data, tmp_path, capsys):
    """Quiet: only results and warnings. The run's own log has all lines."""
    settings: dict[str, Any] = {"model": tmp_path / "tiny.yaml", "epochs": 1, **SMALL}
    run = lockstep.train(data, quiet=True, **settings)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("done: 1 epoch") for line in lines)
    assert not any(line.startswith(("run folder", "first step", "epoch 1", "train: ")) for line in lines)
    assert "first step" in (run.folder / "train.log").read_text()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler)
    lockstep.train(data, **settings)
    messages = [record.getMessage() for record in records]
    assert any(message.startswith("first step") for message in messages)
    logger.setLevel(logging.ERROR)
    lockstep.val(run.last, device="cpu", plots=False)
    assert len(records) == len(messages)
    assert capsys.readouterr() == ("", "")
    assert (logger.handlers, logger.level) == ([handler], logging.ERROR)


def test_a_training_that_has_ended_or_failed_leaves_no_tensors(data, tmp_path):
    def count() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.nn.Module) for thing in gc.get_objects())

    settings: dict[str, Any] = {"model": tmp_path / "tiny.yaml", "epochs": 1, **SMALL}
    lockstep.train(data, **settings)
    before = count()
    with refused("--callbacks tests.lockstep.hooks:Fail: on_end failed: ...", lockstep.Error) as caught:
        lockstep.train(data, callbacks=Fail, **settings)
    assert count() == before  # though the error, and its traceback, are still there
    assert caught.value.__context__ is None


def test_ctrl_c_saves_the_run_and_names_the_line_that_continues_it(data, tmp_path):
    settings: dict[str, Any] = {"model": tmp_path / "tiny.yaml", "epochs": 2, **SMALL}
    with pytest.raises(KeyboardInterrupt) as stopped:
        lockstep.train(data, callbacks=Interrupt, **settings)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    whole = lockstep.train(data, **settings)
    (line,) = re.findall(r"lockstep\.resume\(.+?\)", str(stopped.value))
    run = eval(line, {"lockstep": lockstep})
    assert run.folder != whole.folder
    assert run.history["epoch"].tolist() == [1, 2]
    assert_same_content(weights(run), weights(whole))


TERMINATED = """
import lockstep
from tests.lockstep.hooks import SMALL, Terminate
lockstep.train("set/data.yaml", model="tiny.yaml", epochs=3, callbacks=Terminate, name="saved", **SMALL)
print("goes on")
"""


def test_a_signal_to_end_the_program_ends_it_once_the_run_is_saved(data, tmp_path):
    done = run_script(TERMINATED, tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "goes on" not in done.stdout
    assert (tmp_path / "runs/train/saved/last.pt").is_file()


@pytest.mark.parametrize(
    ("error", "raised", "line"),
    [
        (UserError("data.yaml: is wrong"), lockstep.Error, "data.yaml: is wrong"),
        (FailedCheck("a.onnx: differs"), lockstep.Error, "a.onnx: differs"),
        (MemoryError(), lockstep.Error, "not enough memory..."),
        (LookupError("no such key"), LookupError, "no such key"),  # a bug is itself
    ],
)
def test_an_error_is_the_line_of_the_command(replaced, error, raised, line, capsys):
    def fail() -> None:
        raise error

    replaced(fail)
    with refused(line, raised):
        lockstep.train("data.yaml")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("world_size", "seen"), [("1", False), ("2", True)])
def test_the_variables_of_a_launcher_of_one_process_are_hidden(replaced, monkeypatch, world_size, seen):
    """Otherwise, a second command would join the launcher's store as the same rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    found = []
    replaced(lambda: found.append("RANK" in os.environ))
    lockstep.val("best.pt")
    assert found == [seen]
    assert os.environ["RANK"] == "0"


def test_the_package_is_imported_without_torch():
    code = "import sys, lockstep.api; print({'torch', 'numpy'} & set(sys.modules))"
    interpreter = Path(sys.prefix, "bin", "python")  # not one that has imported it
    done = subprocess.run([interpreter, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_export_has_its_own_process_whose_error_is_the_line(tmp_path):
    with refused("none.pt: no such file", lockstep.Error):
        lockstep.export(tmp_path / "none.pt", format="torchscript")
