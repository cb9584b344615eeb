"""Kills a training at random moments and resumes it, a number of times, and compares the result with that of an
uninterrupted run.

    python tests/robustness/kills.py --kills 100 [--worlds 1 2 4] [--seed 0] [--folder DIR]
    python tests/robustness/kills.py --phases 20 [--seed 0] [--folder DIR]      # kills of each of the phases below

Each launch is real processes, of as many ranks as chance says. At a random moment (often while a checkpoint is being
written: every second step writes one) one rank or all get SIGKILL, and what is left must end by itself. Checked:

- once a first checkpoint is there, a loadable last.pt always is;
- the steps that survive are those of the uninterrupted run: in every epoch each image once, none missed, and the images
  of each step the same;
- the final last.pt and best.pt (weights, EMA, optimizer state, BatchNorm statistics) and results.csv (but for times)
  are those of the uninterrupted run, bit for bit.

With ``--phases``, two ranks are killed (rank 0, rank 1 or both) at a file system call of a phase, or a moment after it:
while they stage the data, scan it, fill a cache, write checkpoints, or close after the last epoch. The same command, or
``--resume`` once there is a checkpoint, then goes on with what is there. Checked besides the bits: the files in the end
are those of the undisturbed run, so nothing that a kill has left stays.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.hooks.result_files import CsvTracker
from tests.helpers.processes import Processes
from tests.helpers.same_content import same_content, untimed
from tests.helpers.tiny import write_dataset, write_model
from utils.files.checkpoint import read_checkpoint

IMAGES, BATCH = 18, 4
STEPS_BETWEEN_KILLS = 4  # about; an epoch has five
GONE_S = 30.0  # an idle machine needs two
PHASE_EPOCHS = 2
# By phase: a call that begins it (and what its file must hold), and the calls that belong to it: odd_train.py.
PHASES = {
    "stage": (r"/stage/", "", r"/stage/|/set/"),
    "scan": (r"/cache/train-", "", r"changes .*/cache/|reads .*/(images|labels)/"),
    "ram": (r"/memory/lockstep-", "", r"/memory/|reads .*/images/"),
    "disk": (r"changes .*/cache/lockstep-", "", r"/cache/lockstep-|reads .*/images/train/"),
    "write": (r"/runs/", "", r"changes .*/runs/"),
    "close": (r"rename .*/results.csv$", rf"^{PHASE_EPOCHS},", r"changes .*/(runs|memory)/"),
}
ROUNDS = {"disk": ("stage", "scan", "scan", "disk", "write", "close"), "ram": ("scan", "ram", "ram", "write", "close")}


def flags(root: Path, name: str, epochs: int) -> list[str]:
    return ["--data", str(root / "set" / "data.yaml"), "--model", str(root / "tiny.yaml"), "--project", str(root),
            "--name", name, "--cache-dir", str(root / "cache"), "--imgsz", "64", "--batch-size", str(BATCH),
            "--device", "cpu", "--workers", "1", "--amp", "off", "--noplots", "--optimizer", "SGD", "--exist-ok",
            "--epochs", str(epochs), "--virtual-ranks", "4", "--deterministic",
            "--val-every", "4", "--set", "close_mosaic=1", "close_scale=1"]  # fmt: skip


def steps_done(checkpoint: Path) -> int:
    return read_checkpoint(checkpoint)["progress"]["updates"] if checkpoint.exists() else 0


def logged(folder: Path) -> dict[int, list[int]]:
    """The images of each step over all ranks of a launch."""
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a killed process may have written half a line
                step, images = line.split(":")
                steps[int(step)] += [int(image) for image in images.split()]
    return {step: sorted(images) for step, images in steps.items()}


def launch(root: Path, name: str, world: int, epochs: int, logs: Path) -> Processes:
    logs.mkdir(parents=True)
    run = Processes(root / f"{name}.txt", odd=f"save:2;log:{logs}")
    resumed = (root / name / "last.pt").exists()
    run.ranks(world, *(["--resume", str(root / name)] if resumed else flags(root, name, epochs)))
    return run


def kill_at_a_random_moment(run: Processes, last: Path, chance: random.Random) -> bool:
    """Returns False if the training ended first."""

    def written() -> int:
        return last.stat().st_mtime_ns if last.exists() else 0

    starting = chance.random() < 0.1
    if starting:
        time.sleep(chance.uniform(0, 6))
    else:
        for _ in range(chance.randint(1, 3)):
            before = written()
            while written() == before and any(process.poll() is None for process in run.started):
                time.sleep(0.001)
        time.sleep(chance.choice([0, chance.uniform(0, 0.02), chance.uniform(0, 0.3)]))
    if all(process.poll() is not None for process in run.started):
        return False
    if chance.random() < 0.5:
        chance.choice(run.started).kill()
    else:
        for process in run.started:
            process.kill()
    if starting:  # the others may wait for a rank that has not joined yet; a launcher would end them
        time.sleep(1)
        for process in run.started:
            process.terminate()
    return True


def killed_run(root: Path, kills: int, worlds: list[int], epochs: int, chance: random.Random) -> list[dict]:
    """Trains to the end with ``kills`` kills. Returns for each launch the steps at its start and what it logged."""
    launches: list[dict] = []
    last = root / "killed" / "last.pt"
    count = 0
    while True:
        logs, world, begun = root / "logs" / str(len(launches)), chance.choice(worlds), steps_done(last)
        with launch(root, "killed", world, epochs, logs) as run:
            if count < kills:
                count += kill_at_a_random_moment(run, last, chance)
                seconds = run.wait_gone(GONE_S)
                print(f"kill {count}: {world} rank(s), step {begun} -> {steps_done(last)}, gone in {seconds:.1f} s",
                      flush=True)  # fmt: skip
            codes = run.codes()
        launches.append({"begun": begun, "steps": logged(logs)})
        if all(code == 0 for code in codes):
            assert count == kills, f"ended after {count} kills of {kills}: give it more epochs"
            return launches


def check_history(launches: list[dict], whole: dict[int, list[int]]) -> None:
    """Checks that the surviving steps of each launch are those before the checkpoint that the next one resumed from."""
    ends = [launch["begun"] for launch in launches[1:]] + [max(whole)]
    history: dict[int, list[int]] = {}
    for launch, end in zip(launches, ends):
        for step in range(launch["begun"] + 1, end + 1):
            assert step not in history, f"step {step} is taken twice"
            history[step] = launch["steps"][step]
    assert history == whole
    per_epoch = -(-IMAGES // BATCH)
    for first in range(1, max(whole) + 1, per_epoch):
        images = sorted(image for step in range(first, first + per_epoch) for image in history[step])
        assert images == list(range(IMAGES)), f"epoch of step {first}: {images}"


def prove(root: Path, *, kills: int, worlds: list[int], seed: int) -> None:
    """Raises AssertionError if the killed run differs from the uninterrupted one."""
    write_dataset(root / "set", train=IMAGES, val=4)
    write_model(root / "tiny.yaml")
    epochs = 2 + kills * STEPS_BETWEEN_KILLS * BATCH // IMAGES
    with launch(root, "whole", 1, epochs, root / "logs" / "whole") as run:
        assert run.codes() == [0], run.output()
    launches = killed_run(root, kills, worlds, epochs, random.Random(seed))
    check_history(launches, logged(root / "logs" / "whole"))
    for name in ("last.pt", "best.pt"):
        same_content(*(read_checkpoint(root / run / name) for run in ("whole", "killed")))
    one, two = (CsvTracker(root / run / "results.csv").table.rows for run in ("whole", "killed"))
    assert untimed(one.values()) == untimed(two.values())


class PhaseKills:
    """Launches of one training on two ranks with ``--cache`` of the kind ``cache``, and of an undisturbed one."""

    def __init__(self, root: Path, cache: str, chance: random.Random) -> None:
        self.root, self.cache, self.chance = root, cache, chance
        self.done: Counter[str] = Counter()
        write_dataset(root / "set", train=IMAGES, val=4)
        write_model(root / "tiny.yaml")
        whole = root / "whole"
        with self._launch(whole) as run:
            assert run.codes() == [0, 0], run.output()
        self.calls = Counter(line.split()[0] for line in (whole / "calls").read_text().splitlines())
        self.files = files_left(whole)

    def _launch(self, folder: Path, phase: str = "", number: int = 0, who: str = "", delay_s: float = 0) -> Processes:
        """A launch in ``folder``; ``who``, by default rank 0, is killed ``delay_s`` after call ``number`` of
        ``phase``."""
        for name in ("memory", "runs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "mark").unlink(missing_ok=True)
        plan = {"phases": PHASES, "counts": str(folder / "calls"), "mark": str(folder / "mark")}
        plan |= {"phase": phase, "number": number, "delay_s": delay_s, "kills": who != "rank 1"}
        (folder / "plan.json").write_text(json.dumps(plan))
        small = "save:2;set:data.index.scan:_CHUNK:4;set:data.cache.disk:_BATCH_BYTES:30000"
        run = Processes(folder / "log.txt", odd=f"memory:{folder / 'memory'};calls:{folder / 'plan.json'};{small}")
        if (folder / "runs" / "exp" / "last.pt").exists():
            given = ["--resume", str(folder / "runs" / "exp")]
        else:
            given = [*flags(self.root, "exp", PHASE_EPOCHS), "--cache", self.cache, "--val-every", "1"]
            given += ["--project", str(folder / "runs"), "--cache-dir", str(folder / "cache")]
            given += ["--stage", str(folder / "stage")]
        run.ranks(2, *given)
        return run

    def round(self, name: str, phases: Sequence[str]) -> None:
        """A training that is killed in each of the phases, one launch after the other, and then runs to its end."""
        folder = self.root / name
        for phase in phases:
            if is_over(folder):
                break
            self._kill_in(folder, phase)
        over = is_over(folder)
        with self._launch(folder) as run:
            codes, text = run.codes(), run.output()
        assert codes == ([2, 2] if over else [0, 0]), text
        assert not over or f"all epochs are done ({PHASE_EPOCHS})" in text, text
        for kind in ("last.pt", "best.pt"):
            pair = [read_checkpoint(self.root / of / "runs" / "exp" / kind) for of in ("whole", name)]
            same_content(*(content | {"data": content["data"]["fingerprint"]} for content in pair))
        one, two = (CsvTracker(self.root / of / "runs" / "exp" / "results.csv").table.rows for of in ("whole", name))
        assert untimed(one.values()) == untimed(two.values())
        left = files_left(folder)
        if over:  # killed after the last checkpoint, with caches in memory, which the next run that has one removes
            left = Counter({name: count for name, count in left.items() if not name.startswith("memory/")})
        assert left == self.files, f"more: {left - self.files}, fewer: {self.files - left}"

    def _kill_in(self, folder: Path, phase: str) -> None:
        number = 1 + int(self.chance.random() * self.calls[phase])
        who = self.chance.choice(("rank 0", "rank 1", "both"))
        delay = self.chance.choice((0.0, self.chance.uniform(0, 0.02)))
        with self._launch(folder, phase, number, who, delay) as run:
            while not (folder / "mark").exists() and any(process.poll() is None for process in run.started):
                time.sleep(0.001)
            hit = (folder / "mark").exists()
            if hit and who != "rank 0":
                run.started[1].kill()
            seconds = run.wait_gone(GONE_S if hit else 120)
            codes = run.codes()
            text = run.output()
        self.done[phase] += hit
        at = f"at call {number} of {self.calls[phase]} and {1000 * delay:.0f} ms" if hit else "not reached"
        print(f"{folder.name}, {phase}: {who} {at}, gone in {seconds:.1f} s, {codes}", flush=True)
        assert "Traceback" not in text, text


def is_over(folder: Path) -> bool:
    """Whether the newest checkpoint is the final one, from which nothing can be resumed."""
    last = folder / "runs" / "exp" / "last.pt"
    return last.exists() and read_checkpoint(last)["progress"]["epoch"] == PHASE_EPOCHS


def files_left(folder: Path) -> Counter[str]:
    """The files that a training leaves, except for the event logs of each launch, and the lock that may remain next to
    a disk cache if the process that filled it was killed when it was complete."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return Counter(
        re.sub(r"(data-)[0-9a-f]{12}", r"\1KEY", name)
        for name in found
        if "/" in name and not re.search(r"tfevents|stall_rank|cache/.*lock$", name)
    )


def prove_phases(root: Path, *, kills: int, seed: int, rounds: dict[str, Sequence[str]] = ROUNDS) -> Counter[str]:
    """Kills in each phase of ``rounds`` until there are ``kills`` of each. Returns the number by phase."""
    done: Counter[str] = Counter()
    for cache, phases in rounds.items():
        (root / cache).mkdir(parents=True)
        training = PhaseKills(root / cache, cache, random.Random(f"{seed} {cache}"))
        number = 0
        while wanted := [phase for phase in phases if training.done[phase] < kills]:
            training.round(f"round{number}", wanted)
            number += 1
        done += training.done
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills a training again and again; the result must not notice.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--phases", type=int, default=0, help="kills of each phase, in place of random moments")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.phases:
            done = prove_phases(folder, kills=options.phases, seed=options.seed)
            counts = ", ".join(f"{phase} {count}" for phase, count in done.items())
            print(f"killed in {time.monotonic() - begun:.0f} s while: {counts}; the same bits and files")
            return
        prove(folder, kills=options.kills, worlds=options.worlds, seed=options.seed)
    print(f"{options.kills} kills in {time.monotonic() - begun:.0f} s: the same bits")


if __name__ == "__main__":
    main()
