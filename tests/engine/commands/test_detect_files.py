"""The files of detect.py: predictions.json, whose rows wait in a temporary file, against the JSON of the whole list."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from engine.commands.detect_drawing import DrawnFrame
from engine.commands.detect_files import PredictionsFile, ResultFiles, open_results_folder
from engine.inference.detection_stream import FrameDetections
from engine.inference.sources.frames import Frame
from tests.helpers.messages import refused
from utils.config.settings import DetectConfig
from utils.detections import DetectionTable
from utils.labels import image_ids_of


@pytest.mark.parametrize(
    "stems",
    [
        ["000139", "285"],
        ["1", "01"],  # the same number
        ["12", "clip_000001", "13"],
        ["schön 猫 \u2028 \udcff", 'a"b\\n'],
        [],
    ],
)
def test_predictions_are_the_json_of_all_rows(tmp_path: Path, stems: list[str]):
    predictions = PredictionsFile(tmp_path / "predictions.json")
    rows = []
    for number, stem in enumerate(stems):
        of_image = [{"image_id": stem, "bbox": [0.1 * number, 1e-7], "score": 1 / 3}] * (number + 1)
        predictions.add(stem, of_image)
        rows += of_image
    assert list(tmp_path.iterdir()) == []
    predictions.write()
    predictions.close()
    ids = dict(zip(stems, image_ids_of(stems)))
    expected = json.dumps([row | {"image_id": ids[row["image_id"]]} for row in rows], ensure_ascii=False, indent=1)
    assert (tmp_path / "predictions.json").read_bytes() == expected.encode("utf-8", "backslashreplace")


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *_, **__: open("/dev/full", "w+"))  # noqa: SIM115
    predictions = PredictionsFile(tmp_path / "predictions.json")
    with pytest.raises(OSError, match=r"No space left on device: '.*/predictions.json'"):
        predictions.add("a", [{"image_id": "a"}] * 10000)
    predictions.close()
    assert list(tmp_path.iterdir()) == []


def test_a_source_with_a_link_to_itself_does_not_prevent_the_results(tmp_path: Path):
    """The link is reported when it is read, like any unreadable file."""
    source = tmp_path / "images"
    source.mkdir()
    (source / "loop.jpg").symlink_to("loop.jpg")
    config = DetectConfig(weights="best.pt", source=str(source), project=str(tmp_path), name="out", exist_ok=True)
    assert open_results_folder(config) == tmp_path / "out"
    (source / "a.jpg").symlink_to("../out/a.jpg")
    with refused("a.jpg: is in the folder of the results and could be overwritten; choose another --project or --name"):
        open_results_folder(config)


def test_a_webcam_is_no_file_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = DetectConfig(weights="best.pt", source="0", project=".", name=".", exist_ok=True, save_txt=True)
    files = ResultFiles(open_results_folder(config), ("disc",), config)
    image = np.zeros((8, 8, 3), np.uint8)
    frame = Frame("0", image, fps=10.0, is_video=True, is_live=True, sequence="0")
    nothing = DetectionTable.concatenate([])
    files.add(DrawnFrame(FrameDetections(frame, nothing, {}), image), nothing)
    files.close()
    assert (tmp_path / "webcam0.mp4").is_file()
