"""Identities of objects across the frames of a video, a stream or a folder of images.

The package trackers (Roboflow, Apache-2.0) associates the detections of a frame with tracks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from engine.inference.results import Boxes, Results
from engine.inference.sources import Frame
from utils.config.settings import OBJECT_TRACKERS
from utils.errors import UserError
from utils.machine.packages import require_package
from utils.pixels import as_rgb8
from utils.schema import suggestion

# Detections above it continue a track, although they cannot begin one (the value of the ByteTrack paper).
LOW_CONFIDENCE = 0.1
IMAGES_PER_SECOND = 30.0  # assumed for folders of images
LOST_TRACK_S = 1.0  # how long a tracker of the package keeps a track without a detection, by its default
Tracker: TypeAlias = Any  # a tracker of the package trackers: its method update(sv.Detections) sets tracker_id
TrackerSource: TypeAlias = "str | Callable[[], Tracker]"  # a name of OBJECT_TRACKERS, or a function that makes one


class ObjectTracks:
    """Assigns track ids to detections, frame by frame.

    Each sequence of frames (`Frame.sequence`) has its own tracker and ids from 1 on. Its frames must come in order.
    """

    def __init__(self, tracker: TrackerSource, threshold: float) -> None:
        """``threshold``: the confidence above which a detection begins a track.

        Raises UserError for an unknown name, and without the package.
        """
        if isinstance(tracker, str) and tracker not in OBJECT_TRACKERS:
            hint = suggestion(tracker, OBJECT_TRACKERS) or f"; known: {', '.join(OBJECT_TRACKERS)}"
            raise UserError(f"tracker {tracker!r}: unknown{hint}")
        require_package("trackers", "tracking objects", "leave out --track, or use stream()")
        self._source = tracker
        self._threshold = threshold
        self._trackers: dict[str, Tracker] = {}  # by sequence
        self._times: dict[str, tuple[float, float]] = {}  # by sequence: of its newest frame, and what its tracker got

    @property
    def lowest_confidence(self) -> float:
        """The confidence above which the tracker needs detections: two of them associate all detections alike."""
        return self._threshold if self._source in ("ocsort", "sort") else min(self._threshold, LOW_CONFIDENCE)

    def update(self, result: Results) -> Results:
        """Returns the detections of the next frame that belong to tracks, with their ids, highest score first.
        ``result``: the detections above `lowest_confidence`."""
        import supervision

        frame = result.frame
        rows = result.boxes.array
        if frame.sequence not in self._trackers:
            self._trackers[frame.sequence] = self._new_tracker(frame)
        detections = supervision.Detections.from_ultralytics(result)
        detections.data["row"] = np.arange(len(rows))
        # botsort and trackers of users may measure the camera's motion in the image, BGR.
        needs_image = self._source == "botsort" or not isinstance(self._source, str)
        image = as_rgb8(frame.image)[..., ::-1] if needs_image else None
        timestamp = self._tracker_time(frame) if frame.is_video else None
        tracked = self._trackers[frame.sequence].update(detections, frame=image, timestamp=timestamp)
        numbers = np.asarray(tracked.data.get("row", ()), np.int64)
        ids = np.asarray(tracked.tracker_id, np.int64)
        order = np.argsort(numbers)
        order = order[ids[order] >= 0]  # others have no track, or not yet
        boxes = torch.from_numpy(np.insert(rows[numbers[order]], 4, ids[order] + 1, axis=1))
        return Results(frame, result.names, Boxes(boxes, frame.image_hw), result.speed)

    def _tracker_time(self, frame: Frame) -> float:
        """Returns the time of a frame for its tracker, seconds. A step is at most as long as a tracker keeps a track,
        so that frames that are further apart are compared with the one before."""
        time_s, tracker_s = self._times.get(frame.sequence, (frame.time_s, 0.0))
        tracker_s += min(frame.time_s - time_s, LOST_TRACK_S)
        self._times[frame.sequence] = (frame.time_s, tracker_s)
        return tracker_s

    def _new_tracker(self, frame: Frame) -> Tracker:
        """Returns the user's tracker, or one of the package with its defaults, except for the confidence thresholds.
        Those with two get the same for both: detections above it are associated first, and begin tracks."""
        if not isinstance(self._source, str):
            return self._source()
        import trackers

        settings: dict[str, float] = {"frame_rate": frame.fps or IMAGES_PER_SECOND}
        if self._source != "ocsort":
            settings["track_activation_threshold"] = self._threshold
        if self._source != "sort":
            settings["high_conf_det_threshold"] = self._threshold
        classes = {
            "bytetrack": trackers.ByteTrackTracker,
            "botsort": trackers.BoTSORTTracker,
            "cbiou": trackers.CBIoUTracker,
            "ocsort": trackers.OCSORTTracker,
            "sort": trackers.SORTTracker,
        }
        return classes[self._source](**settings)
