"""A predictor that finds the objects of a rendered scene."""

from __future__ import annotations

from typing import NamedTuple

from engine.inference.detector import ImageDetections, ImageDetector
from engine.inference.predictor import Predictor
from tests.helpers.moving_scene import SceneFrame, detections_in, number_in


class Seen(NamedTuple):
    """Stands in for the letterboxed images of a batch with the numbers of their frames."""

    numbers: list[int]


class KnownDetections(ImageDetector):
    """Finds `detections_in` the frames of the scene, as many at once as on a GPU."""

    frames: list[SceneFrame]

    def prepare(self, images, settings, batch_size=0):
        return [Seen([number_in(image) for image in images])]

    def detect(self, prepared, settings):
        detected = [detections_in(self.frames[number]) for seen in prepared for number in seen.numbers]
        return [ImageDetections(rows[rows[:, 4] > settings.selection.conf_thres], {}) for rows in detected]

    def images_at_once(self, batch_size=0):
        return 16


def with_known_detections(predictor: Predictor, frames: list[SceneFrame]) -> Predictor:
    """Makes ``predictor`` find the objects of ``frames``, and returns it."""
    predictor.image_detector = KnownDetections(predictor.model, None)
    predictor.image_detector.frames = frames
    return predictor
