"""Tiles cover the image, and the detections of an oracle, which sees the exact visible part of each object in a tile,
are stitched to exactly the objects."""

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import box_iou

from models.postprocess import stitching
from models.postprocess.stitching import TileStitcher, stitch_views
from models.postprocess.tiles import Tiles
from models.postprocess.tiling import TiledDetector
from utils.boxes import tile_windows
from utils.structures import GRAY, Detections, DetectionTable

CLASSES = 4


@pytest.mark.parametrize("canvas", [(640, 640), (641, 2000), (2560, 2560), (1279, 1281), (640, 5000)])
@pytest.mark.parametrize("overlap", [0.0, 0.2, 0.5])
def test_tiles_cover_the_canvas_once_each(canvas, overlap):
    windows = np.array(tile_windows(canvas, 640, overlap))
    assert len(np.unique(windows, axis=0)) == len(windows)
    assert (windows[:, 2:] - windows[:, :2] == 640).all()
    assert windows.min() == 0
    assert windows[:, 2].max() == canvas[1]
    assert windows[:, 3].max() == canvas[0]
    for low, side in ((0, canvas[1]), (1, canvas[0])):
        starts = np.unique(windows[:, low])
        assert (np.diff(starts) <= 640 - round(640 * overlap)).all()
        assert starts[-1] == side - 640
        assert len(starts) == 1 + int(np.ceil((side - 640) / (640 - round(640 * overlap))))


def oracle(boxes, classes, windows, *, slots=64, least=0.0):
    """The visible parts of objects in each window as detections; random scores."""
    rng = np.random.default_rng(0)
    found = Detections(
        torch.zeros(len(windows), slots, 4),
        torch.zeros(len(windows), slots),
        torch.zeros(len(windows), slots, dtype=torch.long),
        torch.zeros(len(windows), dtype=torch.long),
    )
    for view, window in enumerate(windows):
        low, high = np.maximum(boxes[:, :2], window[:2]), np.minimum(boxes[:, 2:], window[2:])
        visible = (high > low + least).all(1)
        count = int(visible.sum())
        scores = np.sort(rng.uniform(0.1, 1, count))[::-1].copy()
        order = rng.permutation(count)
        found.boxes_xyxy[view, :count] = torch.from_numpy(np.concatenate([low, high], 1)[visible][order]).float()
        found.classes[view, :count] = torch.from_numpy(classes[visible][order])
        found.scores[view, :count] = torch.from_numpy(scores).float()
        found.counts[view] = count
    return found


def stitched(boxes, classes, canvas_hw, *, tile=640, overlap=0.2, whole=False, **options):
    windows = tile_windows(canvas_hw, tile, overlap)
    if whole:
        windows.append((0, 0, canvas_hw[1], canvas_hw[0]))
    corners = np.array(windows, np.float64)
    found = oracle(boxes, classes, corners, **options)
    return stitch_views(found, torch.from_numpy(corners).float(), iou_thres=0.7, max_det=300)


def assert_exact(result, boxes, classes):
    count = int(result.counts[0])
    got = torch.cat((result.classes[0, :count, None].float(), result.boxes_xyxy[0, :count]), 1).numpy()
    want = np.concatenate([classes[:, None], boxes], 1).astype(np.float32)
    got, want = (a[np.lexsort(a.T[::-1])] for a in (got, want))
    np.testing.assert_array_equal(got, want)
    assert (result.scores[0, :count].diff() <= 0).all()
    assert not result.boxes_xyxy[0, count:].any()


# Tiles of 640 at 0, 512, 1024, ...: borders at 512, 640, 1024, 1152, ...
PLACES = {
    "inside one tile": (100, 100, 150, 180),
    "in the overlap of two": (530, 100, 600, 180),
    "in the overlap of four": (530, 530, 600, 600),
    "cut by one tile": (600, 100, 700, 180),
    "cut by both tiles": (500, 100, 700, 180),
    "on a corner of four": (450, 450, 800, 800),
    "longer than the overlap": (300, 700, 900, 900),
    "longer than a tile": (100, 300, 1900, 420),
    "larger than a tile": (100, 100, 1500, 1700),
    "the whole image": (0, 0, 2560, 2560),
    "a sliver beyond the border": (400, 100, 512.5, 200),
    "ends at a border": (400, 100, 640, 200),
    "begins at a border": (512, 100, 700, 200),
    "just before a border": (400, 100, 637, 200),
    "at the image's border": (2300, 2400, 2560, 2560),
    "thin": (200, 635, 1800, 641),
}


