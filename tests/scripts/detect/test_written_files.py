"""Names of written files differ and are safe; videos of any frame rate and size can be written."""

import shutil

import cv2
import numpy as np

from engine.inference.detect_files import ResultFiles
from engine.inference.results import Boxes, Results, written_suffix
from engine.inference.sources import Frame, open_source
from tests.helpers.http_server import serve_folder
from tests.scripts.detect.detection import frames_of, names_in, read, read_txt, run
from utils.config.settings import DetectConfig


def test_images_of_one_name_in_two_folders_keep_their_labels(weights, pictures, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
        shutil.copy(pictures / ("a.png" if split == "train" else "a.jpg"), tmp_path / "images" / split / "a.png")
    folder = run(weights, tmp_path / "images/*/*.png", tmp_path, "--save-txt", "--save-json", "--save-crop")
    files = names_in(folder)
    assert {"train/a.png", "val/a.png", "labels/train/a.txt", "labels/val/a.txt"} <= set(files)
    assert {row["image_id"] for row in read(folder)} == {"train/a", "val/a"}
    assert sum(name.startswith("crops/train/") for name in files) == sum(
        name.startswith("crops/val/") for name in files
    )
    first, second = (read_txt(folder / "labels" / split / "a.txt") for split in ("train", "val"))
    assert not np.array_equal(first, second)


def test_tracks_have_the_names_of_their_sequences(tmp_path):
    """MOT Challenge's images are in SEQUENCE/img1."""
    image = np.zeros((32, 32, 3), np.uint8)
    for sequence in ("MOT17-02", "MOT17-04"):
        (tmp_path / sequence / "img1").mkdir(parents=True)
        cv2.imwrite(str(tmp_path / sequence / "img1" / "000001.jpg"), image)
    source = f"{tmp_path}/*/img1/*.jpg"
    config = DetectConfig(weights="best.pt", source=source, project=str(tmp_path), save_txt=True, nosave=True)
    files = ResultFiles({0: "disc"}, config)
    for frame in open_source(source):
        boxes = Boxes(np.array([[1, 2, 5, 8, 3, 0.5, 0]]), (32, 32))
        files.add(frame, Results(image, frame.path, {0: "disc"}, boxes, {}), None, b"")
    files.close()
    assert names_in(files.folder) == ["tracks/MOT17-02.txt", "tracks/MOT17-04.txt"]
    assert (files.folder / "tracks/MOT17-02.txt").read_text().startswith("1,3,1.000,2.000,4.000,6.000,0.5")


def test_the_result_of_a_url_has_a_safe_name(weights, pictures, tmp_path, monkeypatch):
    shutil.copy(pictures / "a.png", tmp_path / "a b:c.png")
    with serve_folder(tmp_path, monkeypatch) as address:
        folder = run(weights, f"{address}/a%20b%3Ac.png?v=1", tmp_path, "--save-txt")
    assert names_in(folder) == ["a b_c.png", "labels/a b_c.txt"]


def write_video(folder, fps, *sides):
    """Writes a frame of each side; returns the path."""
    config = DetectConfig(weights="best.pt", source="rtsp://camera/clip", project=str(folder))
    files = ResultFiles({0: "disc"}, config)
    for index, side in enumerate(sides):
        image = np.zeros((side, side, 3), np.uint8)
        frame = Frame(config.source, image, index, index / fps, (index + 1) / fps, fps, is_video=True)
        result = Results(image, frame.path, {0: "disc"}, Boxes(np.zeros((0, 6)), (side, side)), {})
        files.add(frame, result, image, b"")
    files.close()
    return files.folder / "clip.mp4"


def test_frames_may_change_size_and_unwritable_formats_become_jpg(tmp_path):
    assert len(frames_of(write_video(tmp_path, 5.0, 32, 48))) == 2
    assert [written_suffix(name) for name in ("p.mpo", "p.PNG", "a.b/p")] == [".jpg", ".PNG", ".jpg"]
