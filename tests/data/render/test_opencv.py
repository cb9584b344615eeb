"""Pixels of augmented images compared with the classic pipeline in steps, and boxes with drawn rectangles."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest

from data.augment.labels import images_of, place_labels
from data.augment.plan import MIXUP_BETA, SamplePlan
from data.augment.transforms import HORIZON, MIN_SCALE, SharedColumns
from data.render.opencv import render_plan
from tests.helpers.synthetic_index import GEOMETRIES, OBJECT, draw_plan, smooth_image
from utils.batches import SampleKey
from utils.boxes import cxcywh_to_xyxy, scale_boxes
from utils.config.settings import Hyperparameters
from utils.pixels import GRAY
from utils.rng import Stream, keyed_generator, keyed_uniforms

CANVAS = 256
SIZES = [(240, 320), (320, 240), (256, 256), (180, 300), (90, 120)]
GEOMETRY = ("degrees", "translate", "scale", "shear", "perspective", "fliplr", "flipud")
NONE = dict.fromkeys(("mosaic", "mixup", *GEOMETRY, "hsv_h", "hsv_s", "hsv_v"), 0.0)
AUGMENTATIONS = {  # every augmentation alone, then together
    "none": {},
    "mosaic": {"mosaic": 1.0},
    "mixup": {"mixup": 1.0},
    "degrees": {"degrees": 30.0},
    "translate": {"translate": 0.3},
    "scale": {"scale": 0.9},
    "shear": {"shear": 15.0},
    "perspective": {"perspective": 0.001},
    "fliplr": {"fliplr": 0.5},
    "flipud": {"flipud": 0.5},
    "hsv_h": {"hsv_h": 0.2},
    "hsv_s": {"hsv_s": 0.7},
    "hsv_v": {"hsv_v": 0.4},
    "geometry": {"mosaic": 1.0, "degrees": 10.0, "shear": 5.0, "perspective": 5e-4, "scale": 0.5, "fliplr": 0.5},
    "all": {"mosaic": 0.7, "mixup": 0.5, "degrees": 5.0, "scale": 0.5, "translate": 0.1, "hsv_h": 0.02, "hsv_s": 0.5},
}


def drawn(plan: SamplePlan, images: list[np.ndarray], labels: np.ndarray | None = None):
    """The image, and its labels if every source image has ``labels`` (n, 5)."""
    labels = np.zeros((0, 5), np.float32) if labels is None else labels
    sizes = np.array([image.shape[:2] for image in images])
    num_patches = len(images_of([plan]))
    patch = np.repeat(np.arange(num_patches), len(labels))
    return render_plan(plan, images.__getitem__), place_labels([plan], sizes, np.tile(labels, (num_patches, 1)), patch)[
        0
    ]


def translation(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


def window_matrix(u: np.ndarray, hyp: Hyperparameters, frame_hw: tuple, canvas_hw: tuple) -> np.ndarray:
    """From frame to canvas: perspective, rotation and scale, shear, translation, flips, as a product of matrices."""
    jitter = 2 * u[6:14] - 1
    perspective, turn, shear, flip = np.eye(3), np.eye(3), np.eye(3), np.eye(3)
    tilt = jitter[6:8] * hyp.perspective
    reach = abs(tilt[0]) * frame_hw[1] / 2 + abs(tilt[1]) * frame_hw[0] / 2
    perspective[2, :2] = tilt / max(1.0, reach * HORIZON)
    angle = np.radians(jitter[0] * hyp.degrees)
    scale = max(1 + jitter[1] * hyp.scale, MIN_SCALE)
    turn[:2, :2] = scale * np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    shear[0, 1], shear[1, 0] = (np.tan(np.radians(v * hyp.shear)) for v in jitter[2:4])
    shift = (0.5 + jitter[4:6] * hyp.translate) * canvas_hw[::-1]
    if u[17] < hyp.fliplr:
        flip[0] = (-1, 0, canvas_hw[1])
    if u[18] < hyp.flipud:
        flip[1] = (0, -1, canvas_hw[0])
    centered = translation(-frame_hw[1] / 2, -frame_hw[0] / 2)
    return flip @ translation(*shift) @ shear @ turn @ perspective @ centered


def jittered_colors(image: np.ndarray, u: np.ndarray, hyp: Hyperparameters) -> np.ndarray:
    """Turns hue and scales saturation in YIQ, which keeps the luma, then scales the brightness."""
    hue, saturation, value = (2 * u[14:17] - 1) * (hyp.hsv_h, hyp.hsv_s, hyp.hsv_v)
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    y, i, q = np.moveaxis(image @ to_yiq.T, 2, 0)
    chroma = (i + 1j * q) * (1 + saturation) * np.exp(2j * math.pi * hue)
    rgb = np.stack([y, chroma.real, chroma.imag], 2) @ np.linalg.inv(to_yiq).T
    return (rgb * (1 + value)).clip(0, 255)


def layer_in_steps(index: int, u: np.ndarray, images: list[np.ndarray], hyp: Hyperparameters) -> np.ndarray:
    """Pastes onto a frame of twice the size, then warps a window out of it with four samples per pixel and axis, in
    floating point. ``u``: the layer's 19 random numbers."""
    is_mosaic = u[0] < hyp.mosaic
    pasted = [index, *(u[1:4] * len(images)).astype(int)] if is_mosaic else [index]
    side = 2 * CANVAS if is_mosaic else CANVAS
    frame = np.full((side, side, 3), GRAY, np.float32)
    cx, cy = ((0.5 + u[4:6]) * CANVAS).astype(int)
    for slot, number in enumerate(pasted):
        image = images[number].astype(np.float32)
        gain = CANVAS / max(image.shape)
        w, h = round(image.shape[1] * gain), round(image.shape[0] * gain)
        small = cv2.resize(image, (w, h), interpolation=cv2.INTER_LINEAR)
        x = (cx - w, cx)[slot % 2] if is_mosaic else (CANVAS - w) // 2
        y = (cy - h, cy)[slot // 2] if is_mosaic else (CANVAS - h) // 2
        x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + w, side), min(y + h, side)
        frame[y1:y2, x1:x2] = small[y1 - y : y2 - y, x1 - x : x2 - x]
    fine = 4
    to_fine = np.array([[fine, 0, (fine - 1) / 2], [0, fine, (fine - 1) / 2], [0, 0, 1.0]])
    half = translation(0.5, 0.5)
    warp = to_fine @ np.linalg.inv(half) @ window_matrix(u, hyp, frame.shape[:2], (CANVAS, CANVAS)) @ half
    out = cv2.warpPerspective(
        frame, warp, (CANVAS * fine,) * 2, borderMode=cv2.BORDER_CONSTANT, borderValue=(GRAY,) * 3
    )
    return jittered_colors(cv2.resize(out, (CANVAS, CANVAS), interpolation=cv2.INTER_AREA), u, hyp)


