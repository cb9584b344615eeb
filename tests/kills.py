"""Kills a training at random moments and resumes it, until it has been killed often enough; then compares.

    python tests/kills.py --kills 100 [--worlds 1 2 4] [--seed 0] [--folder DIR]

Each launch is real processes, of as many ranks as chance says. At a random moment (often while a checkpoint is being
written: every second step writes one) one rank or all get SIGKILL, and what is left must end by itself. Checked:

- once a first checkpoint is there, a loadable last.pt always is;
- the steps that survive are those of the uninterrupted run: in every epoch each image once, none missed, and the images
  of each step the same;
- the final last.pt and best.pt (weights, EMA, optimiser state, BatchNorm statistics) and results.csv (but for times)
  are those of the uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from processes import Processes
from same_content import same_content
from tiny import write_dataset, write_model

from engine.results_csv import ResultsCsv
from utils.checkpoint_file import read_checkpoint

IMAGES, BATCH = 18, 4
STEPS_BETWEEN_KILLS = 4  # about; an epoch has five
GONE_S = 30.0  # an idle machine needs two


def flags(root: Path, name: str, epochs: int) -> list[str]:
    return ["--data", str(root / "set" / "data.yaml"), "--model", str(root / "tiny.yaml"), "--project", str(root),
            "--name", name, "--cache-dir", str(root / "cache"), "--imgsz", "64", "--batch-size", str(BATCH),
            "--device", "cpu", "--workers", "1", "--amp", "off", "--noplots", "--optimizer", "SGD", "--exist-ok",
            "--epochs", str(epochs), "--virtual-ranks", "4", "--deterministic", "--save-steps", "2",
            "--val-every", "4", "--set", "close_mosaic=1"]  # fmt: skip


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
    run = Processes(root / f"{name}.txt", odd=f"log:{logs}")
    resumed = (root / name / "last.pt").exists()
    run.ranks(world, *(["--resume", str(root / name)] if resumed else flags(root, name, epochs)))
    return run


def kill_at_a_random_moment(run: Processes, last: Path, chance: random.Random) -> bool:
    """False if the training ended first."""

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
    if starting:  # the others may wait for one that they have not met yet; a launcher tells them
        time.sleep(1)
        for process in run.started:
            process.terminate()
    return True


def killed_run(root: Path, kills: int, worlds: list[int], epochs: int, chance: random.Random) -> list[dict]:
    """Trains to the end, killed ``kills`` times. Returns by launch the steps at its start and what it logged."""
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
    """What survives of each launch is what came before the checkpoint that the next one went on from."""
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
    """Raises AssertionError where the killed run differs from the uninterrupted one."""
    write_dataset(root / "set", train=IMAGES, val=4)
    write_model(root / "tiny.yaml")
    epochs = 2 + kills * STEPS_BETWEEN_KILLS * BATCH // IMAGES
    with launch(root, "whole", 1, epochs, root / "logs" / "whole") as run:
        assert run.codes() == [0], run.output()
    launches = killed_run(root, kills, worlds, epochs, random.Random(seed))
    check_history(launches, logged(root / "logs" / "whole"))
    for name in ("last.pt", "best.pt"):
        same_content(*(read_checkpoint(root / run / name) for run in ("whole", "killed")))
    one, two = (ResultsCsv(root / run / "results.csv")._rows for run in ("whole", "killed"))
    assert [{**row, "time": ""} for row in one.values()] == [{**row, "time": ""} for row in two.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills a training again and again; the result must not notice.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prove(folder, kills=options.kills, worlds=options.worlds, seed=options.seed)
    print(f"{options.kills} kills in {time.monotonic() - begun:.0f} s: the same bits")


if __name__ == "__main__":
    main()
