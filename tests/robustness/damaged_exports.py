"""Opens damaged exported models, each in its own process, and counts the outcomes.

    python tests/robustness/damaged_exports.py best.onnx best_openvino_model best.torchscript best.pt2 --count 100

A damaged file may open, because a changed weight cannot be detected; otherwise it must lead to one line that names it.
Everything else is a failure: another exception, a crash, more than `MEMORY_BYTES` or `SECONDS`, a command that the file
has started.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from engine.inference.open_model import open_model
from utils.errors import UserError

MEMORY_BYTES = 12 * 2**30  # address space
SECONDS = 120
CPU = torch.device("cpu")
KINDS = ("bytes", "block", "ones", "cut", "insert", "swap")


def damage(content: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """Returns ``content`` with one kind of damage, and the kind."""
    kind = str(rng.choice(KINDS))
    # Half of the damage is near the ends, where formats keep their tables.
    near = min(len(content), 4000)
    start = int(rng.integers(max(len(content) - 64, 1)))
    if rng.random() < 0.5:
        start = int(rng.integers(near)) if rng.random() < 0.5 else len(content) - 1 - int(rng.integers(near))
    changed = bytearray(content)
    stop = min(start + 64, len(content))
    if kind == "bytes":
        for position in rng.integers(max(start - 500, 0), min(start + 500, len(content)), int(rng.integers(1, 20))):
            changed[position] = int(rng.integers(256))
    elif kind == "block":
        changed[start:stop] = rng.bytes(stop - start)
    elif kind == "ones":
        changed[start:stop] = b"\xff" * (stop - start)
    elif kind == "cut":
        del changed[start:]
    elif kind == "insert":
        changed[start:start] = rng.bytes(int(rng.integers(1, 9)))
    else:
        other = int(rng.integers(max(len(content) - 64, 1)))
        changed[start:stop] = content[other : other + stop - start]
    return bytes(changed), f"{kind} at {start}"


def write_damaged(model: Path, target: Path, rng: np.random.Generator) -> str:
    """Writes a damaged copy of a file or folder, and returns what was done to it."""
    if model.is_dir():
        shutil.copytree(model, target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        file = files[int(rng.integers(len(files)))]
    else:
        shutil.copy(model, target)
        file = target
    content, what = damage(file.read_bytes(), rng)
    file.write_bytes(content)
    return f"{file.name}: {what}"


def open_alone(path: Path, log: Path) -> str:
    """Opens a model in a forked process; returns how it ended: "opened", "refused", or what is wrong."""
    process = os.fork()
    if process == 0:
        code = 2
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        try:
            code = _open(path)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return {0: "opened", 1: "refused", 3: "more than one line", 4: "a command"}.get(
        os.WEXITSTATUS(status), "an exception"
    )


def _open(path: Path) -> int:
    commands: list[object] = []

    def watch(event: str, arguments: tuple) -> None:
        ours = event == "subprocess.Popen" and arguments[0] == sys.executable  # a trial
        if event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen") and not ours:
            commands.append((event, arguments))

    sys.addaudithook(watch)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)
    torch.set_num_threads(1)
    code = 0
    try:
        open_model(path, device=CPU, trust=True)
    except UserError as error:
        print(error)
        code = 1 if "\n" not in str(error) and str(path) in str(error) else 3
    if commands:
        print(commands)
        code = 4
    return code


def open_damaged_copies(
    model: Path, count: int, *, seed: int = 0, keep: Path | None = None
) -> tuple[Counter, list[str]]:
    """Opens ``count`` damaged copies of a model. Returns the number of copies by outcome, and a line for each failure,
    whose copy is moved to the folder ``keep``."""
    outcomes: Counter[str] = Counter()
    failures = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, model.name)
            what = write_damaged(model, target, rng)
            log = Path(folder, "log")
            outcome = open_alone(target, log)
            outcomes[outcome] += 1
            if outcome in ("opened", "refused"):
                continue
            lines = log.read_text(errors="replace").strip().splitlines()
            failures.append(f"{model.name} {number} ({what}): {outcome}: {lines[-1][:200] if lines else ''}")
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                target.rename(keep / f"{number}{model.name}")
    return outcomes, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=100, help="damaged copies of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the copies that fail")
    options = parser.parse_args()
    has_failed = False
    for model in options.models:
        outcomes, failures = open_damaged_copies(model, options.count, seed=options.seed, keep=options.keep)
        print("\n".join([*failures, f"{model.name}: {dict(outcomes)}"]), flush=True)
        has_failed = has_failed or bool(failures)
    sys.exit(int(has_failed))


if __name__ == "__main__":
    main()
