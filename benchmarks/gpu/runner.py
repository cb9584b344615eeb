"""Runs the parts of `benchmarks/gpu.sh` one after another and writes a table of their results. Uses only the standard
library, so that a missing package fails only the parts that need it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.command import ROOT, find_peer, run_benchmark
from benchmarks.gpu.parts import BUDGETS_S, DRY_RUN_SIZES, Part, Parts, Sizes

# A part is stopped after this multiple of its expected time, but not before this many seconds.
PATIENCE = 2.5
MIN_LIMIT_S = 60
TOO_LATE_S = 5.0  # no part starts with less time left
GRACE_S = 5.0  # between SIGTERM and SIGKILL
LAST_LINES = 4  # number of lines of a failed part's output in the table
WIDTH = 400  # maximum characters of a line in the table
HEADER = "| part | verdict | seconds (expected) | figure or failure |\n| --- | --- | --- | --- |"


@dataclass(frozen=True)
class Outcome:
    """Result of a part. ``verdict``: PASS, FAIL or SKIP; ``lines``: figures, and why the part failed or was skipped."""

    name: str
    verdict: str
    seconds: float
    expected_s: int
    lines: list[str]

    def rows(self) -> Iterator[str]:
        first = [self.name, self.verdict, f"{self.seconds:.0f} ({self.expected_s})"]
        for number, line in enumerate(self.lines or [""]):
            cells = first if number == 0 else ["", "", ""]
            yield "| " + " | ".join([*cells, line[:WIDTH].replace("|", "/")]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks/gpu.sh", description="Runs the parts of the benchmark on a GPU.")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--list", action="store_true", help="list the parts and run none")
    # From the environment, by gpu.sh.
    parser.add_argument("--only", choices=("", *BUDGETS_S), default="", help="one call; default: all")
    parser.add_argument("--parts", default="", help="regular expression: parts with these names")
    parser.add_argument("--peer", default="", help="Python of an environment that has Ultralytics; empty: ours alone")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.txt and gpu.log")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds a call; 0: those of the call")
    parser.add_argument("--slowdown", type=float, default=1.0, help="factor for all limits")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds that have passed before")
    options = parser.parse_args()
    calls = [options.only] if options.only else list(BUDGETS_S)
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        sizes = DRY_RUN_SIZES if options.dry else Sizes()
        parts = Parts(sizes, Path(folder), find_peer(options.peer))
        try:
            chosen = {call: parts.chosen(call, options.parts) for call in calls}
        except re.error as error:
            sys.exit(f"PARTS={options.parts}: not a regular expression ({error})")
        if not any(chosen.values()):
            sys.exit(f"PARTS={options.parts}: matches no part of {', '.join(calls)}; --list has their names")
        if options.list:
            for call in calls:
                print(listed(call, chosen[call], parts))
            return
        runner = Runner(parts, options.out, slowdown=options.slowdown, spent_s=options.spent)
        for call in calls:
            runner.run_call(call, chosen[call], options.budget or BUDGETS_S[call])
    print(runner.table(), flush=True)
    sys.exit(any(outcome.verdict == "FAIL" for outcome in runner.outcomes))


def listed(call: str, chosen: Sequence[Part], parts: Parts) -> str:
    lines = [f"{call}, at most {BUDGETS_S[call]} s:", "| part | expected seconds | sum |", "| --- | --- | --- |"]
    total = 0
    for part in parts.with_makers(chosen):
        total += part.expected_s
        lines.append(f"| {part.name} | {part.expected_s} | {total} |")
    return "\n".join([*lines, ""])


class Runner:
    """Runs parts. Updates the log and the table after each part, so that they are complete whenever it is stopped.

    Args:
        out: folder of the log and the table.
        slowdown: factor for all limits of time.
        spent_s: seconds that the first call has spent before.
    """

    def __init__(self, parts: Parts, out: Path, *, slowdown: float = 1.0, spent_s: float = 0.0) -> None:
        self.outcomes: list[Outcome] = []
        self._parts = parts
        self._out = out
        self._slowdown = slowdown
        self._spent_s = spent_s
        self._call_times: list[str] = []
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.log").write_text("")

    def run_call(self, call: str, chosen: Sequence[Part], budget_s: float) -> None:
        budget_s *= self._slowdown
        began = time.monotonic() - self._spent_s
        self._spent_s = 0.0
        for part in self._parts.with_makers(chosen):
            if part.makes and part.makes.exists() and part not in chosen:  # an earlier call has made it
                continue
            outcome = self._run(part, began + budget_s - time.monotonic())
            self.outcomes.append(outcome)
            print(f"{outcome.verdict} {outcome.name}, {outcome.seconds:.0f} s", flush=True)
            self._write_table()
        self._call_times.append(f"{call} {time.monotonic() - began:.0f} of {budget_s:.0f} s")
        self._write_table()

    def _run(self, part: Part, left_s: float) -> Outcome:
        if part.skipped:
            return Outcome(part.name, "SKIP", 0, part.expected_s, [part.skipped])
        if left_s < TOO_LATE_S:
            return Outcome(part.name, "SKIP", 0, part.expected_s, ["the time is used up"])
        missing = [f"{path.name} (by: {self._parts.maker_of[path].name})" for path in part.needs if not path.exists()]
        if missing:
            return Outcome(part.name, "FAIL", 0, part.expected_s, [f"! missing: {', '.join(missing)}"])
        limit_s = max(MIN_LIMIT_S, PATIENCE * part.expected_s) * self._slowdown
        began = time.monotonic()
        code, output = run_for(part, min(limit_s, left_s))
        with open(self._out / "gpu.log", "a", encoding="utf-8") as log:
            log.write(f"\n===== {part.name}: {shlex.join(map(str, part.command))}\n{output}")
        outcome = outcome_of(part, code, output, time.monotonic() - began)
        if code is None and left_s < part.expected_s * self._slowdown:
            return replace(outcome, verdict="SKIP", lines=[*outcome.lines, "the time is used up"])
        return outcome

    def _write_table(self) -> None:
        (self._out / "gpu.txt").write_text(self.table() + "\n", encoding="utf-8")

    def table(self) -> str:
        verdicts = [outcome.verdict for outcome in self.outcomes]
        counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("PASS", "FAIL", "SKIP")]
        rows = [row for outcome in self.outcomes for row in outcome.rows()]
        return "\n".join([HEADER, *rows, "", "; ".join([", ".join(counts), *self._call_times])])


def run_for(part: Part, limit_s: float) -> tuple[int | None, str]:
    """Returns the exit code, None if the part was stopped after ``limit_s``, and its output."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [str(word) for word in part.command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            stop(process)
        output.seek(0)
        return code, output.read()


