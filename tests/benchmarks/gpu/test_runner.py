"""The runner of benchmarks/gpu.sh: which parts it runs, what it reports, and when it stops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.environment import ROOT
from benchmarks.gpu.calls import CALLS, candidates, with_providers
from benchmarks.gpu.parts import DRY_RUN_SIZES, Part, Parts
from benchmarks.gpu.runner import Outcome, Runner, chosen_by_call, chosen_parts, main, outcome_of, run_for
from tests.benchmarks.gpu.stand_ins import all_parts
from utils.errors import UserError

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


def test_again_runs_any_part_of_the_first_call_by_its_name():
    """Each name selects one part, and everything that the part needs is made for it."""
    parts = all_parts()
    everything = candidates("again", parts)
    for call in ("first", "again"):
        for part in CALLS[call].choose(parts):
            assert [found.name for found in chosen_parts("again", part.name, parts)] == [part.name]
    assert [part.name for part in CALLS["again"].choose(parts)] == [
        part.name for part in chosen_parts("again", "", parts)
    ]
    assert len({part.name for part in everything}) == len(everything)
    exported = chosen_parts("again", "exported files", parts)
    made = [part.name for part in with_providers(exported, parts)]
    assert made == ["data set, small", "trains with one GPU", "exported files score as the checkpoint"]


@pytest.mark.parametrize(("pattern", "message"), [("no such part", "matches no part of first"), ("(", "not a regular")])
def test_a_pattern_without_parts_is_refused(pattern: str, message: str):
    with pytest.raises(SystemExit, match=message):
        chosen_by_call(["first"], pattern, all_parts())


def test_a_peer_that_does_not_exist_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PEER", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"peer .*/python: no such program"):
        main(["--list"])


def test_a_part_without_what_it_needs_fails_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An intermediate result is made once, not for each part that needs it."""
    monkeypatch.setenv("BUDGET_S", "60")
    parts = Parts(DRY_RUN_SIZES, tmp_path)
    works = [sys.executable, "-c", ""]
    monkeypatch.setattr(parts, "provider", lambda product: Part("makes nothing", 1, works, product="weights"))
    runner = Runner(parts, tmp_path / "out")
    runner.run_call(
        "first", [Part("one", 1, works, ["weights"]), Part("two", 1, works, ["weights"]), Part("b", 1, works)]
    )
    verdicts = [(outcome.name, outcome.verdict) for outcome in runner.outcomes]
    assert verdicts == [("makes nothing", "PASS"), ("one", "FAIL"), ("two", "FAIL"), ("b", "PASS")]
    assert runner.outcomes[1].lines == ["! missing: weights (by: makes nothing)"]


@pytest.mark.parametrize(("expected_s", "verdict"), [(100, "SKIP"), (0, "FAIL")])
def test_a_part_that_the_end_of_its_call_stops_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_s: int, verdict: str
):
    """It has failed only if it has taken longer than expected."""
    monkeypatch.setenv("BUDGET_S", "1")
    monkeypatch.setattr("benchmarks.gpu.runner.TOO_LATE_S", 0.1)
    sleeps = [sys.executable, "-c", "import time; print('figure: begun', flush=True); time.sleep(60)"]
    runner = Runner(Parts(DRY_RUN_SIZES, tmp_path), tmp_path / "out")
    runner.run_call("first", [Part("sleeps", expected_s, sleeps), Part("too late", 1, sleeps)])
    first, second = runner.outcomes
    assert (first.verdict, first.lines[:2]) == (verdict, ["begun", "! stopped after 1 s"])
    assert (second.verdict, second.lines) == ("SKIP", ["the time is used up"])


def test_limits_may_be_fractions_and_must_be_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A quarter of two seconds is up before the part ends."""
    monkeypatch.setenv("BUDGET_S", "2")
    monkeypatch.setenv("SLOWDOWN", "0.25")
    monkeypatch.setattr("benchmarks.gpu.runner.TOO_LATE_S", 0.1)
    runner = Runner(Parts(DRY_RUN_SIZES, tmp_path), tmp_path / "out")
    runner.run_call("first", [Part("sleeps", 100, [sys.executable, "-c", "import time; time.sleep(60)"])])
    assert [outcome.verdict for outcome in runner.outcomes] == ["SKIP"]
    for text in ("fast", "-1", "inf"):
        monkeypatch.setenv("SLOWDOWN", text)
        with pytest.raises(SystemExit, match=f"SLOWDOWN={text}: expected a number"):
            Runner(Parts(DRY_RUN_SIZES, tmp_path), tmp_path / "out")


def test_a_later_call_uses_what_an_earlier_one_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BUDGET_S", "60")
    parts = Parts(DRY_RUN_SIZES, tmp_path)
    works = [sys.executable, "-c", ""]
    parts.path_of("small").parent.mkdir()
    parts.path_of("small").touch()
    runner = Runner(parts, tmp_path / "out")
    runner.run_call("first", [Part("one", 1, works, ["small"])])
    assert [outcome.name for outcome in runner.outcomes] == ["one"]


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


def test_the_environment_is_shown_on_a_bare_machine(tmp_path: Path):
    done = gpu_script(tmp_path, "--dry", ONLY="first", PARTS="environment")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [row.split("|")[4].strip() for row in done.stdout.splitlines() if row.startswith("| ")][2:]
    assert lines[0].startswith("OpenCV ")
    assert lines[1].startswith("torch ")
    assert lines[-1] == "commit unknown"


@pytest.mark.slow
@pytest.mark.parametrize(("call", "parts"), [*((call, "") for call in CALLS), ("again", "detects")])
def test_a_dry_run_passes_and_its_table_names_every_part(tmp_path: Path, call: str, parts: str):
    """Parts whose packages are missing are skipped."""
    done = gpu_script(tmp_path, "--dry", ONLY=call, PARTS=parts)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out" / "gpu.txt").read_text()
    assert table.strip() in done.stdout
    named = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")]
    catalog = Parts(DRY_RUN_SIZES, tmp_path)
    wanted = list(with_providers(chosen_parts(call, parts, catalog), catalog))
    assert {part.name for part in wanted} <= set(named)
    log = (tmp_path / "out" / "gpu.log").read_text()
    assert all(f"===== {part.name}: " in log for part in wanted if not catalog.is_skipped(part))