@pytest.mark.parametrize("whole", [False, True], ids=["tiles", "and the whole image"])
@pytest.mark.parametrize("place", PLACES)
def test_one_object_is_one_box(place, whole):
    box = np.array([PLACES[place]], np.float64)
    assert_exact(stitched(box, np.array([2]), (2560, 2560), whole=whole), box, np.array([2]))


@pytest.mark.parametrize("overlap", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("seed", range(6))
def test_many_objects_are_stitched_exactly(seed, overlap):
    """Objects of all sizes; those of a class do not overlap, as NMS would ask of any detector."""
    rng = np.random.default_rng(seed)
    height, width = (int(v) for v in rng.integers(640, 3000, 2))
    boxes, classes = [], []
    for _ in range(400):
        size = np.exp(rng.uniform(np.log(4), np.log(1500), 2)).clip(max=(width, height))
        corner = rng.uniform(0, 1, 2) * ((width, height) - size)
        box, kind = np.float32([*corner, *(corner + size)]), int(rng.integers(CLASSES))
        others = np.array([b for b, k in zip(boxes, classes) if k == kind]).reshape(-1, 4)
        if not ((np.minimum(others[:, 2:], box[2:]) > np.maximum(others[:, :2], box[:2])).all(1)).any():
            boxes.append(box)
            classes.append(kind)
    boxes, classes = np.array(boxes, np.float64), np.array(classes)
    result = stitched(boxes, classes, (height, width), overlap=overlap, slots=len(boxes), whole=seed % 2 == 1)
    assert_exact(result, boxes, classes)


@pytest.mark.parametrize("seed", range(3))
def test_overlapping_objects_of_a_class_stay_apart(seed):
    """A crowd, in which parts of objects lie in other objects."""
    rng = np.random.default_rng(seed)
    boxes = np.zeros((0, 4))
    for _ in range(600):
        size = np.exp(rng.uniform(np.log(20), np.log(600), 2))
        corner = rng.uniform(0, 1, 2) * (2000 - size)
        box = np.float32([[*corner, *(corner + size)]]).astype(np.float64)
        if (box_iou(torch.from_numpy(box), torch.from_numpy(boxes)) < 0.5).all():
            boxes = np.concatenate([boxes, box])
    windows = np.array(tile_windows((2000, 2000), 640, 0.2), np.float64)
    found = oracle(boxes, np.zeros(len(boxes), int), windows, slots=len(boxes))
    result = stitch_views(found, torch.from_numpy(windows).float(), iou_thres=0.7, max_det=1000)
    assert_exact(result, boxes, np.zeros(len(boxes), int))


def test_two_boxes_of_a_view_are_never_joined():
    """The box of the second view has a link to one of the first, through the third to the other."""
    windows = torch.tensor([[0, 0, 640, 640], [512, 0, 1152, 640], [0, 0, 1152, 640]]).float()
    boxes = torch.zeros(3, 2, 4)
    boxes[0] = torch.tensor([[520, 100, 620, 200], [520, 150, 620, 250]])
    boxes[1, 0] = torch.tensor([520, 120, 620, 215])
    boxes[2, 0] = torch.tensor([520, 145, 620, 240])
    scores = torch.tensor([[0.9, 0.8], [0.7, 0], [0.6, 0]])
    views = Detections(boxes, scores, torch.zeros(3, 2).long(), torch.tensor([2, 1, 1]))
    result = stitch_views(views, windows, iou_thres=0.7, max_det=9)
    np.testing.assert_allclose(result.scores[0, : int(result.counts)], [0.9, 0.8])
    np.testing.assert_array_equal(result.boxes_xyxy[0, :2], boxes[0])


class PixelReader(nn.Module):
    """A stand-in for a detector: its one box an image is the colored region, in pixels of its input."""

    stride = 32

    def forward(self, images):
        assert images.shape[2] % 32 == images.shape[3] % 32 == 0
        lit = (images - GRAY / 255).abs().amax(1) > 0.2
        return [lit.any(1).float(), lit.any(2).float()]

    @staticmethod
    def find(_, raw):
        across, down = raw
        ends = [(line.argmax(1), line.shape[1] - line.flip(1).argmax(1)) for line in (across, down)]
        boxes = torch.stack([ends[0][0], ends[1][0], ends[0][1], ends[1][1]], 1)[:, None].float()
        found = across.any(1).long()
        return Detections(boxes * found[:, None, None], 0.9 * found[:, None], found[:, None] * 0, found)


@pytest.mark.parametrize("full_image", [0, 96])
@pytest.mark.parametrize(("image_hw", "views"), [((300, 500), 60), ((40, 50), 1), ((64, 300), 6), ((129, 65), 6)])
def test_each_view_shows_its_part_of_the_image(image_hw, views, full_image):
    height, width = image_hw
    box = (height // 4, width // 4, height // 2 + 7, width // 2 + 7)
    image = torch.full((1, 3, height, width), GRAY / 255)
    image[:, :, box[0] : box[2], box[1] : box[3]] = 1
    sizes = []

    class Counted(PixelReader):
        def forward(self, images):
            sizes.append(tuple(images.shape))
            return super().forward(images)

    tiled = TiledDetector(
        Counted(), PixelReader.find, tiles=Tiles(64, 0.2, bool(full_image)), stride=32, imgsz=full_image, batch=4,
        iou_thres=0.7, max_det=5,
    )  # fmt: skip
    raw = tiled(image)
    if full_image and views > 1:
        reduced = raw[0][-1, 0]
        np.testing.assert_allclose(reduced, [box[1], box[0], box[3], box[2]], atol=max(image_hw) / full_image)
        assert max(sizes.pop()[2:]) == 96
        raw = [t[:-1] for t in raw]
    assert sum(s[0] for s in sizes) == len(raw[0]) == views
    assert {s[2:] for s in sizes} == {(64, 64)}
    assert max(s[0] for s in sizes) <= 4
    result = tiled.stitch(raw)
    assert result.counts.tolist() == [1]
    assert result.boxes_xyxy[0, 0].tolist() == [box[1], box[0], box[3], box[2]]


def test_a_part_that_is_not_linked_to_the_whole_is_left_out():
    """Its predicted sides are too far from the whole's for a link in the narrow common area."""
    windows = torch.tensor([[0, 0, 640, 640], [512, 0, 1152, 640]]).float()
    boxes = torch.zeros(2, 2, 4)
    boxes[0, 0] = torch.tensor([400, 100, 520, 300])  # the whole, of which the second tile sees 8 pixels
    boxes[1, 0] = torch.tensor([512, 110, 515, 200])
    boxes[1, 1] = torch.tensor([700, 110, 710, 200])
    scores, classes = torch.tensor([[0.9, 0], [0.5, 0.4]]), torch.zeros(2, 2).long()
    part, elsewhere = torch.tensor([512, 110, 515, 200]), torch.tensor([560, 110, 580, 200])
    for box, whole, expected in (
        (part, 0.9, [0.9, 0.4]),
        (elsewhere, 0.9, [0.95, 0.9, 0.4]),
        (part, 0.01, [0.95, 0.4, 0.01]),
    ):
        boxes[1, 0], scores[0, 0], scores[1, 0] = box, whole, 0.95
        views = Detections(boxes, scores, classes, torch.tensor([1, 2]))
        result = stitch_views(views, windows, iou_thres=0.7, max_det=9)
        np.testing.assert_allclose(result.scores[0, : int(result.counts)], expected)


def test_classes_are_joined_apart_and_suppressed_together_only_if_asked():
    boxes = np.array([[530, 100, 600, 180], [530, 100, 600, 180]], np.float64)
    windows = np.array(tile_windows((640, 1152), 640, 0.2), np.float64)
    found = oracle(boxes, np.array([0, 1]), windows)
    for agnostic, count in ((False, 2), (True, 1)):
        corners = torch.from_numpy(windows).float()
        assert int(stitch_views(found, corners, iou_thres=0.7, max_det=9, agnostic=agnostic).counts) == count
    assert int(stitch_views(found, corners, iou_thres=None, max_det=1).counts) == 1


def test_no_detections_are_none():
    windows = torch.tensor(tile_windows((640, 2000), 640, 0.2)).float()
    nothing = oracle(np.zeros((0, 4)), np.zeros(0, int), windows.numpy())
    result = stitch_views(nothing, windows, iou_thres=0.7, max_det=5)
    assert result.counts.tolist() == [0]
    assert result.boxes_xyxy.shape == (1, 5, 4)


def test_many_views_are_compared_in_parts(monkeypatch):
    """The detections do not depend on how many pairs of views are compared at a time."""
    windows = torch.tensor(tile_windows((300, 300), 100, 0.5), dtype=torch.float32)
    views = Detections(
        windows[:, None] + torch.tensor([[[40.0, 40, -5, -5], [10, 10, -70, -70]]]),
        torch.linspace(0.5, 0.9, 2 * len(windows)).view(-1, 2),
        torch.zeros(len(windows), 2, dtype=torch.int64),
        torch.full((len(windows),), 2),
    )
    at_once = stitch_views(views, windows, iou_thres=0.5, max_det=100)
    monkeypatch.setattr(stitching, "_CELLS", 3 * len(windows))
    in_parts = stitch_views(views, windows, iou_thres=0.5, max_det=100)
    assert at_once.counts.item() > 1
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_parts))


