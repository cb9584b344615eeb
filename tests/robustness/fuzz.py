"""Runs the program on damaged, unusual and hostile files, and reports those that it does not handle.

    python tests/robustness/fuzz.py --seconds 3600 [--seed 0] [--targets images yolo ...] [--folder runs/fuzz]
    python tests/robustness/fuzz.py --replay yolo:0:1234       # one input again, with its traceback

Whatever a file holds, the program must end in one line that names it (exit 2), go on and name it in its report, or go
on as if nothing had happened because nothing has: the boxes, pixels and tensors are those that are in the file. Never a
traceback, never ten seconds without an end, never a training set that is another in silence. `fuzz_inputs` makes the
changes, `fuzz_targets` says what is right.

Most inputs are tried in this process's forks, by the functions that the scripts call; the target "programs" runs whole
scripts. An input follows from its target, the seed and its number, so that it can be tried again. What is found is
printed, and its files are kept under ``--folder``. Exit status 1 if anything was.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.robustness.fuzz_targets import TARGETS, Case, Target, captured, is_plain

MEMORY = 6 << 30  # bytes that an input may take
MOST_OF_A_FINDING = 6000  # characters


@dataclass
class Tally:
    """What was tried and found."""

    inputs: Counter[str] = field(default_factory=Counter)  # by target
    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def text(self) -> str:
        lines = [f"{sum(self.inputs.values())} inputs in {self.seconds:.0f} s, {len(self.findings)} findings"]
        for name, count in sorted(self.inputs.items()):
            parts = [f"{n} {v}" for (target, v), n in self.verdicts.most_common() if target == name]
            lines.append(f"  {name:<12} {count:>6}: {', '.join(parts)}")
        return "\n".join(lines)


@dataclass
class Job:
    target: str
    number: int


def try_input(target: Target, seed: int, number: int, folder: Path) -> tuple[str, str]:
    """The verdict and, for a finding, its text. ``folder`` is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "xdg")
    said = captured()
    try:
        return target.run(Case(random.Random(f"{target.name}:{seed}:{number}"), folder, said)), ""
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        return "FINDING", f"{'; '.join(said)[:300]}\n{trace[-MOST_OF_A_FINDING:]}"


def _work(targets: dict[str, Target], seed: int, folder: Path, jobs: Connection) -> None:
    """In a forked process: tries the requested inputs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (job := jobs.recv()) is not None:
        jobs.send(try_input(targets[job.target], seed, job.number, folder))


class Worker:
    """A forked process that can be killed."""

    def __init__(self, targets: dict[str, Target], seed: int, folder: Path) -> None:
        self.folder = folder
        self.job: Job | None = None
        self.started = 0.0
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_work, args=(targets, seed, folder, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, job: Job) -> None:
        self.job, self.started = job, time.monotonic()
        self.pipe.send(job)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Schedule:
    """The jobs, in an order that depends only on the targets: each target as often as its weight says."""

    def __init__(self, targets: dict[str, Target]) -> None:
        self._targets = targets
        self._numbers = dict.fromkeys(targets, 0)

    def next(self) -> Job:
        name = min(self._numbers, key=lambda n: (self._numbers[n] + 1) / self._targets[n].weight)
        self._numbers[name] += 1
        return Job(name, self._numbers[name] - 1)


def fuzz(
    *,
    seconds: float,
    most: float = math.inf,
    seed: int = 0,
    names: Sequence[str] = (),
    folder: Path,
    workers: int = 1,
    aloud: bool = True,
) -> Tally:
    """Tries ``most`` inputs, or as many as the time allows. Findings are stored in ``folder``."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as temporary:
        seeds = Path(temporary) / "seeds"
        seeds.mkdir()
        targets = prepared(seeds, names)
        tally, schedule = Tally(), Schedule(targets)
        count = 0

        def start() -> Worker:
            nonlocal count
            count += 1
            return Worker(targets, seed, Path(temporary) / f"w{count}")

        def take(worker: Worker, verdict: str, text: str) -> None:
            job = worker.job
            assert job is not None
            tally.inputs[job.target] += 1
            tally.verdicts[job.target, verdict] += 1
            if text:
                name = f"{job.target}:{seed}:{job.number}"
                tally.findings.append(f"{name}: {text}")
                keep(worker.folder, folder / name.replace(":", "-"), text)
                if aloud:
                    print(f"\n{name}: {text}", flush=True)
            worker.job = None

        def goes_on() -> bool:
            tried = sum(tally.inputs.values()) + sum(worker.job is not None for worker in team)
            return time.monotonic() - begun < seconds and tried < most

        begun = time.monotonic()
        team = [start() for _ in range(workers)]
        try:
            while goes_on() or any(w.job for w in team):
                for worker in team:
                    if worker.job is None and goes_on():
                        worker.begin(schedule.next())
                ready = wait([w.pipe for w in team], timeout=0.5)
                for at, worker in enumerate(team):
                    if worker.job is None:
                        continue
                    if worker.pipe in ready:
                        try:
                            take(worker, *worker.pipe.recv())
                        except EOFError:
                            worker.process.join()
                            take(worker, "FINDING", f"the process died: exit status {worker.process.exitcode}")
                            worker.end()
                            team[at] = start()
                    elif time.monotonic() - worker.started > targets[worker.job.target].deadline_s:
                        take(worker, "FINDING", f"no end after {targets[worker.job.target].deadline_s:g} s")
                        worker.end()
                        team[at] = start()
        finally:
            for worker in team:
                worker.end()
        tally.seconds = time.monotonic() - begun
        return tally


def prepared(seeds: Path, names: Sequence[str]) -> dict[str, Target]:
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(seeds / "xdg")
    targets = {name: TARGETS[name]() for name in names or TARGETS}
    for target in targets.values():
        target.prepare(seeds)
    return targets


def keep(source: Path, target: Path, text: str) -> None:
    """Copies the plain files of a finding."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "finding.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
    for path in source.rglob("*"):
        if is_plain(path):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def replay(what: str) -> int:
    """Tries one input again, in this process."""
    name, seed, number = what.rsplit(":", 2)
    with tempfile.TemporaryDirectory(prefix="fuzz") as temporary:
        seeds = Path(temporary) / "seeds"
        seeds.mkdir()
        targets = prepared(seeds, [name])
        verdict, text = try_input(targets[name], int(seed), int(number), Path(temporary) / "w")
    print(f"{verdict}\n{text}")
    return 1 if text else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Feeds the program damaged, odd and hostile files.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=[], help="default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"), help="where findings are kept")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--replay", metavar="TARGET:SEED:NUMBER", help="try one input again")
    options = parser.parse_args()
    if options.replay:
        return replay(options.replay)
    tally = fuzz(
        seconds=options.seconds,
        seed=options.seed,
        names=options.targets,
        folder=options.folder,
        workers=options.workers,
    )
    print(tally.text())
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
