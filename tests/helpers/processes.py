"""Training runs as real processes that a test can kill, signal and count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from utils.files.torch_file import read_checkpoint
from utils.process.launch import torchrun_variables
from utils.process.spawn import free_port

LAUNCHED = tuple(torchrun_variables(0, 1, 1))
FAULTY_TRAIN = str(ROOT / "tests/robustness/faulty_train.py")  # train.py, with the faults of a launch


def position(folder: Path) -> tuple[int, int]:
    """Returns the epoch and the batch after which the last.pt of a run continues."""
    progress = read_checkpoint(folder / "last.pt")["progress"]
    return progress["epoch"], progress["batch"]


class Processes:
    """A launch: the started processes and all their descendants, which are found by a mark in their environment."""

    def __init__(self, log: Path, faults: str = "", *, real: bool = False) -> None:
        """
        Args:
            faults: see tests/robustness/faulty_train.py.
            real: use real interpreters instead of those of `tests.helpers.preloaded`.
        """
        self.mark = uuid.uuid4().hex
        self.log = log
        self.started: list[subprocess.Popen] = []
        self._environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
        self._environment |= {"OMP_NUM_THREADS": "1", "TEST_MARK": self.mark, "FAULTS": faults}
        self.python = sys.executable if real else python()
        if real:
            self._environment.pop("PYTHON_EXEC", None)

    def start(self, command: list[str], folder: Path = ROOT, **environment: str) -> subprocess.Popen:
        with open(self.log, "ab") as file:
            process = subprocess.Popen(
                command, cwd=folder, env=self._environment | environment, stdout=file, stderr=subprocess.STDOUT
            )
        self.started.append(process)
        return process

    def ranks(self, world: int, *flags: str) -> None:
        """Starts ``world`` ranks without a launcher."""
        self.pair([[*flags]] * world)

    def pair(self, flags: list[list[str]], *, folders: list[Path] | None = None) -> None:
        """Starts a rank for each list of flags, on as many machines if these have working folders of their own."""
        port = free_port()
        for rank, rank_flags in enumerate(flags):
            environment = torchrun_variables(rank, len(flags), port) if len(flags) > 1 else {}
            if folders:
                environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
            self.start([self.python, FAULTY_TRAIN, *rank_flags], folders[rank] if folders else ROOT, **environment)

    def torchrun(self, options: list[str], *flags: str, agent: str = sys.executable) -> subprocess.Popen:
        """``agent``: the interpreter of torchrun itself."""
        return self.start([agent, "-m", "torch.distributed.run", *options, FAULTY_TRAIN, *flags])

    def alive(self) -> list[int]:
        """Returns the process ids of the remaining processes of this launch."""
        pids = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    marked = self.mark.encode() in (folder / "environ").read_bytes()
                    zombie = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
                except OSError:
                    continue
                if marked and not zombie:
                    pids.append(int(folder.name))
        return pids

    def launched(self) -> list[int]:
        """Returns the process ids of the ranks that `torchrun` has started."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.alive()}
        return sorted(
            pid for pid, c in commands.items() if b"faulty_train.py" in c and b"torch.distributed.run" not in c
        )

    def wait_gone(self, timeout: float = 60) -> float:
        """Waits until no process is left and returns the seconds. Fails with the remaining ones after ``timeout``."""
        started = time.monotonic()
        while left := self.alive():
            for process in self.started:
                process.poll()
            if time.monotonic() - started > timeout:
                names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if Path(f"/proc/{pid}").exists()]
                raise AssertionError(f"left after {timeout} s: {names}\n{self.output()}")
            time.sleep(0.05)
        return time.monotonic() - started

    def codes(self, timeout: float = 240) -> list[int]:
        """Waits until all started processes have ended and returns their exit codes."""
        try:
            return [process.wait(timeout) for process in self.started]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.output()) from None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """Waits for ``condition``; fails with the output, and the ranks' stacks, if it never becomes true or all
        processes end."""
        deadline = time.monotonic() + timeout
        while not condition():
            ended = all(process.poll() is not None for process in self.started)
            assert not ended or condition(), self.output()
            if time.monotonic() > deadline:
                for pid in self.launched():
                    os.kill(pid, signal.SIGUSR2)
                time.sleep(1)
                raise AssertionError(self.output())
            time.sleep(0.02)

    def kill_all(self) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        for process in self.started:
            process.wait()
