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
from engine.inference.predictor import Predictor, load
from engine.inference.sources import Frame
from engine.inference.tracks import LOW_CONFIDENCE, ObjectTracks
from tests.engine.inference.known_detections import KnownDetections, with_known_detections
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


@pytest.fixture
def predictor(scene_weights, frames) -> Predictor:
    return with_known_detections(load(scene_weights, device="cpu", conf=THRESHOLD, color="rgb"), frames)


def by_hand(frames: list[SceneFrame], min_score: float = LOW_CONFIDENCE) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the ids and boxes of ByteTrack without this program."""
    import supervision
    import trackers

    tracker = trackers.ByteTrackTracker(
        frame_rate=FPS, track_activation_threshold=THRESHOLD, high_conf_det_threshold=THRESHOLD
    )
    found = []
    for frame in frames:
        rows = detections_in(frame)
        rows = rows[rows[:, 4] > min_score]
        detections = supervision.Detections(rows[:, :4], confidence=rows[:, 4], class_id=rows[:, 5].astype(int))
        tracked = tracker.update(detections)
        tracked = tracked[tracked.tracker_id >= 0]
        order = np.argsort(-tracked.confidence)
        found.append((tracked.tracker_id[order] + 1, tracked.xyxy[order]))
    return found


def test_tracks_equal_those_of_the_library_called_by_hand(predictor, frames, video):
    results = list(predictor.track(video))
    assert len(results) == len(frames)
    expected = by_hand(frames)
    for result, (ids, boxes) in zip(results, expected):
        assert result.boxes.id.tolist() == ids.tolist()
        np.testing.assert_array_equal(result.boxes.xyxy, np.float32(boxes))
    tracked = [(result.boxes.id.numpy().astype(int), result.boxes.xyxy.numpy().astype(float)) for result in results]
    pytest.importorskip("motmetrics")
    scores = scores_of(frames, tracked)
    assert scores == scores_of(frames, [(ids, np.float64(np.float32(boxes))) for ids, boxes in expected])
    assert scores["idf1"] > 0.8
    assert scores["mota"] > 0.9


@pytest.mark.parametrize("name", OBJECT_TRACKERS)
def test_every_tracker_follows_most_objects(name, predictor, frames, video):
    pytest.importorskip("motmetrics")
    results = list(predictor.track(str(video), tracker=name))
    tracked = [(result.boxes.id.numpy().astype(int), result.boxes.xyxy.numpy().astype(float)) for result in results]
    assert scores_of(frames, tracked)["mota"] > 0.75
    assert all((result.boxes.id >= 1).all() for result in results)


def test_sources_of_frames_give_the_same(predictor, frames, video, tmp_path):
    """A folder of images, its glob and an iterable of arrays have the rate of 30 frames per second."""
    import trackers

    expected = [result.boxes.data.tolist() for result in predictor.track(frames[i].image for i in range(60))]
    folder = write_images(tmp_path / "images", frames[:60])
    for source in (folder, f"{folder}/*.png", sorted(folder.iterdir())):
        assert [result.boxes.data.tolist() for result in predictor.track(source)] == expected
    bgr = [frame.image[..., ::-1] for frame in frames[:60]]
    assert [result.boxes.data.tolist() for result in predictor.track(bgr, color="bgr")] == expected
    made = []

    def new_tracker():
        made.append(trackers.ByteTrackTracker(track_activation_threshold=0.5, high_conf_det_threshold=0.5))
        return made[-1]

    assert [result.boxes.data.tolist() for result in predictor.track(folder, tracker=new_tracker)] == expected
    assert len(made) == 1


def test_images_come_in_the_order_of_their_numbers(predictor, frames, tmp_path):
    """Names without leading zeros would come as 0, 1, 10, 11, 2, ..."""
    folder = write_images(tmp_path / "images", frames[:24])
    for path in folder.iterdir():
        path.rename(path.with_name(f"frame{int(path.stem)}.png"))
    results = list(predictor.track(folder))
    assert [Path(result.path).name for result in results] == [f"frame{i}.png" for i in range(24)]


def test_skipped_frames_of_live_streams_are_told(frames):
    """A tracker that knows the time follows objects over gaps in which they have moved far."""
    tracks = ObjectTracks("bytetrack", THRESHOLD)
    ids = []
    for frame in frames[:40:4]:
        given = Frame(
            "rtsp://camera", frame.image, frame.number, frame.number / FPS, fps=FPS, is_video=True, is_live=True
        )
        rows = tracks.update(given, detections_in(frame))
        ids.append(dict(zip(rows[:, 6].tolist(), rows[:, 4].tolist())))
    assert ids[-1] == ids[2]


@pytest.mark.parametrize(("pause_ms", "is_same"), [(600, True), (1500, False)])
def test_a_track_lasts_for_a_second_of_the_source(predictor, frames, tmp_path, pause_ms, is_same):
    """In the third frame, which is shown for ``pause_ms``, nothing is found."""
    empty = replace(frames[2], boxes_xyxy_px=np.zeros((0, 4)), classes=np.zeros(0, int), visible=np.zeros(0))
    shown = [*frames[:2], empty, *frames[3:5]]
    pictures = [Image.fromarray(frame.image) for frame in shown]
    path = tmp_path / "pause.gif"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=[50, 50, pause_ms, 50, 50])
    ids = [set(result.boxes.id.tolist()) for result in with_known_detections(predictor, shown).track(path)]
    assert ids[1]
    assert not ids[2]
    assert bool(ids[1] & ids[4]) == is_same


def test_tracked_results(predictor, video, tmp_path):
    import supervision

    result = list(predictor.track(video))[20]
    boxes = result.boxes
    assert boxes.is_track
    assert boxes.data.shape == (6, 7)
    assert boxes.data[:, 4].tolist() == boxes.id.tolist() == result[:6].boxes.id.tolist()
    assert boxes.data[:, 5].tolist() == boxes.conf.tolist()
    assert boxes.data[:, 6].tolist() == boxes.cls.tolist()
    assert [record["track_id"] for record in result.summary()] == boxes.id.tolist()
    assert boxes[boxes.id == 3].id.tolist() == [3.0]
    found = supervision.Detections.from_ultralytics(result)
    assert found.tracker_id.tolist() == boxes.id.tolist()
    assert len(result.numpy().boxes.id) == 6
    result.save_txt(tmp_path / "a.txt", save_conf=True)
    rows = np.loadtxt(tmp_path / "a.txt")
    assert rows[:, 5].tolist() == pytest.approx(boxes.conf.tolist(), abs=1e-6)
    assert rows[:, 6].tolist() == boxes.id.tolist()
    result.save_txt(tmp_path / "a.txt")
    assert np.loadtxt(tmp_path / "a.txt").tolist() == rows[:, [0, 1, 2, 3, 4, 6]].tolist()


def run(frames, monkeypatch, *flags: object) -> None:
    def known_detections(model, autocast, tiles):
        detector = KnownDetections(model, None)
        detector.frames = frames
        return detector

    monkeypatch.setattr(detection, "ImageDetector", known_detections)
    detect.main([*map(str, flags), "--device", "cpu", "--conf", str(THRESHOLD)])


def read_mot(path: Path) -> np.ndarray:
    """Rows of numbers."""
    return np.loadtxt(path, delimiter=",", ndmin=2)


def test_files_of_detect(frames, video, scene_weights, tmp_path, monkeypatch, capsys):
    flags = ["--weights", scene_weights, "--source", video, "--project", tmp_path / "runs"]
    run(frames, monkeypatch, *flags, "--track", "--save-txt", "--save-json")
    folder = tmp_path / "runs" / "exp"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*") if not p.name.startswith(".")) == [
        "clip.mp4",
        "predictions.json",
        "tracks/clip.txt",
    ]
    assert cv2.VideoCapture(str(folder / "clip.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == len(frames)
    rows = read_mot(folder / "tracks" / "clip.txt")
    records = json.loads((folder / "predictions.json").read_text())
    expected = by_hand(frames)
    for frame, (ids, boxes) in zip(frames, expected):
        of_frame = rows[rows[:, 0] == frame.number + 1]
        assert of_frame[:, 1].tolist() == ids.tolist()
        corners = np.concatenate([of_frame[:, 2:4], of_frame[:, 2:4] + of_frame[:, 4:6]], 1)
        np.testing.assert_allclose(corners, boxes, atol=2e-3)
        assert [r["track_id"] for r in records if r["frame"] == frame.number] == ids.tolist()
    assert (rows[:, 7:] == -1).all()
    count = len({track for ids, _ in expected for track in ids.tolist()})
    assert f" in {count} tracks; " in capsys.readouterr().out
    motmetrics = pytest.importorskip("motmetrics")
    assert len(motmetrics.io.loadtxt(str(folder / "tracks" / "clip.txt"), fmt="mot15-2D")) == len(rows)


def test_mistakes_in_the_use_of_tracking_are_refused(predictor, frames, video, tmp_path, monkeypatch):
    (image,) = write_images(tmp_path / "one", frames[:1]).iterdir()
    for source in (image, image.parent, frames[0].image, 3.5):
        with pytest.raises(UserError):
            predictor.track(source)
    for mistake in ({"tracker": "bytetrak"}, {"vid_stride": 0}):
        with pytest.raises(UserError, match=next(iter(mistake))):
            predictor.track(video, **mistake)
    monkeypatch.setitem(sys.modules, "trackers", None)
    with pytest.raises(UserError, match="pip install"):
        predictor.track(video)
