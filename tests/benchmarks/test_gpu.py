"""benchmarks/gpu.sh: its checks can fail, and one table names every part."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import equal, profile, syncs
from benchmarks.gpu.checks import PARTS
from benchmarks.gpu.parts import CALLS, DRY, Part, Sizes, parts_of
from benchmarks.gpu.runner import judged, run_for, with_data
from benchmarks.speed.training_step import build_step, loss_pass, make_batches
from engine.train.step import TrainStep
from tests.helpers.tiny import TINY_MODEL

pytestmark = pytest.mark.benchmarks
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ABSENT = ("albumentations", "lmdb", "tqdm")  # on the machine that the script is for


def python(code: str) -> Part:
    return Part("checks", "a part", 10, [sys.executable, "-c", code])


def outcome(code: str, limit_s: float = 30.0):
    part = python(code)
    return judged(part, *run_for(part, limit_s), 1.0, limit_s)


def test_figures_tables_and_the_last_output_of_a_failure_are_kept():
    table = "print('| what | ours | peer |'); print('| --- | --- | --- |'); print('| step [s] | 0.1 |  |')"
    found = outcome(f"print('noise'); print('figure: 3 ms')\n{table}")
    assert (found.verdict, found.lines) == ("PASS", ["3 ms", "step [s]: ours 0.1"])
    found = outcome("import sys; print('figure: 3 ms'); print('why'); sys.exit('it differs')")
    assert (found.verdict, found.lines) == ("FAIL", ["3 ms", "! exit code 1", "! why", "! it differs"])
    assert all(row.count("|") == 5 for row in found.rows())


def test_every_call_fits_its_time():
    """With the peer and the data sets, and with time left for a part that takes longer than expected."""
    for call in CALLS:
        parts = with_data([p for p in parts_of(Sizes(), Path(), "python") if p.call == call], Sizes())
        assert sum(part.expected_s for part in parts) <= 460, call


def test_every_named_check_exists():
    for where in PARTS.values():
        module, function = where.split(":")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)), where


def gpu_script(tmp_path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('absent', name={name!r})")
    variables = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "PEER": "", "PYTHONPATH": str(absent)}
    variables |= {"SLOWDOWN": "4"}
    return subprocess.run(
        ["bash", "benchmarks/gpu.sh", *flags],
        cwd=ROOT, env=os.environ | variables | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("call", "parts"), [*((call, "") for call in CALLS), ("compiled", "renderer")])
def test_a_dry_run_passes_and_its_table_names_every_part(tmp_path: Path, call: str, parts: str):
    """Parts whose packages are missing are skipped."""
    done = gpu_script(tmp_path, "--dry", ONLY=call, PARTS=parts)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out" / "gpu.txt").read_text()
    assert table.strip() in done.stdout
    named = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")]
    chosen = [p for p in parts_of(DRY, tmp_path, "") if p.call == call and re.search(parts, p.name)]
    wanted = with_data([p for p in chosen if not p.gpu_only], DRY)
    assert {part.name for part in [*wanted, *chosen]} <= set(named)
    log = (tmp_path / "out" / "gpu.log").read_text()
    assert all(f"===== {part.name}: " in log for part in wanted)


@pytest.mark.parametrize(
    "timed",
    [
        lambda options: profile.kernels_of(options, TINY_MODEL, 2, "SGD"),
        profile.first_steps,
        profile.loss_shares,
        lambda options: equal.time_steps(options, False),
    ],
    ids=["kernels", "first steps", "loss", "compiled or not"],
)
def test_what_is_timed_is_built_for_its_batch_size(monkeypatch: pytest.MonkeyPatch, timed: Callable):
    """Otherwise cuDNN would not search for the fastest kernels, as it does in a long training."""
    searched = []

    def building(*args, **settings) -> TrainStep:
        step = build_step(*args, classes=3, **settings)
        searched.append(step.settings.benchmark_images)
        return step

    for module in (equal, profile):
        monkeypatch.setattr(module, "build_step", building)
    options = {"model": TINY_MODEL, "models": [TINY_MODEL], "boxes": [3], "batch_size": 2, "imgsz": 64}
    list(timed(Namespace(**options, device="cpu", compile=False)))
    assert searched == [2]


def test_the_measured_loss_equals_the_loss_of_the_step(monkeypatch: pytest.MonkeyPatch):
    """It equals the criterion's value for the maps of that batch, and leaves no gradient in the model."""
    take_step = build_step(TINY_MODEL, classes=3, amp="off")
    (batch,) = make_batches(1, 2, 64, CPU, 3, like_coco=True)
    totals = []
    take_step.criterion.register_forward_hook(lambda _module, _args, out: totals.append(float(out.total.detach())))
    loss = loss_pass(take_step, batch)
    loss()
    loss()
    assert totals[0] == totals[1] == totals[2]
    assert all(parameter.grad is None for parameter in take_step.model.parameters())


