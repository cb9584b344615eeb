"""detect.py from end to end with a tiny untrained model: detections, files, times, streams and interruptions."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import detect
from data.read_spec import load_dataset_spec
from engine.evaluation.coco_classes import COCO_IDS
from engine.inference import detect as detection
from engine.inference import sources
from engine.inference.predict import Predictor
from engine.inference.results import Boxes, Results
from engine.inference.sources import ReadAhead, open_source
from engine.inference.writers import Drawn, ResultFiles
from models.detector import Detector, build_detector
from tests.helpers.http_server import serve, serve_folder
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.scripts import call, error_of
from tests.helpers.selection import select
from tests.helpers.tiny import TINY_MODEL, write_detector
from utils.boxes import cxcywh_to_xyxy, scale_boxes
from utils.config.settings import DetectConfig
from utils.pixels import GRAY
from utils.program_folders import CONFIGS

NAMES = ("disc", "box/größe")
SIZE = 64


@pytest.fixture(scope="module")
def model() -> Detector:
    return build_detector(TINY_MODEL, len(NAMES), names=NAMES, seed=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory, model) -> Path:
    return write_detector(tmp_path_factory.mktemp("weights") / "best.pt", model)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    return cv2.resize(coarse, (width, height))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A square, a wide and a tall image; two have the same stem."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, hw in (("a.png", (SIZE, SIZE)), ("a.jpg", (37, 90)), ("schön 猫.bmp", (90, 50))):
        (folder / name).write_bytes(cv2.imencode(name[-4:], noise(*hw))[1].tobytes())
    return folder


def write_clip(path: Path, frames: int) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 12, (64, 48))
    for number in range(frames):
        writer.write(np.full((48, 64, 3), number * 30 % 256, np.uint8))
    writer.release()
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip") / "clip.mp4", 7)


def run(weights: Path, source: object, tmp_path: Path, *more: object) -> Path:
    """Runs detect.py, by default for five detections an image, however unlikely. Returns the folder of its results."""
    words = ["--weights", weights, "--source", source, "--device", "cpu", "--project", tmp_path / "runs"]
    detect.main([str(word) for word in [*words, "--conf-thres", "0", "--max-det", "5", *more]])
    return newest_of(tmp_path)


def newest_of(tmp_path: Path) -> Path:
    return max((tmp_path / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)


def names_in(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(str(path.relative_to(folder)) for path in files)


def frames_of(path: Path) -> list[np.ndarray]:
    capture = cv2.VideoCapture(str(path))
    frames = []
    while (got := capture.read())[0]:
        frames.append(got[1])
    return frames


def read_txt(path: Path) -> np.ndarray:
    return np.array([[float(v) for v in row.split()] for row in path.read_text().splitlines()])


def read(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "predictions.json").read_text(encoding="utf-8"))


# Detections and files


def test_images_labels_crops_and_tables_are_written_and_agree(weights, pictures, tmp_path, capsys):
    folder = run(weights, pictures, tmp_path, "--save-txt", "--save-conf", "--save-json", "--save-crop")
    files = names_in(folder)
    sources = {"a.jpg": "a.jpg", "a.png": "a.png", "schön 猫": "schön 猫.bmp"}  # by name of the results
    labels = {f"labels/{name}.txt" for name in sources}
    assert {"a.jpg.jpg", "a.png.png", "schön 猫.bmp", "predictions.json"} | labels <= set(files)
    records = read(folder)
    crops = [name for name in files if name.startswith("crops/")]
    assert len(crops) == len(records) > 0
    assert all(name.startswith(("crops/disc/", "crops/box_größe/")) for name in crops)
    for name, source in sources.items():
        height, width = cv2.imdecode(np.fromfile(pictures / source, np.uint8), 1).shape[:2]
        rows = read_txt(folder / "labels" / f"{name}.txt")
        own = [r for r in records if r["image_id"] == name]
        assert {r["file"] for r in own} == {str(pictures / source)}
        assert rows.shape == (len(own), 6)
        boxes = scale_boxes(cxcywh_to_xyxy(rows[:, 1:5]), width, height)
        x, y, w, h = np.array([r["bbox"] for r in own]).T
        np.testing.assert_allclose(boxes, np.stack([x, y, x + w, y + h], 1), atol=2e-3)
        np.testing.assert_allclose(rows[:, 5], [r["score"] for r in own], atol=1e-6)
        assert rows[:, 0].astype(int).tolist() == [r["category_id"] for r in own]
        assert (boxes >= -1e-3).all()
        assert (boxes <= np.array([width, height, width, height]) + 1e-3).all()
    assert "3 images:" in capsys.readouterr().out


def test_pycocotools_loads_the_detections_of_cocos_images_and_classes(pictures, tmp_path):
    coco = pytest.importorskip("pycocotools.coco")
    names = load_dataset_spec(CONFIGS / "data" / "coco.yaml").names
    weights = write_detector(tmp_path / "best.pt", build_detector(TINY_MODEL, 80, names=names, seed=1))
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("000000000139.png", "42.png"):
        shutil.copy(pictures / "a.png", folder / name)
    output = run(weights, folder, tmp_path, "--save-json", "--save-txt", "--max-det", "50", "--nosave")
    rows = read(output)
    assert {row["image_id"] for row in rows} == {42, 139}
    numbers = read_txt(output / "labels" / "42.txt")[:, 0].astype(int)
    assert len(set(numbers)) > 3
    assert [row["category_id"] for row in rows if row["image_id"] == 42] == [COCO_IDS[number] for number in numbers]
    reference = coco.COCO()
    images, categories = ([{"id": number} for number in ids] for ids in ((139, 42), COCO_IDS))
    reference.dataset = {"info": {}, "images": images, "categories": categories, "annotations": []}
    reference.createIndex()
    assert len(reference.loadRes(str(output / "predictions.json")).anns) == len(rows)


@pytest.mark.parametrize("voting", [[], ["--no-box-voting"]])
def test_boxes_equal_the_models_predictions(weights, model, pictures, tmp_path, voting, monkeypatch):
    """The image is seen with half a stride of padding; the result is that of the model after NMS."""
    monkeypatch.setattr("models.postprocess.detections.MIN_VOTING_SCORE", 0.0)  # the model is untrained
    folder = run(weights, pictures / "a.png", tmp_path, "--save-json", "--nosave", "--iou-thres", "0.5", *voting)
    records = read(folder)
    assert names_in(folder) == ["predictions.json"]
    image = cv2.cvtColor(cv2.imread(str(pictures / "a.png")), cv2.COLOR_BGR2RGB)
    canvas = np.pad(image, ((16, 16), (16, 16), (0, 0)), constant_values=GRAY)  # half a stride of padding
    with torch.no_grad():
        bare = model.fuse()
        boxes, scores = bare.decode(bare(torch.from_numpy(canvas).permute(2, 0, 1)[None].float() / 255))
    boxes = boxes - 16
    rules = {"conf_thres": 0.0, "iou_thres": 0.5, "max_det": 5, "multi_label": False}
    kept = select(boxes, scores, **rules, box_voting=not voting)
    assert not torch.allclose(kept[0], select(boxes, scores, **rules, box_voting=bool(voting))[0], atol=1e-2)
    corners = kept.boxes_xyxy[0].clamp(0, SIZE)
    expected = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
    np.testing.assert_allclose([r["bbox"] for r in records], expected, atol=2e-3)
    np.testing.assert_allclose([r["score"] for r in records], kept.scores[0], atol=1e-5)


def test_flags_change_what_is_drawn_and_saved(weights, pictures, tmp_path):
    def drawing(*more):
        return cv2.imread(str(run(weights, pictures / "a.png", tmp_path, *more) / "a.png")).astype(int)

    def labels(*more):
        return read_txt(run(weights, pictures / "a.png", tmp_path, "--save-txt", *more) / "labels/a.txt")

    plain = drawing()
    assert all(
        (plain != drawing(*flag)).any() for flag in (["--hide-labels"], ["--hide-conf"], ["--line-thickness", "4"])
    )
    one = labels("--classes", "1")
    assert set(one[:, 0]) == {1.0}
    assert np.array_equal(one, labels("--classes", NAMES[1]))
    none = run(weights, pictures / "a.png", tmp_path, "--conf-thres", "1", "--save-txt", "--save-json")
    assert (none / "labels" / "a.txt").read_text() == ""
    assert read(none) == []
    assert len(labels("--max-det", "2")) == 2
    agnostic, by_class = (labels("--max-det", "50", "--iou-thres", "0", *more) for more in (["--agnostic-nms"], []))
    assert 0 < len(agnostic) < len(by_class)


def lines_of(out, folder):
    """Returns what was printed, without times and the name of the run."""
    return re.sub(r"[\d.]+ ms", "MS", out.replace(str(folder), "RUN")).splitlines()


@pytest.fixture
def odd_folder(tmp_path, clip):
    """Images of three sizes, a video among them, and two files that cannot be read or drawn."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(11):
        hw = ((64, 64), (37, 90), (90, 50))[number % 3]
        cv2.imwrite(str(folder / f"{number:02d}.jpg"), noise(*hw, seed=number))
    (folder / "03.jpg").write_bytes(b"no image")
    (folder / "06.jpg").write_bytes((folder / "06.jpg").read_bytes()[:-90] + b"\xff\xd9")
    cv2.imwrite(str(folder / "07b.pgm"), np.zeros((1, 70000), np.uint8))
    shutil.copy(clip, folder / "04.mp4")
    return folder


