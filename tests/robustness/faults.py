"""Makes the file system fail at random places during a training, follows the advice that the training prints, and
compares the result with that of an undisturbed run.

    python tests/robustness/faults.py --runs 200 [--seed 0] [--first 0] [--worlds 1 2] [--folder DIR]

faults.c, compiled here and loaded with LD_PRELOAD, stands under the C library's calls. A run without faults
counts the calls on each class of files (checkpoints, results.csv, events, log, settings, locks, index and image caches,
images, labels, YAML); each run then draws a class, one of its calls, which one of those that were counted, and what
happens: the disk is full, an input/output error, EINTR, half of the bytes, a slow answer; once, for a stretch, or from
then on. A first start, a start with warm caches and a resumed run are struck, on one rank and two, with and without
``--cache``. Checked:

- every process ends by itself, with exit code 0, or with 2 and one ``error:`` line over all ranks, without a traceback;
- EINTR, short transfers and slow answers end nothing;
- once a checkpoint was written, a loadable last.pt is there, and what the line advises is possible;
- the run, or else what goes on from it without faults (``--resume`` where there is a checkpoint, the same command where
  there is none, on the same caches), ends with the bits of the undisturbed run: last.pt, best.pt and results.csv;
- the data set is untouched, nothing is left running, and no half-written file stays in the folder of the run.

Processes are forked from this one, which has imported torch; the shim is only active in them.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import hashlib
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

IMAGES, BATCH, EPOCHS = 12, 4, 2
DEADLINE_S, GONE_S = 120.0, 15.0
SWITCH = "LOCKSTEP_TEST_FAULTS"  # path of the compiled shim, in the process that has it preloaded

# By file class; the first that matches counts. Below the folder of all runs, * matches / too.
CLASSES = {
    "checkpoint": "*/runs/*/.last.pt*|*/runs/*/last.pt|*/runs/*/.best.pt*|*/runs/*/best.pt",
    "results.csv": "*/runs/*/*results.csv*",
    "events": "*/runs/*/events.*",
    "log": "*/runs/*/train.log",
    "settings": "*/runs/*/*settings.yaml*",
    "lock": "*/runs/*/.lock",
    "run folder": "*/runs|*/runs/*",
    "index cache": "*/cache/*.index*|*/cache/*.txt",
    "disk cache": "*/cache/*.lmdb*|*/cache/*.lock",
    "cache folder": "*/cache|*/cache/*",
    "images": "set/images*",
    "labels": "set/labels*",
    "yaml": "set/*.yaml|tiny.yaml",
    "ram cache": "lockstep-*.pixels*",
}
CALLS = ("open", "create", "list", "stat", "read", "write", "sync", "rename", "unlink", "truncate", "allocate", "mkdir",
         "close", "mmap", "copy")  # fmt: skip
KINDS = ("none", "ENOSPC", "EIO", "EINTR", "short", "slow")
HARMLESS = ("EINTR", "short", "slow")
# Errors that the kernel may return, for local and network file systems.
POSSIBLE = {
    **dict.fromkeys(("list", "stat", "unlink", "mmap"), ("EIO", "slow")),
    **dict.fromkeys(("rename", "mkdir"), ("ENOSPC", "EIO", "slow")),
    **dict.fromkeys(("open", "truncate"), ("EIO", "EINTR", "slow")),
    **dict.fromkeys(("create", "sync", "allocate"), ("ENOSPC", "EIO", "EINTR", "slow")),
    "read": ("EIO", "EINTR", "short", "slow"),
    "write": ("ENOSPC", "EIO", "EINTR", "short", "slow"),
    "copy": ("ENOSPC", "EIO", "EINTR", "short", "slow"),
    "close": ("ENOSPC", "EIO", "slow"),
}
CALL_WEIGHTS = {"read": 2, "write": 3}
KIND_WEIGHTS = {"slow": 1, "short": 3}  # of others 2
FOR_EVER = 10**6
_MOST_CLASSES = 16


class Table(ctypes.Structure):
    """``struct table`` of faults.c, in a file that all processes of a launch map."""

    _fields_ = (
        ("root", ctypes.c_char * 512),
        ("patterns", (ctypes.c_char * 160) * _MOST_CLASSES),
        *((name, ctypes.c_long) for name in (
            "kind", "file_class", "call", "first", "length", "slow_us", "whole_disk", "strikes", "begun",
            "checkpoints_before",
        )),
        ("counts", (ctypes.c_long * len(CALLS)) * _MOST_CLASSES),
    )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The conditions of a run with a fault."""

    start: str  # "cold", "warm" or "resume"
    cache: str  # --cache
    world: int


