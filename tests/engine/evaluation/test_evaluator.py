"""The evaluator: frames, modes, losses, and the same bits on any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from engine.evaluation import evaluator as evaluator_module
from engine.evaluation.evaluator import Evaluator
from models.losses.base import Criterion, LossOutput
from models.postprocess.detections import Selected
from tests.helpers.scoring import make_ground_truth
from utils.batches import Batch, Targets
from utils.boxes import scale_boxes, xywh_to_xyxy
from utils.detections import Detections
from utils.distributed.context import DistributedContext

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CANVAS = 64
CLASSES = 3


def make_split(num_images, seed=0):
    """Returns ground truth and the letterbox (gain_x, gain_y, pad_x, pad_y) of each image."""
    rng = np.random.default_rng(seed)
    hw = rng.integers(80, 200, (num_images, 2)).astype(np.int32)
    gains = np.round(CANVAS * hw / hw.max(1, initial=1, keepdims=True))[:, ::-1] / hw[:, ::-1]
    pads = (CANVAS - hw[:, ::-1] * gains) / 2
    count = rng.integers(0, 6, num_images)
    image = np.repeat(np.arange(num_images), count)
    size = rng.uniform(10, 40, (image.size, 2))
    corner = rng.uniform(0, 1, (image.size, 2)) * (hw[image, ::-1] - size)
    classes = rng.integers(0, CLASSES, image.size)
    boxes = np.c_[corner, size]
    gt = make_ground_truth(
        boxes, classes=classes, area=size.prod(1), image=image, num_images=num_images, num_classes=CLASSES
    )
    return replace(gt, image_hw=hw), np.c_[gains, pads]


def make_batches(gt, letterbox, batch_size=2):
    """Batches whose pixels contain the image's index, in shuffled order."""
    order = np.random.default_rng(7).permutation(gt.num_images)
    batches = []
    for start in range(0, gt.num_images, batch_size):
        index = torch.from_numpy(order[start : start + batch_size].copy())
        images = index.to(torch.uint8)[:, None, None, None].expand(-1, 3, CANVAS, CANVAS)
        own_hw, own_letterbox = (torch.from_numpy(part[index.numpy()]) for part in (gt.image_hw, letterbox))
        targets = Targets.from_labels([np.zeros((0, 5), np.float32)] * len(index))
        batches.append(
            Batch(images.contiguous(memory_format=torch.channels_last), targets, index, own_hw, own_letterbox)
        )
    return batches