@pytest.mark.parametrize("optimizer", ["SGD", "Muon"])
def test_a_wrong_gradient_on_the_device_is_found(monkeypatch: pytest.MonkeyPatch, optimizer: str):
    """A gradient of one layer whose channels are in the wrong order, on the "device" only."""
    options = Namespace(models=[TINY_MODEL], optimizers=[optimizer], device="cpu", batch_size=2, imgsz=64)
    assert len(list(equal.compare_steps(options))) == 1
    build, arithmetic, is_device = equal.build_step, equal.other_arithmetic, []

    @contextmanager
    def on_device(device: str):
        is_device.append(True)
        with arithmetic(device):
            yield

    def wrong_step(*args, **kwargs):
        take_step = build(*args, **kwargs)
        if is_device:
            weight = max(take_step.model.parameters(), key=torch.Tensor.numel)
            weight.register_hook(lambda gradient: gradient.flip(0))
        return take_step

    monkeypatch.setattr(equal, "build_step", wrong_step)
    monkeypatch.setattr(equal, "other_arithmetic", on_device)
    with pytest.raises(SystemExit, match="worst tensor"):
        list(equal.compare_steps(options))


def test_a_host_sync_in_the_step_is_found_with_its_line(monkeypatch: pytest.MonkeyPatch):
    options = Namespace(models=["yolov8n"], optimizers=["SGD"], device="cpu", batch_size=1, imgsz=64)
    assert list(syncs.waits_of_steps(options)) == ["yolov8n SGD: 0 reads of values a step"]
    from models.heads.base import DetectionHead

    build = DetectionHead.build_loss

    def read(_module, _arguments, out):
        out.total.item()  # READ

    def build_reading(*arguments, **settings):
        criterion = build(*arguments, **settings)
        criterion.register_forward_hook(read)
        return criterion

    monkeypatch.setattr(DetectionHead, "build_loss", build_reading)
    lines = []
    with pytest.raises(SystemExit, match="the host waits: yolov8n SGD"):
        lines.extend(syncs.waits_of_steps(options))
    # (extend keeps what came before the exception)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# READ" in text)
    assert lines[0] == "yolov8n SGD: 1 reads of values a step"
    place = f"tests/benchmarks/test_gpu.py:{line}"
    assert lines[1].startswith(f"yolov8n SGD: 1 a step: _local_scalar_dense at {place} from ")
    values = torch.arange(4.0)
    with syncs.WaitingOperations(on_gpu=False) as watcher:
        values[values > 1]  # by a mask
        values[torch.tensor([0, 1])]
    assert watcher.places.total() == 1


def test_an_overflow_skips_the_step():
    take_step = build_step(TINY_MODEL, classes=3, amp="off")
    (batch,) = make_batches(1, 2, 64, CPU)
    with equal.overflowing(take_step):
        take_step([batch], [2], 1)
    take_step([batch], [2], 2)
    assert [values.finite for values in take_step.reader.pop(leave=0)] == [False, True]