@dataclass(frozen=True)
class Fault:
    file_class: str
    call: str
    kind: str
    first: int  # the number of the first call that fails, from 1
    length: int  # calls
    whole_disk: bool = False  # from then on all calls that need space
    slow_s: float = 0.0

    def __str__(self) -> str:
        many = "forever" if self.length >= FOR_EVER else f"{self.length} times"
        where = ", the whole disk" if self.whole_disk else ""
        return f"{self.kind} at {self.call} {self.first} of {self.file_class}, {many}{where}"


@dataclass
class Outcome:
    codes: list[int]
    output: str
    counts: dict[tuple[str, str], int]
    strikes: int
    checkpoints_before: int
    seconds: float
    problems: list[str] = field(default_factory=list)


class Bench:
    """The environment of the runs: a data set, an undisturbed run, and the counts of its calls."""

    def __init__(self, root: Path) -> None:
        from tests.helpers.tiny import write_dataset, write_model

        self.root = root
        self._shim = ctypes.CDLL(os.environ[SWITCH])
        self._counts: dict[Setting, dict[tuple[str, str], int]] = {}
        write_dataset(root / "set", train=IMAGES, val=4)
        write_model(root / "tiny.yaml")
        self.data_digest = self._digest_of_data()
        self._import_what_a_run_imports()
        self.whole = self._undisturbed("whole", Setting("cold", "none", 1))
        self._undisturbed("stopped", Setting("cold", "none", 1), stop_at=3)

    def _undisturbed(self, name: str, setting: Setting, stop_at: int | None = None) -> Path:
        outcome = self.launch(name, setting.world, self.command(name, setting), stop_at=stop_at)
        assert outcome.codes == [0 if stop_at is None else 75], outcome.output
        return self.root / name / "runs" / "exp"

    def _import_what_a_run_imports(self) -> None:
        names = self.root / "modules"
        outcome = self.launch("first", 1, self.command("first", Setting("cold", "disk", 1)), modules_to=names)
        assert outcome.codes == [0], outcome.output
        for name in names.read_text().split():
            try:
                importlib.import_module(name)
            except Exception:  # made by a module under a name that cannot be imported
                continue

    def _digest_of_data(self) -> str:
        digest = hashlib.sha256()
        for path in sorted((self.root / "set").rglob("*")):
            digest.update(f"{path}\0".encode() + (path.read_bytes() if path.is_file() else b""))
        return digest.hexdigest()

    def command(self, name: str, setting: Setting) -> list[str]:
        folder = self.root / name
        if setting.start == "resume":
            return ["--resume", str(folder / "runs" / "exp"), "--cache-dir", str(folder / "cache"), "--cache",
                    setting.cache]  # fmt: skip
        return ["--data", str(self.root / "set" / "data.yaml"), "--model", str(self.root / "tiny.yaml"),
                "--project", str(folder / "runs"), "--cache-dir", str(folder / "cache"), "--cache", setting.cache,
                "--imgsz", "64", "--batch-size", str(BATCH), "--device", "cpu", "--workers", "1", "--amp", "off",
                "--noplots", "--optimizer", "SGD", "--epochs", str(EPOCHS), "--virtual-ranks", "4", "--deterministic",
                "--save-minutes", "1e-6", "--set", "close_mosaic=1", "close_scale=1"]  # fmt: skip

    def prepare(self, name: str, setting: Setting) -> None:
        """Prepares the folder as it is before a run of this setting."""
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "runs").mkdir(parents=True)
        if setting.start == "resume":
            shutil.copytree(self.root / "stopped" / "runs" / "exp", folder / "runs" / "exp")
        if setting.start != "cold":
            shutil.copytree(self.root / ("first" if setting.cache == "disk" else "whole") / "cache", folder / "cache")

    def counts(self, setting: Setting) -> dict[tuple[str, str], int]:
        """Counts of an undisturbed run by class and call; its result must also equal the reference."""
        if setting not in self._counts:
            self.prepare("counted", setting)
            outcome = self.launch("counted", setting.world, self.command("counted", setting))
            assert outcome.codes == [0] * setting.world, outcome.output
            assert not (different := self.difference("counted")), (setting, different)
            self._counts[setting] = outcome.counts
        return self._counts[setting]

    def launch(
        self,
        name: str,
        world: int,
        command: Sequence[str],
        fault: Fault | None = None,
        *,
        stop_at: int | None = None,
        modules_to: Path | None = None,
    ) -> Outcome:
        """Runs train.py in ``world`` forked processes until they end or the deadline passes."""
        from utils.distributed.spawn import free_port

        folder = self.root / name
        folder.mkdir(exist_ok=True)
        log = folder / f"log{len(list(folder.glob('log*')))}.txt"
        table_path = self._write_table(folder / "table", fault)
        port, begun = free_port(), time.monotonic()
        sys.stdout.flush()
        processes = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if world > 1 else {}  # fmt: skip
                os.environ |= {key: str(value) for key, value in place.items()}
                self._train(command, log, table_path, stop_at, modules_to)
            processes.append(pid)
        codes, problems = _wait(processes, begun + DEADLINE_S)
        table = Table.from_buffer_copy(table_path.read_bytes())
        counts = {(c, call): int(table.counts[i][j]) for i, c in enumerate(CLASSES) for j, call in enumerate(CALLS)}
        return Outcome(
            codes,
            log.read_text(errors="replace"),
            {key: count for key, count in counts.items() if count},
            table.strikes,
            table.checkpoints_before,
            time.monotonic() - begun,
            problems,
        )

    def _write_table(self, path: Path, fault: Fault | None) -> Path:
        table = Table(root=os.fsencode(self.root), length=FOR_EVER)
        for number, patterns in enumerate(CLASSES.values()):
            table.patterns[number].value = patterns.encode()
        if fault is not None:
            table.kind, table.call = KINDS.index(fault.kind), CALLS.index(fault.call)
            table.file_class = list(CLASSES).index(fault.file_class)
            table.first, table.length, table.whole_disk = fault.first, fault.length, fault.whole_disk
            table.slow_us = int(fault.slow_s * 1e6)
        path.write_bytes(bytes(table))
        return path

    def _train(
        self, command: Sequence[str], log: Path, table: Path, stop_at: int | None, modules_to: Path | None
    ) -> None:
        """Runs train.py as a script in a forked process, and ends the process."""
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
        faulthandler.register(signal.SIGUSR2)
        import train
        from utils.entrypoint import run_main

        if stop_at is not None:
            _stop_itself(stop_at)
        self._shim.faults_begin(os.fsencode(table))
        run_main(train.main, list(command))
        if modules_to is not None:
            modules_to.write_text("\n".join(sys.modules))
        sys.exit(0)

    def difference(self, name: str) -> str:
        """How the finished run differs from the undisturbed one; "" if it does not."""
        from engine.hooks.result_files import CsvTracker
        from tests.helpers.same_content import same_content, untimed
        from utils.files.checkpoint import read_checkpoint

        run = newest_run(self.root / name)
        if run is None:
            return "there is no run"
        try:
            for file in ("last.pt", "best.pt"):
                same_content(read_checkpoint(self.whole / file), read_checkpoint(run / file), file)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        one, two = (CsvTracker(folder / "results.csv").table.rows for folder in (self.whole, run))
        if untimed(one.values()) != untimed(two.values()):
            return f"results.csv: {two}"
        return ""

    def strike(self, name: str, setting: Setting, fault: Fault) -> Outcome:
        """A run with a fault and, if it ends early, the run that continues it. ``problems`` lists what is wrong."""
        from utils.files.checkpoint import read_checkpoint

        self.prepare(name, setting)
        outcome = self.launch(name, setting.world, self.command(name, setting), fault)
        problems, said = outcome.problems, outcome.output
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if any(mark in said for mark in ("Traceback", "Exception ignored", "Logging error")):
            problems.append("a traceback")
        run = newest_run(self.root / name)
        last = run / "last.pt" if run else None
        if last:
            try:
                read_checkpoint(last)
            except Exception as error:
                problems.append(f"last.pt: {error}")
        elif outcome.checkpoints_before:
            problems.append("last.pt was there and is gone")
        if any(outcome.codes):
            if fault.kind in HARMLESS:
                problems.append("ended the run")
            if set(outcome.codes) != {2}:
                problems.append(f"exit codes {outcome.codes}")
            if len(errors) != 1:
                problems.append(f"{len(errors)} error lines")
            if "--resume" in "".join(errors) and not last:
                problems.append("advises --resume where there is nothing to resume")
            if "start again" in "".join(errors) and last:
                problems.append("advises to start again where there is a checkpoint")
            resumed = Setting("resume" if last else setting.start, setting.cache, setting.world)
            command = self.command(name, resumed)
            if last:
                command[1] = str(run)
            done = "epochs are done"
            healed = self.launch(name, setting.world, command)
            if any(healed.codes) and not (last and done in healed.output):
                problems.append(f"going on: exit codes {healed.codes}")
            problems += healed.problems
            outcome.output += f"\n--- going on: {' '.join(command[:2])} ...\n{healed.output}"
        elif errors:
            problems.append("an error line with exit code 0")
        if different := self.difference(name):
            problems.append(f"other bits: {different}")
        if self._digest_of_data() != self.data_digest:
            problems.append("the data set has changed")
        run = newest_run(self.root / name)
        left = [p.name for p in run.iterdir() if p.name.endswith(".tmp") or p.name == ".lock"] if run else []
        if left and fault.call != "unlink" and fault.file_class != "lock":
            problems.append(f"left in the folder: {left}")
        return outcome


