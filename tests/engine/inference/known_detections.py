"""A predictor that finds the objects of a rendered scene."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.inference.model import InferenceModel
from engine.inference.predict import Predictor
from engine.inference.results import Boxes, Results
from tests.helpers.moving_scene import SceneFrame, detections_in, number_in


class KnownDetections(Predictor):
    """Finds `detections_in` the frames of the scene, as many at once as on a GPU."""

    images_at_once = 16

    def __init__(self, model: InferenceModel, frames: list[SceneFrame], **settings: Any) -> None:
        super().__init__(model, **settings)
        self.frames = frames

    def prepare(self, frames, settings):
        return frames

    def detect(self, prepared, settings):
        results = []
        for frame in prepared:
            rows = detections_in(self.frames[number_in(frame.image)]).astype(np.float32)
            found = torch.from_numpy(rows[rows[:, 4] > settings.selection.conf_thres])
            results.append(Results(frame, self.names, Boxes(found, frame.image_hw), {}))
        return results
