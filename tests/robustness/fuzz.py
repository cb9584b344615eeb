"""Runs the program on damaged, unusual and hostile files, and reports those that it does not handle.

    python tests/robustness/fuzz.py --seconds 3600 [--seed 0] [--targets images yolo ...] [--folder runs/fuzz]
    python tests/robustness/fuzz.py --replay yolo:0:1234       # one input again, with its traceback

Whatever a file contains, the program must end with one line that names it (exit 2), continue and name it in its report,
or continue because nothing is wrong: the boxes, pixels and tensors are those in the file. There must never be a
traceback, a run of more than ten seconds, or a training set that has changed silently. Of tests/robustness/fuzzing,
`inputs` makes the changes, `world` makes the files to change, and `targets` checks the outcomes.

Inputs are tried in a fork of this process, by the functions that the scripts call. An input follows from its target,
the seed and its number, so that it can be tried again. Findings are printed, and their files are kept under
``--folder``. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.robustness.fuzzing.targets.caches import image_cache, index_cache
from tests.robustness.fuzzing.targets.case import Case, Target, captured
from tests.robustness.fuzzing.targets.checkpoints import checkpoints, safetensors
from tests.robustness.fuzzing.targets.command_lines import command_lines
from tests.robustness.fuzzing.targets.file_kinds import kinds
from tests.robustness.fuzzing.targets.images import images
from tests.robustness.fuzzing.targets.labels import labels
from tests.robustness.fuzzing.targets.yaml_files import data_yaml, model, recipe
from tests.robustness.fuzzing.world import World, limit_memory
from utils.errors import UserError

MAX_FINDING_CHARACTERS = 6000
# A target changes one file in a folder of its own, and calls the program on it as its scripts do. What is right is
# decided by other means, in `fuzzing.targets`; everything else must end in one line that names the file. One target has
# no files: command lines.
TARGETS = {
    "images": Target(images, ("pictures",), 3.0),
    "yolo": Target(functools.partial(labels, kind="yolo"), ("labeled",), 3.0),
    "voc": Target(functools.partial(labels, kind="voc"), ("labeled",), 2.0),
    "coco": Target(functools.partial(labels, kind="coco"), ("labeled",), 2.0),
    "data-yaml": Target(data_yaml, ("labeled",), 2.0),
    "recipe": Target(recipe),
    "model": Target(model, ("labeled",)),
    "checkpoints": Target(checkpoints, ("checkpoints", "last"), 3.0),
    "safetensors": Target(safetensors, ("safetensors",), 2.0),
    "index-cache": Target(index_cache, ("index_cache",), 1.5),
    "image-cache": Target(image_cache, ("image_cache",)),
    "kinds": Target(kinds, ("labeled", "trained")),
    "command-lines": Target(command_lines),
}
Outcome = tuple[str, str]  # the verdict and, for a finding, its text


@dataclass
class Tally:
    """Counts of what was tried and found."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by target and verdict
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def inputs(self) -> Counter[str]:
        """The number of inputs by target."""
        return Counter(target for target, _ in self.verdicts.elements())

    def text(self) -> str:
        lines = [f"{self.inputs.total()} inputs in {self.seconds:.0f} s, {len(self.findings)} findings"]
        for name, count in sorted(self.inputs.items()):
            parts = [f"{n} {v}" for (target, v), n in self.verdicts.most_common() if target == name]
            lines.append(f"  {name:<12} {count:>6}: {', '.join(parts)}")
        return "\n".join(lines)


def try_input(name: str, seed: int, number: int, folder: Path, world: World) -> Outcome:
    """Tries one input. ``folder`` is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "xdg")
    case = Case(random.Random(f"{name}:{seed}:{number}"), folder, world)
    case.messages = captured()
    try:
        try:
            return TARGETS[name].run(case), ""
        except UserError as error:
            return case.check_line(error), ""
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        return "FINDING", f"{'; '.join(case.messages)[:300]}\n{trace[-MAX_FINDING_CHARACTERS:]}"


class Worker:
    """A forked process that tries inputs, one after another, until one takes too long or kills it."""

    def __init__(self, seed: int, folder: Path, world: World) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._work, args=(seed, folder, world, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @staticmethod
    def _work(seed: int, folder: Path, world: World, pipe: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        limit_memory()
        while True:
            name, number = pipe.recv()
            pipe.send(try_input(name, seed, number, folder, world))

    def try_input(self, name: str, number: int) -> Outcome:
        self._pipe.send((name, number))
        deadline_s = TARGETS[name].deadline_s
        if not self._pipe.poll(deadline_s):
            return "FINDING", f"no end after {deadline_s:g} s"
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            return "FINDING", f"the process died: exit status {self._process.exitcode}"

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def fuzz(
    *, seconds: float, max_inputs: float = math.inf, seed: int = 0, names: Sequence[str] = (), folder: Path
) -> Tally:
    """Tries ``max_inputs`` inputs, or as many as the time allows, distributed to the targets by their weights. Findings
    are stored in ``folder``."""
    names = names or list(TARGETS)
    with tempfile.TemporaryDirectory(prefix="fuzz") as temporary:
        world = prepared(Path(temporary), names)
        place = Path(temporary) / "input"
        tally = Tally()
        numbers = Counter[str]()
        started = time.monotonic()
        worker = Worker(seed, place, world)
        try:
            while (now := time.monotonic() - started) < seconds and numbers.total() < max_inputs:
                name = min(names, key=lambda n: (numbers[n] + 1) / TARGETS[n].weight)
                verdict, text = worker.try_input(name, numbers[name])
                tally.verdicts[name, verdict] += 1
                if text:
                    what = f"{name}:{seed}:{numbers[name]}"
                    tally.findings.append(f"{what}: {text}")
                    worker.end()
                    keep(place, folder / what.replace(":", "-"), text)
                    worker = Worker(seed, place, world)
                numbers[name] += 1
        finally:
            worker.end()
        tally.seconds = now
        return tally


def prepared(temporary: Path, names: Sequence[str]) -> World:
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(temporary / "xdg")
    (temporary / "world").mkdir()
    world = World(temporary / "world")
    for name in names:
        for need in TARGETS[name].needs:
            getattr(world, need)
    return world


def keep(source: Path, target: Path, text: str) -> None:
    """Copies the plain files of a finding: no pipes, and no sparse files of a terabyte."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "finding.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
    for path in source.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size < 2**26:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def replay(what: str) -> int:
    """Tries one input again, in this process."""
    name, seed, number = what.rsplit(":", 2)
    with tempfile.TemporaryDirectory(prefix="fuzz") as temporary:
        world = prepared(Path(temporary), [name])
        verdict, text = try_input(name, int(seed), int(number), Path(temporary) / "input", world)
    print(f"{verdict}\n{text}")
    return 1 if text else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Feeds the program damaged, odd and hostile files.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=[], help="default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"), help="where findings are kept")
    parser.add_argument("--replay", metavar="TARGET:SEED:NUMBER", help="try one input again")
    options = parser.parse_args()
    if options.replay:
        return replay(options.replay)
    tally = fuzz(seconds=options.seconds, seed=options.seed, names=options.targets, folder=options.folder)
    print("\n\n".join([*tally.findings, tally.text()]))
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
