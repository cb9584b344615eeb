"""Tracks of objects in a rendered video with known identities, against the package trackers called by hand and an
evaluator (motmetrics). Without these packages the tests are skipped."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import detect
from engine.inference import detect as detection
from engine.inference.model import open_model
from engine.inference.tracks import LOW_CONFIDENCE
from tests.engine.inference.known_detections import KnownDetections
from tests.helpers.moving_scene import (
    FPS,
    NAMES,
    SceneFrame,
    detections_in,
    scene,
    scores_of,
    write_images,
    write_video,
)
from tests.helpers.tiny import write_weights
from utils.config.settings import OBJECT_TRACKERS
from utils.errors import UserError

# Imported where they are used: they take seconds, and every process of pytest-xdist reads this file.
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("supervision", "trackers")),
    reason="needs supervision and trackers",
)

THRESHOLD = 0.5


@pytest.fixture(scope="module")
def frames() -> list[SceneFrame]:
    return list(scene())


@pytest.fixture(scope="module")
def video(frames, tmp_path_factory) -> Path:
    return write_video(tmp_path_factory.mktemp("scene") / "clip.mp4", frames)


@pytest.fixture(scope="module")
def scene_weights(tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "best.pt", NAMES)


@pytest.fixture(scope="module")
def predictor(scene_weights, frames) -> KnownDetections:
    return KnownDetections(open_model(scene_weights, device="cpu"), frames, conf=THRESHOLD, color="rgb")


@pytest.fixture(scope="module")
def by_hand(frames) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids and boxes of ByteTrack without this program."""
    import supervision
    import trackers

    tracker = trackers.ByteTrackTracker(
        frame_rate=FPS, track_activation_threshold=THRESHOLD, high_conf_det_threshold=THRESHOLD
    )
    found = []
    for frame in frames:
        rows = detections_in(frame)
        rows = rows[rows[:, 4] > LOW_CONFIDENCE]
        detections = supervision.Detections(rows[:, :4], confidence=rows[:, 4], class_id=rows[:, 5].astype(int))
        tracked = tracker.update(detections)
        tracked = tracked[tracked.tracker_id >= 0]
        order = np.argsort(-tracked.confidence)
        found.append((tracked.tracker_id[order] + 1, tracked.xyxy[order]))
    return found


@pytest.mark.parametrize("name", OBJECT_TRACKERS)
def test_tracks_equal_the_librarys_and_follow_most_objects(name, predictor, frames, video, by_hand):
    results = list(predictor.track(video, tracker=name))
    assert len(results) == len(frames)
    assert [record["track_id"] for record in results[20].summary()] == results[20].boxes.id.tolist()
    if name == "bytetrack":
        for result, (ids, boxes) in zip(results, by_hand):
            assert result.boxes.id.tolist() == ids.tolist()
            np.testing.assert_array_equal(result.boxes.xyxy, np.float32(boxes))
    tracked = [(result.boxes.id.numpy().astype(int), result.boxes.xyxy.numpy().astype(float)) for result in results]
    assert all((ids >= 1).all() for ids, _ in tracked)
    pytest.importorskip("motmetrics")
    assert scores_of(frames, tracked)["mota"] > 0.75


def test_sources_of_frames_give_the_same(predictor, frames, tmp_path):
    """A folder of images, in the order of their numbers, and an iterable of arrays have 30 frames per second."""
    import trackers

    expected = [result.boxes.data.tolist() for result in predictor.track(frames[i].image for i in range(60))]
    folder = write_images(tmp_path / "images", frames[:60])
    for path in folder.iterdir():
        path.rename(path.with_name(f"frame{int(path.stem)}.png"))

    def new_tracker():
        return trackers.ByteTrackTracker(track_activation_threshold=0.5, high_conf_det_threshold=0.5)

    for tracker in ("bytetrack", new_tracker):
        assert [result.boxes.data.tolist() for result in predictor.track(folder, tracker=tracker)] == expected


@pytest.mark.parametrize(("pause_ms", "is_same"), [(600, True), (1500, False)])
def test_a_track_lasts_for_a_second_of_the_source(predictor, frames, tmp_path, pause_ms, is_same):
    """A tracker that knows the time follows objects over gaps, also over skipped frames of live streams. In the third
    frame, which is shown for ``pause_ms``, nothing is found."""
    empty = replace(frames[2], boxes_xyxy_px=np.zeros((0, 4)), classes=np.zeros(0, int), visible=np.zeros(0))
    shown = [*frames[:2], empty, *frames[3:5]]
    pictures = [Image.fromarray(frame.image) for frame in shown]
    path = tmp_path / "pause.gif"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=[50, 50, pause_ms, 50, 50])
    finder = KnownDetections(predictor.model, shown, conf=THRESHOLD)
    ids = [set(result.boxes.id.tolist()) for result in finder.track(path)]
    assert ids[1]
    assert not ids[2]
    assert bool(ids[1] & ids[4]) == is_same


def test_files_of_detect(frames, video, scene_weights, by_hand, tmp_path, monkeypatch):
    monkeypatch.setattr(detection, "Predictor", lambda model, **more: KnownDetections(model, frames, **more))
    flags = ["--weights", scene_weights, "--source", video, "--project", tmp_path, "--device", "cpu"]
    flags += ["--conf", THRESHOLD, "--track", "--save-txt", "--save-json"]
    detect.main([*map(str, flags)])
    folder = tmp_path / "exp"
    files = {str(p.relative_to(folder)) for p in folder.rglob("*.*") if not p.name.startswith(".")}
    assert files == {"clip.mp4", "predictions.json", "tracks/clip.txt"}
    assert cv2.VideoCapture(str(folder / "clip.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == len(frames)
    rows = np.loadtxt(folder / "tracks" / "clip.txt", delimiter=",", ndmin=2)
    records = json.loads((folder / "predictions.json").read_text())
    for frame, (ids, boxes) in zip(frames, by_hand):
        of_frame = rows[rows[:, 0] == frame.number + 1]
        assert of_frame[:, 1].tolist() == ids.tolist()
        corners = np.concatenate([of_frame[:, 2:4], of_frame[:, 2:4] + of_frame[:, 4:6]], 1)
        np.testing.assert_allclose(corners, boxes, atol=2e-3)
        assert [r["track_id"] for r in records if r["frame"] == frame.number] == ids.tolist()


def test_mistakes_in_the_use_of_tracking_are_refused(predictor, frames, video, tmp_path, monkeypatch):
    (image,) = write_images(tmp_path / "one", frames[:1]).iterdir()
    for source in (image, image.parent, frames[0].image):
        with pytest.raises(UserError):
            predictor.track(source)
    with pytest.raises(UserError, match="bytetrak"):
        predictor.track(video, tracker="bytetrak")
    monkeypatch.setitem(sys.modules, "trackers", None)
    with pytest.raises(UserError, match="pip install"):
        predictor.track(video)
