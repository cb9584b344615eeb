"""The runner of benchmarks/gpu.sh: which parts it runs, what it reports, and when it stops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.command import ROOT
from benchmarks.gpu.parts import DRY_RUN_SIZES, Part, Parts
from benchmarks.gpu.runner import Outcome, Runner, outcome_of, run_for

pytestmark = pytest.mark.benchmarks
# Packages that a GPU machine with nothing but torch's own requirements and OpenCV lacks.
ABSENT = (
    "albumentations", "albucore", "imagecodecs", "lmdb", "openvino", "optuna", "polars", "pycocotools", "pytest",
    "scipy", "tifffile", "tqdm",
)  # fmt: skip
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""


def outcome(code: str, limit_s: float = 30.0) -> Outcome:
    part = Part("a part", 10, [sys.executable, "-c", code])
    return outcome_of(part, *run_for(part, limit_s), 1.0)


def test_figures_tables_and_the_last_output_of_a_failure_are_kept():
    table = "print('| what | ours | peer |'); print('| --- | --- | --- |'); print('| step [s] | 0.1 |  |')"
    found = outcome(f"print('noise'); print('figure: 3 ms')\n{table}")
    assert (found.verdict, found.lines) == ("PASS", ["3 ms", "step [s]: ours 0.1"])
    assert outcome("print('noise'); print('done: 2 epochs')").lines == ["done: 2 epochs"]
    found = outcome("import sys; print('figure: 3 ms'); print('why'); sys.exit('it differs')")
    assert (found.verdict, found.lines) == ("FAIL", ["3 ms", "! exit code 1", "! why", "! it differs"])
    assert all(row.count("|") == 5 for row in found.rows())


def test_a_part_without_what_it_needs_fails_and_the_others_run(tmp_path: Path):
    """An intermediate result is made once, not for each part that needs it."""
    parts = Parts(DRY_RUN_SIZES, tmp_path)
    works = [sys.executable, "-c", ""]
    lacking = tmp_path / "last.pt"
    parts.maker_of[lacking] = Part("makes nothing", 1, works, makes=lacking)
    runner = Runner(parts, tmp_path / "out")
    runner.run_call(
        "first", [Part("one", 1, works, [lacking]), Part("two", 1, works, [lacking]), Part("b", 1, works)], 60
    )
    verdicts = [(outcome.name, outcome.verdict) for outcome in runner.outcomes]
    assert verdicts == [("makes nothing", "PASS"), ("one", "FAIL"), ("two", "FAIL"), ("b", "PASS")]
    assert runner.outcomes[1].lines == ["! missing: last.pt (by: makes nothing)"]


@pytest.mark.parametrize(("expected_s", "verdict"), [(100, "SKIP"), (0, "FAIL")])
def test_a_part_that_the_end_of_its_call_stops_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_s: int, verdict: str
):
    """It has failed only if it has taken longer than expected."""
    monkeypatch.setattr("benchmarks.gpu.runner.TOO_LATE_S", 0.1)
    sleeps = [sys.executable, "-c", "import time; print('figure: begun', flush=True); time.sleep(60)"]
    runner = Runner(Parts(DRY_RUN_SIZES, tmp_path), tmp_path / "out")
    runner.run_call("first", [Part("sleeps", expected_s, sleeps), Part("too late", 1, sleeps)], 1)
    first, second = runner.outcomes
    assert (first.verdict, first.lines[:2]) == (verdict, ["begun", "! stopped after 1 s"])
    assert (second.verdict, second.lines) == ("SKIP", ["the time is used up"])


def without_git(folder: Path) -> Path:
    """A folder with all programs of PATH but git."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if not program.name.startswith("git") and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return folder


def gpu_script(tmp_path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs gpu.sh as on a bare machine: without `ABSENT` packages and without git."""
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "sitecustomize.py").write_text(WITHOUT.format(absent=ABSENT))
    variables = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "PEER": "", "PYTHONPATH": str(absent)}
    variables |= {"SLOWDOWN": "4", "PATH": str(without_git(tmp_path / "bin"))}
    return subprocess.run(
        ["bash", "benchmarks/gpu.sh", *flags],
        cwd=ROOT,
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("call", "parts"), [("first", ""), ("again", "detects")])
def test_a_dry_run_passes_and_its_table_names_every_part(tmp_path: Path, call: str, parts: str):
    """Parts whose packages are missing are skipped."""
    done = gpu_script(tmp_path, "--dry", ONLY=call, PARTS=parts)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out" / "gpu.txt").read_text()
    assert table.strip() in done.stdout
    named = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")]
    catalog = Parts(DRY_RUN_SIZES, tmp_path)
    wanted = catalog.with_makers(catalog.chosen(call, parts))
    assert {part.name for part in wanted} <= set(named)
    log = (tmp_path / "out" / "gpu.log").read_text()
    assert all(f"===== {part.name}: " in log for part in wanted if not part.skipped)
