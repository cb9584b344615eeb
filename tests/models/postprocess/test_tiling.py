"""Tiles cover the image, and the detections of an oracle, which sees the exact visible part of each object in a tile,
are stitched to exactly the objects."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from models.postprocess.selection import PostprocessSettings
from models.postprocess.tiles import TiledDetector, Tiles, TileStitcher
from tests.helpers.selection import stitch
from tests.models.postprocess.stitching_reference import stitch as stitch_box_by_box
from tests.models.postprocess.stitching_reference import windows_of
from utils.boxes import tile_windows
from utils.detections import Detections, DetectionTable
from utils.pixels import GRAY

CLASSES = 4
SEEN = PostprocessSettings(conf_thres=0.0, iou_thres=0.7, max_det=5)


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


def oracle(boxes, classes, windows):
    """Returns the visible parts of objects in each window as detections; random scores."""
    rng = np.random.default_rng(0)
    tables = []
    for view, window in enumerate(windows):
        low, high = np.maximum(boxes[:, :2], window[:2]), np.minimum(boxes[:, 2:], window[2:])
        visible = (high > low).all(1)
        order = rng.permutation(int(visible.sum()))
        seen = np.concatenate([low, high], 1)[visible][order]
        scores = np.sort(rng.uniform(0.1, 1, len(order)))[::-1]
        tables.append(DetectionTable(np.full(len(order), view), seen, scores, classes[visible][order]))
    return DetectionTable.concatenate(tables)


def stitched(boxes, classes, canvas_hw, *, tile=640, overlap=0.2, whole=False):
    windows = tile_windows(canvas_hw, tile, overlap)
    if whole:
        windows.append((0, 0, canvas_hw[1], canvas_hw[0]))
    windows = np.array(windows, float)
    return stitch(oracle(boxes, classes, windows), windows, iou_thres=0.7, max_det=300)


def assert_exact(result, boxes, classes):
    actual = np.concatenate([result.classes[:, None], result.boxes_xyxy_px], 1)
    expected = np.concatenate([classes[:, None], boxes], 1)
    actual, expected = (a[np.lexsort(a.T[::-1])] for a in (actual, expected))
    np.testing.assert_array_equal(actual, expected)
    assert (np.diff(result.scores) <= 0).all()


# Tiles of 640 at 0, 512, 1024, ...: borders at 512, 640, 1024, 1152, ...
PLACES = {
    "inside one tile": (100, 100, 150, 180), "in the overlap of two": (530, 100, 600, 180),
    "in the overlap of four": (530, 530, 600, 600), "cut by one tile": (600, 100, 700, 180),
    "cut by both tiles": (500, 100, 700, 180), "on a corner of four": (450, 450, 800, 800),
    "longer than the overlap": (300, 700, 900, 900), "longer than a tile": (100, 300, 1900, 420),
    "larger than a tile": (100, 100, 1500, 1700), "the whole image": (0, 0, 2560, 2560),
    "a sliver beyond the border": (400, 100, 512.5, 200), "ends at a border": (400, 100, 640, 200),
    "begins at a border": (512, 100, 700, 200), "just before a border": (400, 100, 637, 200),
    "at the image's border": (2300, 2400, 2560, 2560), "thin": (200, 635, 1800, 641),
}  # fmt: skip


@pytest.mark.parametrize("whole", [False, True], ids=["tiles", "and the whole image"])
@pytest.mark.parametrize("place", PLACES)
def test_one_object_is_one_box(place, whole):
    box = np.array([PLACES[place]], np.float64)
    assert_exact(stitched(box, np.array([2]), (2560, 2560), whole=whole), box, np.array([2]))


@pytest.mark.parametrize("seed", range(6))
def test_random_detections_are_stitched_by_the_rule(seed):
    """Noisy parts of objects, whose scores differ by more than the factor of 10 that makes a whole noise."""
    rng = np.random.default_rng(seed)
    windows = windows_of(200, 260, 100, 0.25)
    low = rng.uniform(0, 180, (14, 2))
    objects = np.concatenate([low, low + rng.uniform(8, 110, (14, 2))], 1).clip(0, [260, 200, 260, 200])
    found = oracle(objects, rng.integers(2, size=len(objects)), windows)
    own_windows = windows[found.image_index]
    noisy = found.boxes_xyxy_px + rng.normal(0, 3, found.boxes_xyxy_px.shape)
    noisy = noisy.clip(np.tile(own_windows[:, :2], 2), np.tile(own_windows[:, 2:], 2))
    scores = np.exp(rng.uniform(np.log(0.01), 0, len(noisy)))
    has_area = (noisy[:, 2:] > noisy[:, :2]).all(1)
    detections = replace(found, boxes_xyxy_px=noisy, scores=scores).take(has_area)
    detections = detections.take(np.lexsort((-detections.scores, detections.image_index)))

    result = stitch(detections, windows, iou_thres=0.7, max_det=300)
    boxes = zip(detections.boxes_xyxy_px, detections.scores, detections.classes, detections.image_index)
    expected = stitch_box_by_box(list(boxes), windows, 0.7)
    assert len(expected) > 5
    np.testing.assert_array_equal(result.scores, [score for _, score, _, _ in expected])
    np.testing.assert_array_equal(result.classes, [number for _, _, number, _ in expected])
    np.testing.assert_allclose(result.boxes_xyxy_px, [box for box, _, _, _ in expected])


class PixelReader(nn.Module):
    """A stand-in for a detector: its one box an image is the colored region, in pixels of its input."""

    stride = 32

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, images):
        self.sizes.append(tuple(images.shape))
        assert images.shape[2] % 32 == images.shape[3] % 32 == 0
        lit = (images - GRAY / 255).abs().amax(1) > 0.2
        return [lit.any(1).float(), lit.any(2).float()]

    @staticmethod
    def find(raw):
        across, down = raw
        ends = [(line.argmax(1), line.shape[1] - line.flip(1).argmax(1)) for line in (across, down)]
        boxes = torch.stack([ends[0][0], ends[1][0], ends[0][1], ends[1][1]], 1)[:, None].float()
        found = across.any(1).long()
        seen = Detections(boxes * found[:, None, None], 0.9 * found[:, None], found[:, None] * 0, found)
        return [seen]


@pytest.mark.parametrize("full_image", [0, 96])
@pytest.mark.parametrize(("image_hw", "views"), [((300, 500), 60), ((40, 50), 1), ((64, 300), 6), ((129, 65), 6)])
def test_each_view_shows_its_part_of_the_image(image_hw, views, full_image):
    height, width = image_hw
    box = (height // 4, width // 4, height // 2 + 7, width // 2 + 7)
    image = torch.full((1, 3, height, width), GRAY / 255)
    image[:, :, box[0] : box[2], box[1] : box[3]] = 1
    reader = PixelReader()
    sizes = reader.sizes
    tiled = TiledDetector(
        reader,
        PixelReader.find,
        [SEEN],
        tiles=Tiles(64, 0.2, bool(full_image)),
        stride=32,
        imgsz=full_image,
        only_hw=None,
        batch=4,
    )
    raw = tiled(image)
    if full_image and views > 1:
        reduced = raw[1][-1, 0]
        np.testing.assert_allclose(reduced, [box[1], box[0], box[3], box[2]], atol=max(image_hw) / full_image)
        assert max(sizes.pop()[2:]) == 96
        raw = [t[:-1] for t in raw]
    assert sum(s[0] for s in sizes) == len(raw[0]) == views
    assert {s[2:] for s in sizes} == {(64, 64)}
    assert max(s[0] for s in sizes) <= 4
    result = tiled.stitch(raw)[0]
    assert result.counts.tolist() == [1]
    assert result.boxes_xyxy[0, 0].tolist() == [box[1], box[0], box[3], box[2]]


def test_tables_of_many_images_are_stitched_image_by_image():
    rng = np.random.default_rng(0)
    tables = []
    expected = []
    images = []
    windows = []
    first = 0
    for image, canvas_hw in enumerate([(640, 1152), (640, 640), (1500, 900), (700, 700)]):
        corners = np.array(tile_windows(canvas_hw, 640, 0.2), np.float64)
        low = rng.random((12, 2)) * (np.array(canvas_hw[::-1]) - 150)
        boxes = np.concatenate([low, low + 20 + rng.random((12, 2)) * 130], 1)[: 0 if image == 2 else None]
        found = oracle(boxes, rng.integers(CLASSES, size=len(boxes)), corners)
        tables.append(replace(found, image_index=found.image_index + first))
        expected.append(stitch(found, corners, iou_thres=0.7, max_det=50))
        images += [image] * len(corners)
        windows.append(corners)
        first += len(corners)
    table = DetectionTable.concatenate(tables)
    by_tile = table.take(np.concatenate([np.flatnonzero(table.image_index == t) for t in rng.permutation(first)]))
    settings = PostprocessSettings(conf_thres=0.0, iou_thres=0.7, max_det=50)
    stitcher = TileStitcher(np.array(images), np.concatenate(windows), [settings])
    result = stitcher.stitch(by_tile, settings)
    assert stitcher.images_of(rng.permutation(first)).tolist() == [0, 1, 2, 3]
    for image, of_image in enumerate(expected):
        part = result.take(result.image_index == image)
        for name in ("boxes_xyxy_px", "scores", "classes"):
            np.testing.assert_array_equal(getattr(part, name), getattr(of_image, name))
    with pytest.raises(RuntimeError, match=r"expected each of \d+ tiles exactly once"):
        stitcher.images_of(np.arange(first - 1))


@pytest.mark.parametrize("iou_thres", [None, 0.7])
def test_max_det_limits_the_detections_of_a_tile_and_not_of_an_image(iou_thres):
    """Each of 16 tiles has as many objects as ``max_det`` allows, and all of them are returned."""
    windows = np.array(tile_windows((256, 256), 64, 0.0), np.float32)
    spots = np.stack(np.meshgrid(np.arange(4), np.arange(4)), -1).reshape(-1, 2) * 15 + 2.0
    in_tile = torch.from_numpy(np.concatenate([spots, spots + 8], 1)).float()
    count = len(in_tile)
    scores = torch.linspace(0.9, 0.5, count)
    settings = PostprocessSettings(conf_thres=0.0, iou_thres=iou_thres, max_det=count)

    def find(raw):
        views = len(raw[0])
        counts = torch.full((views,), count)
        seen = Detections(in_tile.expand(views, -1, -1), scores.expand(views, -1), torch.zeros(views, count), counts)
        return [seen]

    tiled = TiledDetector(
        PixelReader(),
        find,
        [settings],
        tiles=Tiles(64, overlap=0.0, full_image=False),
        stride=32,
        imgsz=64,
        only_hw=None,
        batch=4,
    )
    detected = tiled.stitch(tiled(torch.zeros(1, 3, 256, 256)))[0]

    boxes = np.tile(in_tile.numpy(), (len(windows), 1)) + np.tile(np.repeat(windows[:, :2], count, 0), 2)
    assert detected.counts.tolist() == [16 * count]
    assert set(map(tuple, detected.boxes_xyxy[0].numpy())) == set(map(tuple, boxes))