@pytest.mark.parametrize("batch", [1, 4])
def test_threads_and_batches_change_neither_results_nor_lines(
    weights, odd_folder, tmp_path, capsys, monkeypatch, batch
):
    """With threads alone, not a single byte changes; a batch rounds differently. Warnings may come earlier."""
    found = []
    for _ in range(2):
        with refused("2 of 13 files could not be used (first: .../in/03.jpg: ..."):
            run(weights, odd_folder, tmp_path, "--save-txt", "--save-conf", "--save-json", "--save-crop")
        folder = newest_of(tmp_path)
        found.append((folder, lines_of(capsys.readouterr().out, folder)))
        monkeypatch.setattr(Predictor, "threads", 3)
        monkeypatch.setattr(detection, "ReadAhead", lambda _: ReadAhead(4))
        monkeypatch.setattr(Predictor, "images_at_once", batch)
    (one, lines), (many, lines_of_many) = found
    assert sorted(lines_of_many) == sorted(lines)
    warnings = [line.partition(":")[2] for line in lines if line.startswith("warning")]
    assert [re.search(r"(\d\d)[.b]", line)[1] for line in warnings] == ["03", "07"], warnings
    assert names_in(many) == names_in(one)
    if batch == 1:
        assert all((many / name).read_bytes() == (one / name).read_bytes() for name in names_in(one))
    for name in names_in(one / "labels"):
        np.testing.assert_allclose(read_txt(many / "labels" / name), read_txt(one / "labels" / name), atol=1e-4)


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_source_is_never_overwritten(weights, pictures, tmp_path, is_linked):
    folder = tmp_path / "runs" / "exp"
    shutil.copytree(pictures, folder, copy_function=os.symlink if is_linked else shutil.copy2)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    message = "is in the folder of the results and could be overwritten; choose another --project or --name"
    with refused(f"runs/exp/a.jpg: {message}"):
        run(weights, folder, tmp_path, "--exist-ok")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert all(path.is_symlink() == is_linked for path in folder.iterdir())


