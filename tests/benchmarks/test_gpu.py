"""benchmarks/gpu.sh: its checks can fail, and one table names every part."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import equal, syncs
from benchmarks.gpu.checks import PARTS
from benchmarks.gpu.parts import CALLS, DRY, Part, Sizes, parts_of
from benchmarks.gpu.profile import trace
from benchmarks.gpu.runner import Runner, judged, run_for, with_data
from benchmarks.gpu.scripts import scores
from benchmarks.speed.step import sizes_of
from benchmarks.speed.training_step import COCO_SIDES, build_step, coco_boxes, loss_pass, make_batches, stepper
from models.postprocess.detections import Detections
from tests.helpers.tiny import TINY_MODEL
from utils.boxes import cxcywh_to_xyxy

pytestmark = pytest.mark.benchmarks
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ABSENT = ("albumentations", "lmdb", "tqdm")  # on the machine that the script is for


def python(code: str) -> Part:
    return Part("checks", "a part", 10, [sys.executable, "-c", code])


def outcome(code: str, limit_s: float = 30.0):
    part = python(code)
    return judged(part, *run_for(part, limit_s), 1.0, limit_s)


def test_figures_and_tables_of_a_part_are_kept():
    found = outcome(
        "print('noise'); print('figure: 3 ms')\n"
        "print('| what | ours | peer |'); print('| --- | --- | --- |'); print('| step [s] | 0.1 |  |')\n"
        "print('epoch 1/2  4/8  box 1  5 img/s'); print('epoch 2/2  8/8  box 1  7 img/s')"
    )
    assert found.verdict == "PASS"
    assert found.lines == ["3 ms", "step [s]: ours 0.1", "epoch 2/2  8/8  box 1  7 img/s"]


def test_a_failure_is_reported_with_the_last_output():
    found = outcome("import sys; print('figure: 3 ms'); print('why'); sys.exit('it differs')")
    assert (found.verdict, found.lines) == ("FAIL", ["3 ms", "! exit code 1", "! why", "! it differs"])
    rows = list(found.rows())
    assert rows[0].startswith("| a part | FAIL |")
    assert all(row.count("|") == 5 for row in rows)


def test_a_hanging_part_is_stopped_with_its_processes(tmp_path: Path):
    """It gets SIGTERM first, so that launchers end their processes; the rest of the group is killed."""
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    found = outcome(code, limit_s=2.0)
    assert found.verdict == "FAIL"
    assert found.lines[0] == "! stopped after 2 s"
    status = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and is_running(status):
        time.sleep(0.01)
    assert not is_running(status)


def is_running(status: Path) -> bool:
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_every_call_fits_its_time():
    """With the peer and the data sets, and with time left for a part that takes longer than expected."""
    for call in CALLS:
        parts = with_data([p for p in parts_of(Sizes(), Path(), "python") if p.call == call], Sizes())
        assert sum(part.expected_s for part in parts) <= 460, call


def test_parts_have_unique_names():
    parts = parts_of(Sizes(), Path(), "")
    assert len({(part.call, part.name) for part in parts}) == len(parts)
    assert {part.call for part in parts} == set(CALLS)


def test_every_named_check_exists():
    for where in PARTS.values():
        module, function = where.split(":")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)), where


def test_parts_are_skipped_when_the_time_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BUDGET_S", "6")
    runner = Runner(tmp_path, DRY, tmp_path / "out")
    runner.run_call("checks", [python("import time; time.sleep(2)"), python("")])
    assert [o.verdict for o in runner.outcomes] == ["PASS", "SKIP"]
    assert "the time is used up" in (tmp_path / "out" / "gpu.txt").read_text()


def test_only_the_part_without_its_data_set_fails(tmp_path: Path):
    (tmp_path / "small").write_text("in the way")
    needy = Part("checks", "needy", 5, [sys.executable, "-c", ""], data="small")
    runner = Runner(tmp_path, DRY, tmp_path / "out")
    runner.run_call("checks", [needy, python("print('figure: 1')")])
    assert [(o.name, o.verdict) for o in runner.outcomes] == [
        ("data set, small", "FAIL"), ("needy", "FAIL"), ("a part", "PASS")
    ]  # fmt: skip


def gpu_script(tmp_path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('absent', name={name!r})")
    variables = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "PEER": "", "PYTHONPATH": str(absent)}
    variables |= {"OMP_NUM_THREADS": "1", "SLOWDOWN": "4"}
    return subprocess.run(
        ["bash", "benchmarks/gpu.sh", *flags],
        cwd=ROOT, env=os.environ | variables | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "parts"),
    [*((call, "") for call in CALLS), ("compiled", "renderer|share")],
)
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


def test_a_misspelled_call_is_refused(tmp_path: Path):
    done = gpu_script(tmp_path, "--list", ONLY="check")
    assert done.returncode == 1
    assert "expected one of checks, others, speed, compiled" in done.stderr


def test_boxes_have_the_sizes_of_cocos_boxes_after_mosaic():
    boxes = coco_boxes(4000, torch.Generator().manual_seed(0))
    corners = cxcywh_to_xyxy(boxes)
    assert corners.min() >= 0
    assert corners.max() <= 1
    sides = boxes[:, 2:].prod(1).sqrt()
    assert COCO_SIDES[0] <= sides.min() < 0.02
    assert 0.4 < sides.max() <= COCO_SIDES[1]
    assert float(sides.median()) * 640 == pytest.approx(45, abs=5)


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


def test_a_trace_counts_operations_and_ranks_them():
    weights = torch.rand(64, 64)
    found = trace(lambda: [torch.mm(weights, weights) for _ in range(3)], on_gpu=False)
    calls = {name: calls for name, _, calls in found.kernels}
    assert calls["aten::mm"] == 3
    assert [ms for _, ms, _ in found.kernels] == sorted((ms for _, ms, _ in found.kernels), reverse=True)
    assert found.operations >= 3


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


def test_results_that_are_not_numbers_differ():
    nan = float("nan")
    assert equal.excessive({"losses": nan, "gradient norm": 1e-5, "weights' change": 0.02}, "SGD") == [
        "losses nan", "weights' change 2.0e-02"
    ]  # fmt: skip
    assert equal.excessive({"losses": 0.0, "weights' change": 0.02}, "Muon") == []


def test_detections_that_differ_by_more_than_rounding_are_found():
    boxes, scores, classes = torch.rand(1, 3, 4) * 64, torch.rand(1, 3), torch.tensor([[0, 1, 0]])
    found = Detections(boxes, scores, classes, torch.tensor([3]))
    assert equal.unequal_detections(found, found) == []
    assert "boxes differ" in equal.unequal_detections(found, found._replace(boxes_xyxy=boxes + 0.1))[0]
    assert "scores differ" in equal.unequal_detections(found, found._replace(scores=scores + 1e-3))[0]
    assert equal.unequal_detections(found, found._replace(classes=classes + 1)) == ["classes differ"]
    assert "counts differ" in equal.unequal_detections(found, found._replace(counts=torch.tensor([2])))[0]


def test_images_that_differ_by_a_few_levels_are_found():
    image = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
    assert equal.differing_share(image, image + equal.GRAY) == 0
    assert equal.differing_share(image, image + equal.GRAY + 1) == 1


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


def test_indexing_by_a_mask_counts_as_a_wait():
    watcher = syncs.WaitingOperations(on_gpu=False)
    values = torch.arange(4.0)
    with watcher:
        values[values > 1]
        values[torch.tensor([0, 1])]
    assert watcher.places.total() == 1


class Mode:
    """Stands in for torch's debug mode on a machine without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = "default"
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)

    def set(self, mode: str) -> None:
        self.now = mode


