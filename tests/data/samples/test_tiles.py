"""Tiles of large images: positions, labels and pixels against plain loops, and the batches that loaders make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.loading.build import build_run_val_loader, open_run_val_reader
from data.read_spec import load_dataset_spec
from data.render.letterbox import CanvasRule
from data.samples.tiles import TiledIndex, crop_tile
from data.samples.weights import check_tiles, tile_weights
from tests.helpers.messages import refused
from tests.helpers.synthetic_index import index_of
from tests.helpers.tiny import write_tiled_dataset
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.pixels import GRAY

SIZES = [(300, 420), (128, 128), (90, 260), (60, 50)]
SIDE = 128


def boxed_index(seed: int = 0):
    """Images of `SIZES`, each with forty boxes of any size, some of them regions to ignore."""
    rng = np.random.default_rng(seed)
    boxes = []
    for height, width in SIZES:
        low, high = np.sort(rng.random((2, 40, 2)) * (width, height), 0)
        boxes.append(np.concatenate([low, np.maximum(high - low, 0.5)], 1))
    index = index_of(
        names=["a", "b"],
        paths=[f"{i}.png" for i in range(len(SIZES))],
        image_hw=np.array(SIZES),
        offsets=40 * np.arange(len(SIZES) + 1),
        boxes_xywh_px=np.concatenate(boxes),
        classes=rng.integers(2, size=40 * len(SIZES)),
    )
    return replace(index, crowd=rng.random(len(index.classes)) < 0.1)


def tiled(seed: int | None = 0, visibility: float = 0.3, side: int = SIDE) -> TiledIndex:
    return TiledIndex(boxed_index(), side, hyp=Hyperparameters(tile_visibility=visibility), seed=seed)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("side", [SIDE, 35])
def test_tiles_of_every_epoch_cover_the_images_but_for_their_edges(seed, side):
    """Tiles of 35 pixels overlap by 7, of which each neighbor moves by at most 3."""
    tiles = tiled(seed, side=side)
    everything = np.arange(len(tiles.tile_index))
    reach = 0 if seed is None else round(0.1 * side)
    seen = set()
    for epoch in range(4):
        corners = tiles.corners(everything, epoch)
        seen.add(corners.tobytes())
        np.testing.assert_array_equal(tiles.corners(everything[::-1], epoch), corners[::-1])
        for i, (height, width) in enumerate(SIZES):
            covered = np.zeros((height, width), bool)
            for left, top in corners[tiles.image == i]:
                assert 0 <= left <= max(width - side, 0)
                assert 0 <= top <= max(height - side, 0)
                covered[top : top + side, left : left + side] = True
            edges = [reach if length > side else 0 for length in covered.shape]
            assert covered[tuple(slice(edge, length - edge) for edge, length in zip(edges, covered.shape))].all()
    assert len(seen) == (1 if seed is None else 4)
    np.testing.assert_array_equal(tiles.corners(everything, 1), tiled(seed, side=side).corners(everything, 1))


@pytest.mark.parametrize("visibility", [0.0, 0.3, 1.0])
def test_labels_are_what_a_tile_shows(visibility):
    """The reference clips in loops over tiles and boxes. Fragments that show too little of an object are ignored."""
    tiles = tiled(visibility=visibility)
    images = boxed_index()
    for epoch in (0, 3):
        numbers = np.array([5, 0, len(tiles.tile_index) - 1, 5, 7])
        labels, position = tiles.labels_of(numbers, epoch)
        for at, (tile, (left, top)) in enumerate(zip(numbers, tiles.corners(numbers, epoch))):
            rows = []
            image = int(tiles.image[tile])
            for row in range(*images.offsets[image : image + 2]):
                x, y, w, h = images.boxes_xywh_px[row]
                x1, y1 = max(x - left, 0), max(y - top, 0)
                x2, y2 = min(x + w - left, SIDE), min(y + h - top, SIDE)
                if x2 <= x1 or y2 <= y1:
                    continue
                shown = (x2 - x1) * (y2 - y1) / (w * h)
                is_ignored = images.crowd[row] or shown < visibility - 1e-6
                c = -2 - images.classes[row] if is_ignored else images.classes[row]
                rows.append([c, (x1 + x2) / 2 / SIDE, (y1 + y2) / 2 / SIDE, (x2 - x1) / SIDE, (y2 - y1) / SIDE])
            np.testing.assert_allclose(labels[position == at], rows, atol=1e-6)


def test_pixels_are_parts_of_the_image():
    tiles = tiled()
    rng = np.random.default_rng(0)
    for tile in (0, 3, len(tiles.tile_index) - 1):
        height, width = SIZES[int(tiles.image[tile])]
        image = rng.integers(256, size=(height, width, 3), dtype=np.uint8)
        ((left, top),) = tiles.corners(np.array([tile]), 2)
        padded = np.pad(image, ((0, SIDE), (0, SIDE), (0, 0)), constant_values=GRAY)
        shown = crop_tile(image, (left, top), SIDE)
        np.testing.assert_array_equal(shown, padded[top : top + SIDE, left : left + SIDE])
        assert np.shares_memory(shown, image) == (min(height, width) >= SIDE)


def test_tiles_without_objects_come_as_often_as_asked_and_none_with_objects_is_an_error():
    tiles = tiled(visibility=1.0)
    is_object = ~tiles.tile_index.crowd
    has_object = np.bincount(tiles.tile_index.image_of_box[is_object], minlength=len(tiles.tile_index)) > 0
    assert 0 < has_object.sum() < len(has_object)
    weights = tile_weights(tiles, 0.1)
    assert (weights[has_object] == 1).all()
    assert weights[~has_object].sum() == pytest.approx(0.1 * has_object.sum())
    assert (tile_weights(tiles, 100.0) == 1).all()
    with refused("tile 128: no tile shows 30 % of an object; use larger tiles"):
        check_tiles(TiledIndex(replace(boxed_index(), crowd=np.ones(160, bool)), SIDE, hyp=Hyperparameters()))


@pytest.fixture
def data(tmp_path) -> Path:
    """A YAML with ``tile: 128`` and five images, of which one is smaller than a tile."""
    sizes_hw = [(300, 420), (400, 200), (90, 100), (128, 512), (260, 260)]
    return write_tiled_dataset(tmp_path, sizes_hw, tile=128, squares=6, seed=1)


def test_validation_batches_are_tiles_of_whole_images(data):
    """Over all ranks each tile occurs once, and its labels, in pixels of its image, are those of the image."""
    config = TrainConfig(data=str(data), imgsz=64, batch_size=3, workers=0)
    spec = load_dataset_spec(data)
    seen = []
    for rank in range(2):
        canvases = CanvasRule(64, 32)
        ctx = DistributedContext.single()
        reader = open_run_val_reader(ctx, config, Hyperparameters(), spec)
        loader = build_run_val_loader(ctx, config, reader, canvases)
        tiles = loader.samples.tiles
        requests = loader.samples.requests(3, canvases, rank=rank, world_size=2)
        for request in requests:
            assert len({int(tiles.image[key.index]) for key in request.keys}) == 1
            for sample in loader.samples.render(request):
                seen.append(sample.index)
                image = int(tiles.image[sample.index])
                assert image % 2 == rank
                assert sample.original_hw == tuple(loader.index.image_hw[image])
                rows = sample.labels[sample.labels[:, 0] >= 0]
                centers = (rows[:, 1:3] * 64 - sample.pad_xy) / sample.gain_xy
                boxes = loader.index.boxes_xywh_px[slice(*loader.index.offsets[image : image + 2])]
                low, high = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
                assert (((centers[:, None] > low) & (centers[:, None] < high)).all(2).any(1)).all()
    assert sorted(seen) == list(range(len(tiles.tile_index)))
    assert loader.index.ground_truth().max_det == 100 * np.bincount(tiles.image).max()