def newest_run(folder: Path) -> Path | None:
    found = sorted((folder / "runs").glob("*/last.pt"), key=lambda path: path.stat().st_mtime_ns)
    return found[-1].parent if found else None


def _stop_itself(step: int) -> None:
    """Sends SIGTERM to this process before ``step``."""
    from engine.train.step import TrainStep

    take = TrainStep.__call__

    def stop(self, batches, images, updates, *rest) -> None:
        if updates == step:
            os.kill(os.getpid(), signal.SIGTERM)
        take(self, batches, images, updates, *rest)

    TrainStep.__call__ = stop


def _wait(processes: list[int], deadline: float) -> tuple[list[int], list[str]]:
    """Waits until the sessions of these processes have ended and returns the processes' exit codes; late ones are
    killed."""
    codes: dict[int, int] = {}
    problems = []
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for pid in set(processes) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    late = [pid for pid in processes if pid not in codes]
    if late:
        problems.append(f"does not end in {DEADLINE_S:.0f} s")
        for number, pause in ((signal.SIGUSR2, 1.0), (signal.SIGKILL, 0.0)):
            for pid in late:
                os.kill(pid, number)
            time.sleep(pause)
        for pid in late:
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    gone_by = time.monotonic() + GONE_S
    for pid in processes:
        while _has_members(pid):
            if time.monotonic() > gone_by:
                problems.append("processes are left")
                os.killpg(pid, signal.SIGKILL)
                break
            time.sleep(0.01)
    return [codes[pid] for pid in processes], problems


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def draw(bench: Bench, chance: random.Random, worlds: Sequence[int]) -> tuple[Setting, Fault]:
    """Draws a class of files, each with equal probability so that rare ones are covered, then one of the calls that a
    run makes on them, its number, and the fault."""
    file_class = chance.choice(sorted(CLASSES))
    cache = {"disk cache": "disk", "ram cache": "ram"}.get(file_class) or chance.choice(("none", "none", "disk", "ram"))
    setting = Setting(chance.choice(("cold", "cold", "warm", "resume")), cache, chance.choice(worlds))
    counts = {call: count for (c, call), count in bench.counts(setting).items() if c == file_class}
    if not counts:  # a warm start may not use a class
        return draw(bench, chance, worlds)
    call = chance.choice([call for call in sorted(counts) for _ in range(CALL_WEIGHTS.get(call, 1))])
    kind = chance.choice([kind for kind in POSSIBLE[call] for _ in range(KIND_WEIGHTS.get(kind, 2))])
    first = chance.randint(1, counts[call])
    lengths = [1, 1, chance.randint(2, 20)] if kind in HARMLESS else [1, 1, chance.randint(2, 20), FOR_EVER]
    whole_disk = kind == "ENOSPC" and chance.random() < 0.7
    length = chance.choice([chance.randint(2, 20), FOR_EVER]) if whole_disk else chance.choice(lengths)
    return setting, Fault(file_class, call, kind, first, length, whole_disk, chance.uniform(0.02, 0.4))


