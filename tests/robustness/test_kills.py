"""SIGKILL does not change the result of a training that is resumed, as often as it is killed.

Each launch is real processes, of a random number of ranks. At a random moment (often while a checkpoint is being
written: every step writes one) one rank or all get SIGKILL, and the others must end by themselves. Checked:

- once there is a checkpoint, there always is a loadable last.pt;
- the steps that survive are those of the uninterrupted run: in every epoch each image once, and the images of each step
  the same;
- the final last.pt and best.pt (weights, EMA, optimizer state, BatchNorm statistics) and results.csv (but for times)
  are those of the uninterrupted run, bit for bit.

`prove_calls` kills rank 0 of two at a file system call: while it stages the data, scans it, fills a cache, writes a
checkpoint, or closes after the last epoch. The same command, or ``--resume`` once there is a checkpoint, continues. The
files in the end are also those of the uninterrupted run,
so nothing that a kill has left stays.
"""

from __future__ import annotations

import math
import random
import re
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.helpers.processes import Processes
from tests.helpers.same_content import assert_same_run
from tests.helpers.tiny import write_dataset, write_model
from utils.files.torch_file import read_checkpoint

IMAGES = 18
BATCH = 4
STEPS_BETWEEN_KILLS = 5  # at most, on average; an epoch has as many
GONE_S = 30.0  # an idle machine needs two
CALL_EPOCHS = 2


def flags(root: Path, name: str, epochs: int) -> list[str]:
    return ["--data", str(root / "set" / "data.yaml"), "--model", str(root / "tiny.yaml"), "--project", str(root),
            "--name", name, "--cache-dir", str(root / "cache"), "--imgsz", "64", "--batch-size", str(BATCH),
            "--device", "cpu", "--workers", "1", "--amp", "off", "--noplots", "--optimizer", "SGD", "--exist-ok",
            "--epochs", str(epochs), "--virtual-ranks", "4", "--deterministic",
            "--val-every", "4", "--save-minutes", "1e-6", "--set", "close_mosaic=1", "close_scale=1"]  # fmt: skip


def steps_done(checkpoint: Path) -> int:
    return read_checkpoint(checkpoint)["progress"]["updates"] if checkpoint.exists() else 0


def logged(folder: Path) -> dict[int, list[int]]:
    """Returns the images of each step over all ranks of a launch."""
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a killed process may have written half a line
                step, images = line.split(":")
                steps[int(step)] += [int(image) for image in images.split()]
    return {step: sorted(images) for step, images in steps.items()}


def launch(root: Path, name: str, world: int, epochs: int, logs: Path) -> Processes:
    logs.mkdir(parents=True)
    run = Processes(root / f"{name}.txt", faults=f"log:{logs}")
    resumed = (root / name / "last.pt").exists()
    run.ranks(world, *(["--resume", str(root / name)] if resumed else flags(root, name, epochs)))
    return run


def kill_at_a_random_moment(run: Processes, last: Path, chance: random.Random) -> bool:
    """Returns False if the training ended first."""

    def written() -> int:
        return last.stat().st_mtime_ns if last.exists() else 0

    def wait_for_write(timeout: float = math.inf) -> None:
        before = written()
        deadline = time.monotonic() + timeout
        while written() == before and time.monotonic() < deadline and any(p.poll() is None for p in run.started):
            time.sleep(0.001)

    starting = chance.random() < 0.1
    if starting:
        wait_for_write(chance.uniform(0, 6))
    else:
        for _ in range(chance.randint(1, 3)):
            wait_for_write()
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
        logs = root / "logs" / str(len(launches))
        world = chance.choice(worlds)
        first = steps_done(last)
        with launch(root, "killed", world, epochs, logs) as run:
            if count < kills:
                count += kill_at_a_random_moment(run, last, chance)
                seconds = run.wait_gone(GONE_S)
                print(
                    f"kill {count}: {world} rank(s), step {first} -> {steps_done(last)}, gone in {seconds:.1f} s",
                    flush=True,
                )
            codes = run.codes()
        launches.append({"first": first, "steps": logged(logs)})
        if all(code == 0 for code in codes):
            assert count == kills, f"ended after {count} kills of {kills}: give it more epochs"
            return launches