def image_in_steps(key: SampleKey, images: list[np.ndarray], hyp: Hyperparameters, seed: int) -> np.ndarray:
    (u,) = keyed_uniforms(seed, Stream.AUGMENT, [(key.epoch, key.position)], SharedColumns.COUNT)
    first = layer_in_steps(key.index, u[:19], images, hyp)
    if u[38] >= hyp.mixup:
        return first
    share = keyed_generator(seed, Stream.MIXUP, key.epoch, key.position).beta(MIXUP_BETA, MIXUP_BETA)
    second = layer_in_steps(int(u[39] * len(images)), u[19:38], images, hyp)
    return share * first + (1 - share) * second


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_every_augmentation_equals_the_pipeline_in_steps(name):
    rng = np.random.default_rng(0)
    images = [smooth_image(rng, h, w) for h, w in SIZES]
    hyp = Hyperparameters(**(NONE | AUGMENTATIONS[name]))
    for position in range(12):
        key = SampleKey(position % len(images), 0, position, (CANVAS, CANVAS))
        plan = draw_plan(key, source_hw=np.array(SIZES), hyp=hyp, seed=3, epochs=50)
        picture, _ = drawn(plan, images)
        difference = np.abs(picture - image_in_steps(key, images, hyp, 3)).max(2)
        # Smooth images: only pixels on a patch's edge may differ by more than interpolation does.
        assert np.median(difference) <= 2
        assert difference.mean() < 3.5
        assert (difference > 20).mean() < 0.035


@pytest.mark.parametrize("canvas", [64, 640])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_boxes_match_their_objects(geometry, canvas):
    height, width = (200, 300)
    box = (75, 66, 225, 132)
    image = np.full((height, width, 3), GRAY, np.uint8)
    image[box[1] : box[3], box[0] : box[2]] = OBJECT
    label = np.array([[0, 0.5, 99 / 200, 0.5, 66 / 200]], np.float32)
    hyp = Hyperparameters(**({"mosaic": 0.0, "hsv_h": 0, "hsv_s": 0, "hsv_v": 0} | GEOMETRIES[geometry]))
    is_aligned = geometry in ("plain", "zoom", "flips")
    seen = 0
    for position in range(15):
        plan = draw_plan(
            SampleKey(0, 0, position, (canvas, canvas)), source_hw=np.array([(200, 300)]), hyp=hyp, seed=1, epochs=50
        )
        picture, labels = drawn(plan, [image], label)
        if not len(labels):
            continue
        seen += 1
        found = scale_boxes(cxcywh_to_xyxy(labels[:, 1:].astype(np.float64)), canvas, canvas)[0]
        if is_aligned or ((found > 0).all() and (found < canvas).all()):
            covered = (picture[..., 0].astype(float) - GRAY) / (OBJECT[0] - GRAY) > 0.5
            ys, xs = np.nonzero(covered)
            # A rotated corner's last pixel is covered by less than half: the drawn extent may be a pixel short.
            extent = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
            assert np.abs(extent - found).max() <= (0.75 if is_aligned else 1.75)
    assert seen >= 8


def test_without_jitter_pixels_do_not_change_and_mixup_keeps_the_labels_of_both():
    image = smooth_image(np.random.default_rng(0), 64, 64)
    label = np.array([[1, 0.5, 0.5, 0.5, 0.5]], np.float32)
    for mixup in (0.0, 1.0):
        hyp = Hyperparameters(**(NONE | {"mixup": mixup}))
        plan = draw_plan(SampleKey(0, 0, 0, (64, 64)), source_hw=np.array([[64, 64]]), hyp=hyp, seed=0, epochs=50)
        picture, labels = drawn(plan, [image], label)
        assert np.abs(picture.astype(int) - image).max() <= mixup  # a mixture with itself is rounded
        np.testing.assert_array_equal(labels, np.repeat(label, 1 + int(mixup), 0))