def prove(root: Path, *, runs: range, worlds: Sequence[int], seed: int) -> int:
    """Prints one line per run and a summary of the faults at the end. Returns the number of runs with a wrong
    result."""
    bench = Bench(root)
    wrong = 0
    by_class, by_kind, by_end = Counter(), Counter(), Counter()
    for number in runs:
        chance = random.Random(f"{seed} {number}")
        setting, fault = draw(bench, chance, worlds)
        outcome = bench.strike(str(number), setting, fault)
        ended = "went on" if not any(outcome.codes) else "ended and resumed"
        if not outcome.strikes:
            ended = "not reached"
        by_class[fault.file_class] += 1
        by_kind[fault.kind] += 1
        by_end[ended] += 1
        print(f"{number}: {setting.start}, --cache {setting.cache}, {setting.world} rank(s): {fault}: {ended}, "
              f"{outcome.seconds:.1f} s", flush=True)  # fmt: skip
        for line in (line for line in outcome.output.splitlines() if line.startswith("error: ")):
            print(f"    {line}")
        if outcome.problems:
            wrong += 1
            print(f"    WRONG: {'; '.join(outcome.problems)}")
            (root / f"wrong{number}.txt").write_text(f"{setting}\n{fault}\n{outcome.problems}\n{outcome.output}")
        shutil.rmtree(root / str(number), ignore_errors=True)
    for title, counter in (("files", by_class), ("faults", by_kind), ("ends", by_end)):
        print(f"{title}: {', '.join(f'{name} {count}' for name, count in counter.most_common())}")
    return wrong


def compile_shim(folder: Path) -> Path:
    """Raises FileNotFoundError without a C compiler, CalledProcessError if compilation fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    path = folder / "faults.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(path), str(HERE / "faults.c"), "-ldl"],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Lets the file system fail under a training; the result must not.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first; a run's draws depend on it and seed")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 1, 2], help="numbers of ranks, drawn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept, with the output of runs that went wrong; default: temporary")
    options = parser.parse_args()
    owner, begun = os.getpid(), time.monotonic()
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if SWITCH not in os.environ:
        shim = str(compile_shim(folder))
        os.environ |= {SWITCH: shim, "LD_PRELOAD": shim, "OMP_NUM_THREADS": "1"}
        again = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
        ended = subprocess.run(again, check=False)
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
        sys.exit(ended.returncode)
    import torch

    torch.set_num_threads(1)
    runs = range(options.first, options.first + options.runs)
    wrong = prove(folder.resolve(), runs=runs, worlds=options.worlds, seed=options.seed)
    assert os.getpid() == owner
    print(f"{len(runs) - wrong} of {len(runs)} runs right, in {time.monotonic() - begun:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