def stop(process: subprocess.Popen) -> None:
    """Ends a part and its processes: first with SIGTERM, so that launchers end their processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def outcome_of(part: Part, code: int | None, output: str, seconds: float) -> Outcome:
    """Returns the outcome of a part that ended with ``code``, None if it was stopped.

    A part that passes without figures, such as a training, is described by its last line.
    """
    lines = list(figures(output.splitlines()))
    rest = [line for line in output.splitlines() if line.strip() and not line.startswith(("figure: ", "|"))]
    if code != 0:
        lines.append(f"! stopped after {seconds:.0f} s" if code is None else f"! exit code {code}")
        lines += [f"! {line}" for line in rest[-LAST_LINES:]]
    elif not lines:
        lines = rest[-1:]
    return Outcome(part.name, "PASS" if code == 0 else "FAIL", seconds, part.expected_s, lines)


def figures(lines: Sequence[str]) -> Iterator[str]:
    """Yields the content of lines that begin with "figure:", and each row of a table in words."""
    header: list[str] = []
    for line in lines:
        if line.startswith("figure: "):
            yield line.removeprefix("figure: ")
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not header:
            header = cells
        elif set("".join(cells)) != {"-"}:
            named = [f"{name} {cell}" for name, cell in zip(header[1:], cells[1:]) if cell]
            yield f"{cells[0]}: {', '.join(named)}"


if __name__ == "__main__":
    run_benchmark(main)