def test_images_of_kinds_that_are_not_read_are_counted(weights, pictures, tmp_path, capsys):
    """Photos of phones: with the words of tools.check, and an exit status that is not 0."""
    folder = tmp_path / "phone"
    folder.mkdir()
    shutil.copy(pictures / "a.png", folder)
    for name in ("IMG_2.HEIC", "IMG_1.HEIC", "IMG_3.jxl"):
        (folder / name).write_bytes(b"not read")
    message = error_of(capsys, detect.main, "--weights", weights, "--source", folder, "--project", tmp_path / "runs")
    assert "3 of 4 files could not be used" in message
    assert "IMG_1.HEIC: 2 .heic files; convert to JPEG or PNG" in message
    (folder / "a.png").unlink()
    message = error_of(capsys, detect.main, "--weights", weights, "--source", folder, "--project", tmp_path / "runs")
    assert "2 .heic files; convert to JPEG or PNG" in message


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
        weights="a.pt", source=source, project=str(tmp_path), track="sort", save_txt=True, nosave=True
    )
    files = ResultFiles(config)
    for frame in open_source(source):
        boxes = Boxes(np.array([[1, 2, 5, 8, 3, 0.5, 0]]), (32, 32))
        files.write(Drawn(Results(frame, {0: "disc"}, boxes, {}), frame.image, b""))
    files.close()
    assert names_in(files.path) == ["tracks/MOT17-02.txt", "tracks/MOT17-04.txt"]
    assert (files.path / "tracks/MOT17-02.txt").read_text().startswith("1,3,1.000,2.000,4.000,6.000,0.5")