def test_tables_of_many_images_are_stitched_image_by_image():
    """In any order, with images and tiles without detections, as the views of each image are."""
    rng, tables, expected = np.random.default_rng(0), [], []
    images, windows, first = [], [], 0
    for image, canvas_hw in enumerate([(640, 1152), (640, 640), (1500, 900), (700, 700)]):
        corners = np.array(tile_windows(canvas_hw, 640, 0.2), np.float64)
        low = rng.random((12, 2)) * (np.array(canvas_hw[::-1]) - 150)
        boxes = np.concatenate([low, low + 20 + rng.random((12, 2)) * 130], 1)[: 0 if image == 2 else None]
        found = oracle(boxes, rng.integers(CLASSES, size=len(boxes)), corners)
        rows, slots = np.nonzero(np.arange(found.scores.shape[1]) < found.counts.numpy()[:, None])
        at = (t.numpy()[rows, slots] for t in found[:3])
        tables.append(DetectionTable(rows + first, *at))
        joined = stitch_views(found, torch.from_numpy(corners).float(), iou_thres=0.7, max_det=50)
        expected.append([t[0, : int(joined.counts)].numpy() for t in joined[:3]])
        images += [image] * len(corners)
        windows.append(corners)
        first += len(corners)
    table = DetectionTable.concatenate(tables)
    by_tile = table.take(np.concatenate([np.flatnonzero(table.image_index == t) for t in rng.permutation(first)]))
    stitch = TileStitcher(np.array(images), np.concatenate(windows).astype(np.float32), 0.7, 50)
    result, seen = stitch(by_tile, rng.permutation(first), torch.device("cpu"))
    assert seen.tolist() == [0, 1, 2, 3]
    for image, (boxes, scores, classes) in enumerate(expected):
        part = result.take(result.image_index == image)
        np.testing.assert_allclose(part.boxes_xyxy_px, boxes)
        np.testing.assert_allclose(part.scores, scores)
        np.testing.assert_array_equal(part.classes, classes)
    with pytest.raises(RuntimeError, match="each tile of an image was to be seen once"):
        stitch(by_tile, np.arange(first - 1), torch.device("cpu"))


def test_a_detector_sees_tiles_as_it_was_trained():
    """Scaled to its image size; boxes are those of the tiles."""
    image, sizes = torch.full((1, 3, 300, 500), GRAY / 255), set()
    image[:, :, 80:160, 120:240] = 1

    class Seen(PixelReader):
        def forward(self, images):
            sizes.add(tuple(images.shape[2:]))
            return super().forward(images)

    tiles = Tiles(128, full_image=False, scaled=True)
    tiles.check(32, (64, 64))
    tiled = TiledDetector(Seen(), PixelReader.find, tiles=tiles, stride=32, imgsz=64, batch=4, iou_thres=0.7, max_det=5)
    result = tiled.stitch(tiled(image))
    assert sizes == {(64, 64)}
    assert result.counts.tolist() == [1]
    np.testing.assert_allclose(result.boxes_xyxy[0, 0], [120, 80, 240, 160], atol=2)
