"""A predictor that finds the objects of a rendered scene."""

from __future__ import annotations

from typing import Any

from engine.inference.model import InferenceModel
from engine.inference.predict import ImageDetections, Predictor
from tests.helpers.moving_scene import SceneFrame, detections_in, number_in


class KnownDetections(Predictor):
    """Finds `detections_in` the frames of the scene, as many at once as on a GPU."""

    images_at_once = 16

    def __init__(self, model: InferenceModel, frames: list[SceneFrame], **settings: Any) -> None:
        super().__init__(model, **settings)
        self.frames = frames

    def prepare(self, images, settings):
        return [number_in(image) for image in images]

    def detect(self, prepared, settings):
        detected = [detections_in(self.frames[number]) for number in prepared]
        return [ImageDetections(rows[rows[:, 4] > settings.selection.conf_thres], {}) for rows in detected]