def test_the_result_of_a_url_has_a_safe_name(weights, pictures, tmp_path, monkeypatch):
    shutil.copy(pictures / "a.png", tmp_path / "a b:c.png")
    with serve_folder(tmp_path, monkeypatch) as address:
        folder = run(weights, f"{address}/a%20b%3Ac.png?v=1", tmp_path, "--save-txt")
    assert names_in(folder) == ["a b_c.png", "labels/a b_c.txt"]


@pytest.mark.parametrize("has_ffmpeg", [True, False])
def test_a_written_video_keeps_frames_and_rate_and_plays_in_browsers(
    weights, clip, tmp_path, capsys, monkeypatch, has_ffmpeg
):
    """Browsers play H.264 in MP4, and not MPEG-4 Part 2, which all builds of OpenCV write: the last line says so."""
    if has_ffmpeg and not shutil.which("ffmpeg"):
        pytest.skip("needs ffmpeg")
    if not has_ffmpeg:
        monkeypatch.setenv("PATH", "")
    folder = run(weights, clip, tmp_path, "--save-txt", "--vid-stride", "2", "--save-json")
    lines = capsys.readouterr().out.splitlines()
    video = cv2.VideoCapture(str(folder / "clip.mp4"))
    codec = int(video.get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little")
    assert (codec in (b"avc1", b"h264")) is ("browsers do not play" not in lines[-1])
    assert codec in (b"avc1", b"h264") or not has_ffmpeg
    assert video.get(cv2.CAP_PROP_FPS) == pytest.approx(6)
    assert len(frames_of(folder / "clip.mp4")) == 4
    records = read(folder)
    for frame in (0, 2, 4, 6):
        rows = read_txt(folder / "labels" / f"clip_{frame:06d}.txt")
        assert len(rows) == sum(r["frame"] == frame for r in records) > 0
    assert len(list((folder / "labels").iterdir())) == 4
    limited = run(weights, clip, tmp_path, "--max-frames", "1", "--nosave", "--save-txt")
    assert names_in(limited) == ["labels/clip_000000.txt"]


# Times: results have those of their source, also if its frame rate varies (darknet#896, opencv#24000, #21006)


def duration_s(path: Path) -> float:
    capture = cv2.VideoCapture(str(path))
    return capture.get(cv2.CAP_PROP_FRAME_COUNT) / capture.get(cv2.CAP_PROP_FPS)


def write_gif(path, durations_ms):
    """Writes frames of rising brightness: 20 times their number."""
    frames = [Image.new("RGB", (64, 48), (20 * number,) * 3) for number in range(len(durations_ms))]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations_ms)
    return path


def test_each_frame_of_a_gif_is_shown_at_its_time(weights, tmp_path, capsys):
    durations_ms = [50, 500] * 5
    starts_s = np.cumsum([0, *durations_ms[:-1]]) / 1000
    source = write_gif(tmp_path / "varying.gif", durations_ms)
    folder = run(weights, source, tmp_path, "--save-json", "--hide-labels", "--conf", "1", "--vid-stride", 2)
    shown = [round(frame.mean() / 20) for frame in frames_of(folder / "varying.mp4")]
    fps = cv2.VideoCapture(str(folder / "varying.mp4")).get(cv2.CAP_PROP_FPS)
    taken = range(0, 10, 2)
    assert [next(i for i, number in enumerate(shown) if number == n) / fps for n in taken] == pytest.approx(
        starts_s[::2], abs=0.5 / fps
    )
    assert len(shown) / fps == pytest.approx(2.75, abs=0.1)
    assert "damaged" not in capsys.readouterr().out

    folder = run(weights, source, tmp_path, "--save-json", "--nosave", "--vid-stride", 2)
    times = {record["frame"]: record["time"] for record in read(folder)}
    assert times == pytest.approx(dict(zip(taken, starts_s[::2])))


def test_only_a_video_that_ends_early_is_damaged(weights, tmp_path, capsys):
    """OpenCV does not tell how long the last frame is shown, here 2 of 2.45 s."""
    run(weights, write_gif(tmp_path / "pause.gif", [50] * 9 + [2000]), tmp_path)
    assert "damaged" not in capsys.readouterr().out
    path = tmp_path / "cut.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    for pixels in np.random.default_rng(0).integers(0, 255, (20, 48, 64, 3), np.uint8):
        writer.write(pixels)
    writer.release()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run(weights, path, tmp_path)
    assert "damaged" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")
