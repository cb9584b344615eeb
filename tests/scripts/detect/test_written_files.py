"""Names of written files differ and are safe; videos of any frame rate and size can be written."""

import shutil

import cv2
import numpy as np

from engine.inference.results import Boxes, Results, written_suffix
from engine.inference.sources import Frame, open_source
from engine.inference.writers import Drawn, OutputFolder, open_writers
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
    config = DetectConfig(
        source=source, project=str(tmp_path), track="sort", save_txt=True, nosave=True, weights="a.pt"
    )
    folder = write(config, open_source(source), np.array([[1, 2, 5, 8, 3, 0.5, 0]]))
    assert names_in(folder) == ["tracks/MOT17-02.txt", "tracks/MOT17-04.txt"]
    assert (folder / "tracks/MOT17-02.txt").read_text().startswith("1,3,1.000,2.000,4.000,6.000,0.5")


def write(config, frames, rows):
    """Writes the files of frames in which the boxes ``rows`` are found; returns their folder."""
    output = OutputFolder(config)
    writers = open_writers(output)
    for frame in frames:
        result = Results(frame, {0: "disc"}, Boxes(rows, frame.image.shape[:2]), {})
        for writer in writers:
            writer.write(Drawn(result, frame.image, b""))
    for writer in writers:
        writer.close()
    return output.path


def test_the_result_of_a_url_has_a_safe_name(weights, pictures, tmp_path, monkeypatch):
    shutil.copy(pictures / "a.png", tmp_path / "a b:c.png")
    with serve_folder(tmp_path, monkeypatch) as address:
        folder = run(weights, f"{address}/a%20b%3Ac.png?v=1", tmp_path, "--save-txt")
    assert names_in(folder) == ["a b_c.png", "labels/a b_c.txt"]


def test_frames_may_change_size_and_unwritable_formats_become_jpg(tmp_path):
    config = DetectConfig(weights="a.pt", source="rtsp://camera/clip", project=str(tmp_path))
    images = [np.zeros((side, side, 3), np.uint8) for side in (32, 48)]
    frames = [Frame(config.source, image, n, n / 5, (n + 1) / 5, 5.0, is_video=True) for n, image in enumerate(images)]
    assert len(frames_of(write(config, frames, np.zeros((0, 6))) / "clip.mp4")) == 2
    assert [written_suffix(name) for name in ("p.mpo", "p.PNG", "a.b/p")] == [".jpg", ".PNG", ".jpg"]
