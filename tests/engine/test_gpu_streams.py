"""Loading, validation and detection as on a GPU, on machines without one: no operation mixes devices, streams wait for
each other where they must, and the host only where it reads results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from data.loading.prefetcher import Prefetcher
from engine.evaluation.evaluator import Evaluator
from engine.inference import detector as image_detector
from engine.inference.detector import DetectionSettings
from engine.inference.model import CheckpointModel, autocast_type
from models.detector import build_detector
from models.postprocess.detections import Selected
from tests.engine.gpu_cases import ALONE, CUDA, IGNORE, MODELS
from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.fake_streams import StreamOrder
from tests.helpers.scoring import make_ground_truth
from tests.helpers.tiny import make_batch
from utils.batches import Batch
from utils.config.settings import Hyperparameters
from utils.detections import Detections

DEFAULT = 0  # the streams' numbers
SIDE = 1


@pytest.fixture
def order() -> Iterator[StreamOrder]:
    with fake_gpu(), StreamOrder() as order:
        yield order


def batches_of_images(count: int, images: int = 4) -> list[Batch]:
    """Batches on the host, as loaders yield them; together they have images 0 to ``count * images - 1``."""
    with unset_fake_temporarily():
        numbers = torch.arange(count * images).split(images)
        return [replace(make_batch(images), indices=indices) for indices in numbers]


def test_batches_are_copied_on_a_stream_of_their_own(order):
    prefetcher = Prefetcher(iter(batches_of_images(3)), device=CUDA)
    batch = next(prefetcher)
    for moved in (batch.images, batch.targets.rows):
        assert order.entries(moved) == [(SIDE, "copy"), (SIDE, "record"), (DEFAULT, "wait"), (DEFAULT, "keep")]
    order.log.clear()
    prefetcher.prefetch(2)  # while the step runs
    assert {entry.name for entry in order.log} == {"copy", "record"}
    assert set(order.kernels) == {SIDE}
    for batch in prefetcher:
        batch.images.float().sum()  # or it raises
    assert {t.device.type for t in (batch.indices, batch.original_hw, batch.letterbox)} == {"cpu"}
    assert not order.waits


def decoded(model: nn.Module, raw: list[Tensor]) -> Detections:
    """Stands in for the selection of boxes, in which shapes depend on values."""
    boxes, scores = model.decode(raw)
    slots = boxes[:, :5], scores[:, :5].amax(-1), scores[:, :5].argmax(-1)
    return Detections(*slots, torch.zeros(len(boxes), dtype=torch.long, device=boxes.device))


def decoded_for_validation(model: nn.Module, raw: list[Tensor]) -> Selected:
    return Selected(*(decoded(model, raw) for _ in Selected._fields))


@pytest.mark.parametrize(
    ("kind", "amp_dtype"),
    [
        ("yolov8", torch.float16),
        ("yolo26", None),
        pytest.param("yolox", torch.float16, marks=pytest.mark.slow),
        pytest.param("yolov9", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_validation_waits_only_for_results(order, kind, amp_dtype):
    with unset_fake_temporarily():
        model = build_detector(MODELS[kind], 2, seed=1).to(memory_format=torch.channels_last)
    model = model.to(CUDA)
    criterion = model.head.build_loss(Hyperparameters()).to(CUDA)
    none = np.zeros(0, np.int64)
    evaluator = Evaluator(
        ground_truth=make_ground_truth(
            np.zeros((0, 4)), classes=none, crowd=none, area=none, image=none, num_images=12, num_classes=2
        ),
        num_classes=2,
        postprocess=decoded_for_validation,
        ctx=ALONE,
        amp_dtype=amp_dtype,
        criterion=criterion,
        fuses=True,
    )
    batches = batches_of_images(3)
    batches[1] = replace(batches[1], targets=replace(batches[1].targets, ignore=IGNORE))
    order.waits.clear()
    result = evaluator.run(model, batches).result
    assert result.num_images == 12
    assert {f"val/{name}" for name in criterion.names} < set(result.extras)
    assert order.kernels[SIDE] == 2 * len(batches)  # copies of images and of targets
    # All detections of each batch; the sums of all losses, images and targets of the preview; the times.
    assert order.waits == {"stream": len(batches), "copy": 1 + 2, "device": 1}


class SynchronousExecutor:
    """Stands in for a ThreadPoolExecutor: torch's modes, and so the fake GPU, are of one thread."""

    def __init__(self, threads: int) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: function(*args))


@pytest.mark.parametrize(
    ("kind", "amp"),
    [
        ("yolov8", "fp16"),
        ("yolov5", "bf16"),
        ("yolo26", "off"),
        pytest.param("yolox", "fp16", marks=pytest.mark.slow),
        pytest.param("yolov9", "bf16", marks=pytest.mark.slow),
    ],
)
def test_detection_waits_only_for_results(order, monkeypatch, kind, amp):
    monkeypatch.setattr(image_detector, "ThreadPoolExecutor", SynchronousExecutor)
    monkeypatch.setattr(image_detector, "_select", lambda model, raw, settings: decoded(model, raw))
    with unset_fake_temporarily():
        detector = build_detector(MODELS[kind], 2, seed=1).fuse()
    model = CheckpointModel(detector, {"imgsz": 64}, Path("x.pt"), CUDA)
    settings = DetectionSettings().resolve(model)
    images = image_detector.ImageDetector(model, autocast_type(model, amp))
    order.log.clear()
    order.waits.clear()
    pictures = [np.zeros((64, width, 3), np.uint8) for width in (64, 16, 64)]  # on two kinds of canvases
    detected = images.detect(images.prepare(pictures, settings), settings)
    assert [len(each.rows) for each in detected] == [0, 0, 0]
    canvases = 1 if detector.head.square_letterbox else 2
    assert len([entry for entry in order.log if entry.name == "copy"]) == canvases
    # The times of copies and of the model; detections; as nothing is found, whether outputs are NaN.
    assert order.waits == {"stream": 2 * canvases, "copy": canvases, "value": canvases}