@pytest.mark.parametrize(("suffix", "stride"), [(".mp4", 1), (".mkv", 4)])
def test_results_last_as_long_as_a_source_of_variable_frame_rate(weights, tmp_path, capsys, suffix, stride):
    source = tmp_path / f"clip{suffix}"
    varying = ["-vf", "select='lt(n,40)+not(mod(n,3))'", "-fps_mode", "vfr"]
    command = ["ffmpeg", "-loglevel", "error", "-f", "lavfi", "-i", "testsrc=r=30:d=5:s=64x48", *varying, str(source)]
    subprocess.run(command, check=True)
    folder = run(weights, source, tmp_path, "--save-json", "--vid-stride", stride)
    assert duration_s(folder / "clip.mp4") == pytest.approx(4.93, abs=0.07)
    newest = max(read(folder), key=lambda record: record["frame"])
    assert (newest["frame"], newest["time"]) == pytest.approx((75, 4.9) if stride == 1 else (72, 4.6), abs=0.01)
    assert "damaged" not in capsys.readouterr().out


# Interruptions


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_leaves_whole_files(weights, tmp_path, stop, code):
    source = tmp_path / "much"
    source.mkdir()
    for number in range(9):
        cv2.imwrite(str(source / f"{number}.jpg"), noise(120, 160))
    write_clip(source / "clip.mp4", 3000)
    folder = tmp_path / "runs" / "exp"
    given = ["--source", source, "--project", tmp_path / "runs", "--device", "cpu", "--conf-thres", 0, "--max-det", 2]
    command = [python(), "detect.py", "--weights", weights, *given, "--save-txt", "--save-json"]
    with Processes(tmp_path / "log") as processes:
        process = processes.start([str(word) for word in command])
        processes.until(lambda: len(list(folder.glob("labels/*.txt"))) > 20)
        process.send_signal(stop)
        assert process.wait(60) == code, processes.output()
        assert "Traceback" not in processes.output()
    stems = {path.stem for path in folder.glob("labels/*.txt")}
    assert {record["image_id"] for record in read(folder)} == stems
    assert not list(folder.rglob("*.tmp"))
    assert all(len(read_txt(path)) == 2 for path in folder.glob("labels/*.txt"))
    assert all(cv2.imread(str(folder / f"{number}.jpg")).shape == (120, 160, 3) for number in range(9))
    assert len(frames_of(folder / "clip.mp4")) == len(stems) - 9


@contextlib.contextmanager
def serve_mjpeg(connections: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the URL of a camera's stream, whose n-th connection ends after ``connections[n]`` frames, 50 a second.
    Later connections are refused with 503."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sources, "RETRY_PAUSES_S", (0.1, 0.5, 0.5))
    remaining = iter(connections)
    jpeg = cv2.imencode(".jpg", noise(48, 64))[1].tobytes()

    class Camera(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            frames = next(remaining, None)
            if frames is None:
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for _ in range(frames):
                    self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(jpeg))
                    self.wfile.write(jpeg + b"\r\n")
                    time.sleep(0.02)

    with serve(Camera) as server:
        yield f"http://me:secret@127.0.0.1:{server.server_port}/live.mjpg"


def test_a_lost_camera_is_read_again_when_it_is_back(weights, tmp_path, monkeypatch, capsys):
    """ultralytics#15057."""
    with serve_mjpeg((5, 5, 10**6), monkeypatch) as url:
        folder = run(weights, url, tmp_path, "--max-frames", "11")  # the first two connections have at most ten
    lines = capsys.readouterr().out.splitlines()
    (video_file,) = folder.glob("*.mp4")
    assert len(frames_of(video_file)) >= 11  # missed frames are repeated, so that it plays in real time
    assert any(line.startswith("11 frames: ") for line in lines)
    assert sum(line.startswith("warning: http") for line in lines) == sum("is back" in line for line in lines) == 2
    assert not any("secret" in line for line in lines)


def test_a_lost_camera_that_does_not_come_back_is_an_error(weights, tmp_path, monkeypatch):
    with serve_mjpeg((5,), monkeypatch) as url, pytest.raises(SystemExit) as error:
        call(detect.main, "--weights", weights, "--source", url, "--device", "cpu", "--project", tmp_path)
    assert error.value.code not in (None, 0)
    (video_file,) = (tmp_path / "exp").glob("*.mp4")
    assert frames_of(video_file)  # what came before is complete
