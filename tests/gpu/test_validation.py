"""Validation on a GPU: NMS keeps the boxes that it keeps on the CPU, and memory stays constant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import train
from benchmarks.speed.training_step import context_of
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.result import Evaluation
from models.postprocess.nms import nms_keep
from tests.gpu.machine import Figure, Machine
from tests.helpers.scripts import call

pytestmark = [pytest.mark.gpu, pytest.mark.quick]
IMAGES = 4
GROUPS = 3  # in each image
BOXES = 500  # in each group
VALIDATIONS = 40  # more than torch has streams
FIRST_VALIDATIONS = 3  # in which libraries allocate memory of their own
MAX_GROWTH = 64 * 2**20  # bytes: three blocks of the allocator, as a copy may take longer than before


@pytest.mark.parametrize("iou_thres", [0.3, 0.45, 0.5, 0.7])
def test_nms_keeps_the_cpus_boxes(machine: Machine, figure: Figure, iou_thres: float):
    """Sides are small whole numbers, so many pairs have an IoU of exactly the threshold."""
    count = IMAGES * GROUPS * BOXES
    corner = torch.randint(0, 30, (count, 2))
    boxes = torch.cat((corner, corner + torch.randint(1, 21, (count, 2))), 1).float()
    group = torch.arange(IMAGES * GROUPS).repeat_interleave(BOXES)
    device = context_of(machine.device).device
    expected = nms_keep(boxes, group, iou_thres, GROUPS)
    keep = nms_keep(boxes.to(device), group.to(device), iou_thres, GROUPS).cpu()
    figure(f"boxes kept at {iou_thres}, and on the CPU", (int(keep.sum()), int(expected.sum())))
    assert torch.equal(keep, expected)


def test_memory_is_constant_over_validations(
    machine: Machine, train_flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Figure
):
    reserved: list[int] = []
    run = Evaluator.run

    def run_often(*args: Any, **options: Any) -> Evaluation | None:
        for _ in range(VALIDATIONS):
            evaluation = run(*args, **options)
            reserved.append(0 if machine.device == "cpu" else torch.cuda.memory_reserved())
        return evaluation

    monkeypatch.setattr(Evaluator, "run", run_often)
    call(train.main, *train_flags[1:], "--project", tmp_path)
    growth = reserved[-1] - reserved[FIRST_VALIDATIONS]
    figure(f"MiB that {VALIDATIONS} validations add", growth / 2**20)
    assert growth <= MAX_GROWTH