def test_warnings_about_waits_are_counted_by_line_and_others_ignored(monkeypatch: pytest.MonkeyPatch):
    mode, others = Mode(monkeypatch), []
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: others.append(str(message))
        with syncs.WarnedWaits() as watcher:
            assert mode.now == "warn"
            for _ in range(3):
                warnings.warn(f"{syncs.WAITING} (at file.cpp)", stacklevel=1)  # WARN
            warnings.warn("something else", stacklevel=1)
    assert others == ["something else"]
    assert mode.now == "default"
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# WARN"))
    ((where, number),) = watcher.places.items()
    assert (where.split(" from ")[0], number) == (f"tests/benchmarks/test_gpu.py:{line}", 3)


def test_an_operation_that_waits_is_named_and_still_runs(monkeypatch: pytest.MonkeyPatch):
    mode, watcher = Mode(monkeypatch), syncs.WaitingOperations(on_gpu=True)

    class Operation:
        def name(self) -> str:
            return "aten::item"

        def __call__(self, value: int) -> int:
            if mode.now == "error":
                raise RuntimeError(syncs.WAITING)
            return value + 1

    assert watcher.__torch_dispatch__(Operation(), (), (1,)) == 2
    assert mode.now == "default"
    ((where, number),) = watcher.places.items()
    assert where.startswith("item at tests/benchmarks/test_gpu.py:")
    assert number == 1


def test_an_overflow_skips_the_step():
    take_step = build_step(TINY_MODEL, classes=3, amp="off")
    (batch,) = make_batches(1, 2, 64, CPU)
    with equal.overflowing(take_step):
        take_step([batch], [2], 1)
    take_step([batch], [2], 2)
    assert [values.finite for values in take_step.reader.pop(leave=0)] == [False, True]


def test_steps_take_one_batch_after_another():
    taken = []

    class TakeStep:
        reader = Namespace(pop=lambda: None)

        def __call__(self, batches, images, updates):
            taken.append((int(batches[0].indices[0]), images, updates))

    batches = [Namespace(indices=torch.tensor([n]), images=torch.zeros(2)) for n in range(2)]
    step = stepper(TakeStep(), batches)
    for _ in range(3):
        step()
    assert taken == [(0, [2], 1), (1, [2], 2), (0, [2], 3)]


def test_models_are_named_with_sizes_or_without():
    assert list(sizes_of(["a:16,64", "b"], [8])) == [("a", 16), ("a", 64), ("b", 8)]


def test_scores_are_read_from_the_table():
    text = "noise\n  class  images  P  R  AP50  AP\n    all  4  0.1  0.2  0.3  0.4\n  ring  3  1  1  1  1\n"
    assert scores(text)["AP"] == 0.4