class TinyNet(nn.Module):
    """Its only output is the mean pixel in [0, 1], which identifies the image; it records how it was called."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 3, bias=False)
        nn.init.constant_(self.conv.weight, 1 / 27)
        self.frozen = nn.BatchNorm2d(1)
        self.calls = []

    def forward(self, images):
        self.calls.append((self.training, images.is_contiguous(memory_format=torch.channels_last), float(images.max())))
        return [self.conv(images)]


class Oracle:
    """Postprocessing that returns each image's labels in canvas pixels, and one wrong box with a low score; detected
    ones have half the score, without voting a quarter of it."""

    def __init__(self, gt, letterbox):
        self.gt = gt
        self.letterbox = letterbox

    def __call__(self, model, raw):
        assert isinstance(model, TinyNet)
        index = (raw[0].mean((1, 2, 3)) * 255).round().long()
        slots = 8
        boxes = torch.zeros(len(index), slots, 4)
        scores = torch.zeros(len(index), slots)
        classes = torch.zeros(len(index), slots).long()
        counts = torch.zeros(len(index)).long()
        for b, i in enumerate(index.tolist()):
            rows = slice(self.gt.offsets[i], self.gt.offsets[i + 1])
            gain_x, gain_y, pad_x, pad_y = self.letterbox[i]
            own = scale_boxes(xywh_to_xyxy(self.gt.boxes_xywh_px[rows]), gain_x, gain_y)
            own += np.array([pad_x, pad_y, pad_x, pad_y])
            n = len(own)
            boxes[b, :n] = torch.from_numpy(own)
            boxes[b, n] = torch.tensor([-50.0, -50, 500, 500])  # beyond the canvas: to be clipped to the image
            scores[b, :n] = torch.linspace(0.9, 0.2, n)
            scores[b, n] = 0.1
            classes[b, :n] = torch.from_numpy(self.gt.classes[rows])
            counts[b] = n + 1
        device = raw[0].device
        return Selected(
            *(Detections(*(t.to(device) for t in (boxes, scores * gain, classes, counts))) for gain in (1.0, 0.5))
        )


class Moments(Criterion):
    names = ("box", "cls")

    def forward(self, raw, targets, teacher_maps):
        value = raw[0].sum((1, 2, 3)).double()
        parts = torch.stack([value.sum(), value.square().sum()]).float()
        return LossOutput(parts.sum(), parts.new_tensor(len(value) + 0.1), parts)


def make_evaluator(gt, letterbox, ctx, criterion=None):
    return Evaluator(
        ground_truth=gt, num_classes=CLASSES, postprocess=Oracle(gt, letterbox), ctx=ctx, criterion=criterion
    )


def context(rank, world):
    return DistributedContext(
        rank=rank, local_rank=rank, world_size=world, local_world_size=world, device=CPU, backend="gloo", devices=(CPU,)
    )


def run_ranks(monkeypatch, gt, letterbox, world):
    """Rank 0's evaluation; the batches are distributed over ``world`` ranks, which run one after another in
    this process."""
    shares = []

    def gather(ctx, arrays):
        shares.append(arrays)
        return list(reversed(shares)) if ctx.is_main else None

    monkeypatch.setattr(evaluator_module, "gather_on_main", gather)
    batches = make_batches(gt, letterbox)
    for rank in reversed(range(world)):
        evaluator = make_evaluator(gt, letterbox, context(rank, world), Moments())
        evaluation = evaluator.run(TinyNet(), batches[rank::world])
        assert (evaluation is None) == (rank != 0)
    return evaluation


def assert_same(result, other):
    for name in result.__dataclass_fields__:
        if name != "extras":
            np.testing.assert_equal(getattr(result, name), getattr(other, name), err_msg=name)
    losses = {k: v for k, v in result.extras.items() if k.startswith("val/")}
    assert losses == {k: v for k, v in other.extras.items() if k.startswith("val/")}
    return losses


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_boxes_are_mapped_back_to_original_pixels(device):
    gt, letterbox = make_split(9)
    evaluator = make_evaluator(gt, letterbox, DistributedContext.single(device), Moments())
    batches = make_batches(gt, letterbox)
    evaluation = evaluator.run(TinyNet().to(device), [b.pin_memory() for b in batches] if device == "cuda" else batches)
    result = evaluation.result
    assert result.num_images == 9
    assert result.ap == pytest.approx(1)
    table = evaluation.for_ap
    assert (np.diff(table.image_index) >= 0).all()
    last = np.flatnonzero(np.r_[np.diff(table.image_index) > 0, True])
    height, width = gt.image_hw.astype(float).T
    np.testing.assert_array_equal(table.boxes_xyxy_px[last], np.c_[0 * width, 0 * width, width, height])
    right = np.delete(table.boxes_xyxy_px, last, axis=0)
    np.testing.assert_allclose(right, xywh_to_xyxy(gt.boxes_xywh_px), atol=1e-3)
    np.testing.assert_array_equal(evaluation.detected.scores, table.scores * 0.5)
    np.testing.assert_array_equal(evaluation.detected.boxes_xyxy_px, table.boxes_xyxy_px)
    # The worst right score is 0.2, the best wrong one 0.1; of those that are shown, half as much.
    assert result.threshold == pytest.approx(0.075, abs=0.002)
    batch, detections = evaluation.preview
    assert detections.scores.max() == pytest.approx(0.45)
    np.testing.assert_array_equal(batch.indices, make_batches(gt, letterbox)[0].indices)
    assert len(detections.counts) == 2
    assert batch.images.untyped_storage().nbytes() == batch.images.nbytes  # it is kept while the next epoch is trained
    times = {"ms/inference", "ms/nms", "ms/total", "data_wait"}
    assert set(result.extras) == times | {"val/total", "val/box", "val/cls"}
    assert all(result.extras[name] > 0 for name in times)
    assert 0 <= result.extras["data_wait"] <= 1


@pytest.mark.parametrize("num_images", [0, 1, 4, 7])
def test_any_number_of_ranks_gives_the_same_bits(monkeypatch, num_images):
    gt, letterbox = make_split(num_images)
    alone = run_ranks(monkeypatch, gt, letterbox, 1)
    for world in (2, 3, 8):
        sharded = run_ranks(monkeypatch, gt, letterbox, world)
        losses = assert_same(sharded.result, alone.result)
        for name in ("image_index", "boxes_xyxy_px", "scores", "classes"):
            np.testing.assert_array_equal(getattr(sharded.for_ap, name), getattr(alone.for_ap, name))
        if num_images == 7:  # four batches
            value = np.arange(7) / 255 * (CANVAS - 2) ** 2
            assert losses["val/box"] == pytest.approx(value.sum() / 7.4, rel=1e-5)
            assert losses["val/cls"] == pytest.approx((value**2).sum() / 7.4, rel=1e-5)
            assert losses["val/total"] == pytest.approx((value.sum() + (value**2).sum()) / 7.4, rel=1e-5)


def test_an_image_seen_twice_or_never_is_refused_and_restores_the_training_mode():
    gt, letterbox = make_split(4)
    batches = make_batches(gt, letterbox)
    model = TinyNet()
    evaluator = make_evaluator(gt, letterbox, DistributedContext.single(CPU))
    for wrong in ([*batches, batches[0]], batches[1:]):
        with pytest.raises(RuntimeError, match="exactly once"):
            evaluator.run(model, wrong)
    with pytest.raises(AttributeError):
        evaluator.run(model, [None])
    assert model.training
