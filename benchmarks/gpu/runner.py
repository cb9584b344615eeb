"""Runs the parts of `benchmarks/gpu.sh` one after another and writes one table of their results. Uses only the standard
library, so that a part whose packages are missing does not prevent the others from running."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.parts import CALLS, DRY, Part, Sizes, data_part, parts_of
from benchmarks.speed.turns import ROOT

AT_LEAST_S, PATIENCE = 60, 2.5  # a part's limit: so many seconds, or times what is expected
TOO_LATE_S, GRACE_S = 5.0, 5.0  # with less time left nothing begins; what is stopped may tidy up for so long
SAID_AT_FAILURE, WIDTH = 4, 400  # last lines shown, and characters of a line
HEADER = "| part | verdict | seconds (expected) | figure or failure |\n| --- | --- | --- | --- |"


@dataclass(frozen=True)
class Outcome:
    name: str
    verdict: str  # PASS, FAIL, SKIP
    seconds: float
    expected_s: int
    lines: list[str]  # figures, and why it failed or was left out

    def rows(self) -> Iterator[str]:
        first = [self.name, self.verdict, f"{self.seconds:.0f} ({self.expected_s})"]
        for number, line in enumerate(self.lines or [""]):
            cells = [*(first if number == 0 else [""] * 3), line[:WIDTH].replace("|", "/")]
            yield "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.runner", description=__doc__.split("\n\n")[0])
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--list", action="store_true", help="name the parts and run none")
    options = parser.parse_args(argv)
    wanted = os.environ.get("ONLY", "")
    if wanted and wanted not in CALLS:
        sys.exit(f"ONLY={wanted}: expected one of {', '.join(CALLS)}")
    calls = [wanted] if wanted else list(CALLS)
    sizes = DRY if options.dry else Sizes()
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        parts = [
            part
            for part in parts_of(sizes, Path(folder), os.environ.get("PEER", ""))
            if part.call in calls and re.search(os.environ.get("PARTS", ""), part.name)
        ]
        if options.list:
            print(listed(parts, sizes))
            return
        runner = Runner(Path(folder), sizes, Path(os.environ.get("OUT", "runs/gpu")))
        for call in calls:
            runner.run_call(call, [part for part in parts if part.call == call])
    print(runner.table(), flush=True)
    sys.exit(any(outcome.verdict == "FAIL" for outcome in runner.outcomes))


def listed(parts: Sequence[Part], sizes: Sizes) -> str:
    lines = ["| call | part | expected seconds |", "| --- | --- | --- |"]
    for call in dict.fromkeys(part.call for part in parts):
        own = with_data([part for part in parts if part.call == call], sizes)
        lines += [f"| {call} | {part.name} | {part.expected_s} |" for part in own]
        lines.append(f"| {call} | all | {sum(part.expected_s for part in own)} |")
    return "\n".join(lines)


def with_data(parts: Sequence[Part], sizes: Sizes) -> list[Part]:
    """The parts of a call, each preceded by the part that writes its data if it is the first to need them."""
    result: list[Part] = []
    there: set[str] = set()
    for part in parts:
        if part.data and part.data not in there:
            there.add(part.data)
            result.append(data_part(part.call, part.data, sizes, Path()))
        result.append(part)
    return result


class Runner:
    """Updates the log and the table after each part, so that they are complete whenever the run is stopped."""

    def __init__(self, folder: Path, sizes: Sizes, out: Path) -> None:
        self.outcomes: list[Outcome] = []
        self._folder, self._sizes, self._out = folder, sizes, out
        self._slowdown = int(os.environ.get("SLOWDOWN", "1"))
        self._budget_s = int(os.environ.get("BUDGET_S", "500")) * self._slowdown
        self._ends = [f"{self._budget_s} s a call"]
        self._deadline, self._spent_s = 0.0, float(os.environ.get("SPENT_S", "0"))  # by what ran before this program
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.log").write_text("")

    def run_call(self, call: str, parts: Sequence[Part]) -> None:
        began = time.monotonic()
        self._deadline, self._spent_s = began + self._budget_s - self._spent_s, 0.0
        for part in parts:
            problem = self._provide(part)
            self._note(Outcome(part.name, "FAIL", 0, part.expected_s, [problem]) if problem else self._run(part))
        self._ends.append(f"{call} {time.monotonic() - began:.0f} s")
        self._write()

    def _provide(self, part: Part) -> str:
        """Creates the data set that a part needs if it is missing. Returns the reason if that fails, else an empty
        text."""
        if not part.data or (part.gpu_only and self._sizes.device == "cpu"):
            return ""
        if not (self._folder / part.data / "data.yaml").exists():
            self._note(self._run(data_part(part.call, part.data, self._sizes, self._folder)))
        return "" if (self._folder / part.data / "data.yaml").exists() else f"there is no data set {part.data}"

    def _run(self, part: Part) -> Outcome:
        left = self._deadline - time.monotonic()
        if part.gpu_only and self._sizes.device == "cpu":
            return Outcome(part.name, "SKIP", 0, part.expected_s, [part.gpu_only])
        if left < TOO_LATE_S:
            return Outcome(part.name, "SKIP", 0, part.expected_s, ["the time is used up"])
        limit = min(max(AT_LEAST_S, PATIENCE * part.expected_s) * self._slowdown, left)
        began = time.monotonic()
        code, text = run_for(part, limit)
        with open(self._out / "gpu.log", "a", encoding="utf-8") as log:
            log.write(f"\n===== {part.name}: {' '.join(part.command)}\n{text}")
        return judged(part, code, text, time.monotonic() - began, limit)

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(f"{outcome.verdict} {outcome.name}, {outcome.seconds:.0f} s", flush=True)
        self._write()

    def _write(self) -> None:
        (self._out / "gpu.txt").write_text(self.table() + "\n", encoding="utf-8")

    def table(self) -> str:
        counts = {verdict: sum(o.verdict == verdict for o in self.outcomes) for verdict in ("PASS", "FAIL", "SKIP")}
        rows = [row for outcome in self.outcomes for row in outcome.rows()]
        summary = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        return "\n".join([HEADER, *rows, "", f"{summary}; {'; '.join(self._ends)}"])


def run_for(part: Part, limit_s: float) -> tuple[int | None, str]:
    """Exit code, None for a part that was stopped after ``limit_s``, and what it printed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=os.environ | part.environment,
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
    """Ends a part and its processes: first with SIGTERM, upon which launchers end their processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def judged(part: Part, code: int | None, text: str, seconds: float, limit_s: float) -> Outcome:
    lines = list(figures(text.splitlines()))
    if code != 0:
        ended = f"stopped after {limit_s:.0f} s" if code is None else f"exit code {code}"
        last = [line for line in text.splitlines() if line.strip() and not line.startswith(("figure: ", "|"))]
        lines += [f"! {ended}", *(f"! {line}" for line in last[-SAID_AT_FAILURE:])]
    return Outcome(part.name, "FAIL" if code != 0 else "PASS", seconds, part.expected_s, lines)


def figures(lines: Sequence[str]) -> Iterator[str]:
    """The content of lines that begin with "figure:", and each row of a table in words."""
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
            yield f"{cells[0]}: " + ", ".join(f"{name} {cell}" for name, cell in zip(header[1:], cells[1:]) if cell)


if __name__ == "__main__":
    main()