def check_history(launches: list[dict], whole: dict[int, list[int]]) -> None:
    """Checks that the surviving steps of each launch are those before the checkpoint that the next one resumed from."""
    ends = [launch["first"] for launch in launches[1:]] + [max(whole)]
    history: dict[int, list[int]] = {}
    for launch, end in zip(launches, ends):
        for step in range(launch["first"] + 1, end + 1):
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
    assert_same_run(root / "whole", root / "killed")


def files_left(folder: Path) -> Counter[str]:
    """Returns the files that a training leaves, except for the event logs of each launch, and the lock that may
    remain next to a disk cache if the process that filled it was killed when it was complete."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return Counter(
        re.sub(r"(data-)[0-9a-f]{12}", r"\1KEY", name)
        for name in found
        if "/" in name and not re.search(r"tfevents|cache/.*lock$", name)
    )


def prove_calls(root: Path, kills: int) -> None:
    """Kills rank 0 of two at ``kills`` of the calls by which it changes files, spread over a training that stages its
    data and caches images. Raises AssertionError if a run that continues from there ends with other bits or files."""
    write_dataset(root / "set", train=10, val=4)
    write_model(root / "tiny.yaml")

    def start(folder: Path, number: int) -> Processes:
        """Continues in ``folder``, and is killed at that call of this process; 0: never."""
        folder.mkdir(parents=True, exist_ok=True)
        faults = f"kill:{folder / 'calls'}:{number};set:data.scan:_CHUNK:4"
        run = Processes(root / f"{folder.name}.txt", faults=faults)
        given = [*flags(root, "exp", CALL_EPOCHS), "--cache", "ram", "--val-every", "1"]
        given += ["--project", str(folder / "runs"), "--cache-dir", str(folder / "cache")]
        given += ["--stage", str(folder / "stage")]
        if (folder / "runs" / "exp" / "last.pt").exists():
            given = ["--resume", str(folder / "runs" / "exp")]
        run.ranks(2, *given)
        return run

    whole = root / "whole"
    with start(whole, 0) as run:
        assert run.codes() == [0, 0], run.output()
    total = (whole / "calls").stat().st_size
    for kill in range(kills):
        number = 1 + int(total * (kill + 0.5) / kills)
        folder = root / f"killed at {number}"
        with start(folder, number) as run:
            assert run.started[0].wait(240) == -signal.SIGKILL, run.output()
            seconds = run.wait_gone(GONE_S)
            assert "Traceback" not in run.output(), run.output()
        print(f"killed at call {number} of {total}, gone in {seconds:.1f} s", flush=True)
        with start(folder, 0) as run:
            assert run.codes() == [0, 0], run.output()
        assert_same_run(whole / "runs" / "exp", folder / "runs" / "exp")
        left = files_left(folder)
        expected = files_left(whole)
        assert left == expected, f"more: {left - expected}, fewer: {expected - left}"


def test_a_kill_before_the_first_step_leaves_a_record_from_which_two_processes_make_the_same_run(tmp_path: Path):
    write_dataset(tmp_path / "set", train=8, val=20)
    write_model(tmp_path / "tiny.yaml")
    given = flags(tmp_path, "whole", 1)
    hold = tmp_path / "never"
    with Processes(tmp_path / "whole.txt") as whole, Processes(tmp_path / "log.txt", faults=f"hold:0:1:{hold}") as run:
        whole.ranks(1, *given)
        run.ranks(1, *given, "--name", "killed")
        last = tmp_path / "killed" / "last.pt"
        run.until(last.exists)
        run.started[0].kill()
        assert run.codes() == [-signal.SIGKILL]
        assert whole.codes() == [0], whole.output()
    assert steps_done(last) == 0
    with Processes(tmp_path / "resumed.txt") as run:
        run.ranks(2, "--resume", str(last.parent))
        assert run.codes() == [0, 0], run.output()
    assert_same_run(tmp_path / "whole", last.parent)


@pytest.mark.slow
def test_six_kills_do_not_change_the_result(tmp_path: Path):
    """The runs have one rank or two."""
    prove(tmp_path, kills=6, worlds=[1, 1, 2], seed=1)


def test_a_kill_at_a_call_that_changes_files_does_not_change_the_result(tmp_path: Path):
    """tests/data/cache/test_caches.py has a kill while a disk cache is filled."""
    prove_calls(tmp_path, 1)


@pytest.mark.slow
def test_forty_kills_at_calls_that_change_files_do_not_change_the_result(tmp_path: Path):
    prove_calls(tmp_path, 40)
