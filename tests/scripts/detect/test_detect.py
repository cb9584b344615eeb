"""detect.py from end to end with a tiny untrained model, and the files that it writes."""

import os
import re
import shutil
import sys

import cv2
import numpy as np
import pytest
import torch

import detect
from data.read_spec import load_dataset_spec
from engine.evaluation.coco_classes import COCO_IDS
from engine.inference import detect as detection
from engine.inference.predict import Predictor
from engine.inference.sources import ReadAhead
from engine.inference.writers import _ffmpeg_has_h264
from models.detector import build_detector
from tests.helpers.messages import refused
from tests.helpers.scripts import call, error_of
from tests.helpers.selection import select
from tests.helpers.tiny import TINY_MODEL, write_detector
from tests.scripts.detect.detection import NAMES, frames_of, names_in, read, read_txt, run
from utils.boxes import cxcywh_to_xyxy, scale_boxes
from utils.config.parser import parse_config
from utils.config.settings import DetectConfig
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint, write_checkpoint
from utils.pixels import GRAY
from utils.program_folders import CONFIGS

SIZE = 64


def test_images_labels_crops_and_tables_are_written_and_agree(weights, pictures, tmp_path, capsys):
    folder = run(weights, pictures, tmp_path, "--save-txt", "--save-conf", "--save-json", "--save-crop")
    files = names_in(folder)
    sources = {"a.jpg": "a.jpg", "a.png": "a.png", "schön 猫": "schön 猫.bmp"}  # by name of the results
    assert {"a.jpg.jpg", "a.png.png", "schön 猫.bmp", "predictions.json"} <= set(files)
    assert {f"labels/{name}.txt" for name in sources} <= set(files)
    records = read(folder)
    assert sum(f.startswith("crops/") for f in files) == len(records) > 0
    assert all(f.startswith(("crops/disc/", "crops/box_größe/")) for f in files if f.startswith("crops/"))
    for name, source in sources.items():
        height, width = cv2.imdecode(np.fromfile(pictures / source, np.uint8), 1).shape[:2]
        rows = read_txt(folder / "labels" / f"{name}.txt")
        own = [r for r in records if r["image_id"] == name]
        assert {r["file"] for r in own} == {str(pictures / source)}
        assert rows.shape == (len(own), 6)
        assert len(own) <= 5
        boxes = scale_boxes(cxcywh_to_xyxy(rows[:, 1:5]), width, height)
        x, y, w, h = np.array([r["bbox"] for r in own]).T
        np.testing.assert_allclose(boxes, np.stack([x, y, x + w, y + h], 1), atol=2e-3)
        np.testing.assert_allclose(rows[:, 5], [r["score"] for r in own], atol=1e-6)
        assert rows[:, 0].astype(int).tolist() == [r["category_id"] for r in own]
        assert (boxes >= -1e-3).all()
        assert (boxes <= np.array([width, height, width, height]) + 1e-3).all()
    out = capsys.readouterr().out
    assert "3 images:" in out
    assert "\x1b" not in out
    assert "does nothing" not in out
    call(detect.main, "--weights", weights, "--device", "cpu", "--source", pictures, "--nosave", "--nms")
    assert capsys.readouterr().out.count("warning: --nms does nothing: the model has one branch") == 1


def test_numeric_stems_give_ids_that_pycocotools_loads(weights, pictures, tmp_path):
    coco = pytest.importorskip("pycocotools.coco")
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("000000000139.png", "42.png"):
        shutil.copy(pictures / "a.png", folder / name)
    output = run(weights, folder, tmp_path, "--save-json", "--nosave")
    assert [r["image_id"] for r in read(output)] == [42] * 5 + [139] * 5
    reference = coco.COCO()
    images, categories = ([{"id": number} for number in ids] for ids in ((139, 42), (0, 1)))
    reference.dataset = {"info": {}, "images": images, "categories": categories, "annotations": []}
    reference.createIndex()
    assert len(reference.loadRes(str(output / "predictions.json")).anns) == 10
    shutil.copy(pictures / "a.png", folder / "more.png")
    records = read(run(weights, folder, tmp_path, "--save-json", "--nosave"))
    assert {r["image_id"] for r in records} == {"000000000139", "42", "more"}


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
    variants = [drawing("--hide-labels"), drawing("--hide-conf"), drawing("--line-thickness", "4")]
    assert all((plain != v).any() for v in variants)
    assert (variants[0] != variants[1]).any()
    one = labels("--classes", "1")
    by_name = labels("--classes", NAMES[1])
    assert set(one[:, 0]) <= {1.0}
    assert np.array_equal(one, by_name)
    none = run(weights, pictures / "a.png", tmp_path, "--conf-thres", "1", "--save-txt", "--save-json")
    assert (none / "labels" / "a.txt").read_text() == ""
    assert read(none) == []
    same = run(weights, pictures / "a.png", tmp_path, "--name", "fixed", "--exist-ok")
    assert run(weights, pictures / "a.png", tmp_path, "--name", "fixed", "--exist-ok") == same
    assert len(labels("--max-det", "2")) == 2
    agnostic, by_class = (labels("--max-det", "50", "--iou-thres", "0", *more) for more in (["--agnostic-nms"], []))
    assert 0 < len(agnostic) < len(by_class)
    small = run(weights, pictures / "a.jpg", tmp_path, "--amp", "bf16", "--imgsz", "96")
    assert cv2.imread(str(small / "a.jpg")).shape == (37, 90, 3)


def test_the_default_threshold_is_the_checkpoints(weights, pictures, tmp_path, capsys):
    content = read_checkpoint(weights)
    path = tmp_path / "weights.pt"
    common = ["--weights", path, "--source", pictures / "a.png", "--device", "cpu", "--project", tmp_path / "runs"]

    def scores(progress, *more):
        write_checkpoint(content | {"progress": progress}, path)
        given = map(str, [*common, "--save-json", *more])
        return sorted(r["score"] for r in read(detection.detect(parse_config(DetectConfig, list(given)))))

    everything = scores({}, "--conf-thres", "0")
    gap = int(np.argmax(np.diff(everything)))  # a wide one, as scores in the file are rounded
    stored = (everything[gap] + everything[gap + 1]) / 2
    capsys.readouterr()
    assert scores({"confidence": stored}) == [s for s in everything if s > stored]
    assert f"confidence threshold {stored:.4g}: chosen by F1" in capsys.readouterr().out
    assert scores({"confidence": stored}, "--conf", "0") == everything
    assert "confidence threshold" not in capsys.readouterr().out
    for unknown in ({}, {"confidence": None}, {"confidence": float("nan")}, {"confidence": "high"}):
        assert scores(unknown) == [s for s in everything if s > 0.25]
        assert "confidence threshold 0.25: " in capsys.readouterr().out


@pytest.mark.parametrize("has_ffmpeg", [True, False])
def test_a_written_video_plays_in_browsers_or_the_last_line_says_its_format(
    weights, clip, tmp_path, capsys, monkeypatch, has_ffmpeg
):
    """Browsers play H.264 in MP4, and not MPEG-4 Part 2, which all builds of OpenCV write."""
    if has_ffmpeg and not shutil.which("ffmpeg"):
        pytest.skip("needs ffmpeg")
    if not has_ffmpeg:
        monkeypatch.setenv("PATH", "")
    _ffmpeg_has_h264.cache_clear()
    folder = run(weights, clip, tmp_path)
    _ffmpeg_has_h264.cache_clear()
    out, err = capsys.readouterr()
    codec = int(cv2.VideoCapture(str(folder / "clip.mp4")).get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little")
    assert (codec in (b"avc1", b"h264")) is ("browsers do not play" not in out.splitlines()[-1])
    assert codec in (b"avc1", b"h264") or not has_ffmpeg
    assert err == ""


def test_a_written_video_keeps_frames_and_frame_rate(weights, clip, tmp_path, capsys):
    folder = run(weights, clip, tmp_path, "--save-txt", "--vid-stride", "2", "--save-json")
    frames = frames_of(folder / "clip.mp4")
    assert len(frames) == 4
    assert cv2.VideoCapture(str(folder / "clip.mp4")).get(cv2.CAP_PROP_FPS) == pytest.approx(6)
    assert frames[0].shape[:2] in ((48, 63), (48, 64), (48, 62))
    assert sorted(p.name for p in (folder / "labels").iterdir()) == [f"clip_{i:06d}.txt" for i in (0, 2, 4, 6)]
    records = read(folder)
    for frame in (0, 2, 4, 6):
        rows = read_txt(folder / "labels" / f"clip_{frame:06d}.txt")
        assert len(rows) == sum(r["frame"] == frame for r in records) > 0
    lines = capsys.readouterr().out.splitlines()
    logged = [line.split(" at ")[0] for line in lines if " frame " in line]
    assert logged == [f"{clip} frame {i}" for i in (0, 2, 4, 6)]
    limited = run(weights, clip, tmp_path, "--max-frames", "1", "--nosave", "--save-txt")
    assert names_in(limited) == ["labels/clip_000000.txt"]


@pytest.mark.parametrize(
    "more",
    [
        ["--imgsz", "70"],
        ["--tile", "70"],
        ["--tile", "64", "--overlap", "0"],
        ["--classes", "0", "2"],
        ["--classes", "dics"],
        ["--device", "7"],
        ["--source", "nowhere.jpg"],
        ["--weights", "nowhere.pt"],
        ["--view-img"],
    ],
)
def test_mistakes_of_a_detection_are_one_line_and_leave_no_folder(weights, pictures, tmp_path, more, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((UserError, SystemExit)) as error:
        run(weights, pictures, tmp_path, *more)
    assert isinstance(error.value, UserError) or error.value.code == 2
    assert not (tmp_path / "runs").exists()


def lines_of(out, folder):
    """Returns what was printed, without times and the name of the run."""
    return re.sub(r"[\d.]+ ms", "MS", out.replace(str(folder), "RUN")).splitlines()


@pytest.fixture
def odd_folder(tmp_path, clip):
    """Images of three sizes, a video among them, and two files that cannot be read or drawn."""
    folder = tmp_path / "in"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(11):
        hw = ((64, 64), (37, 90), (90, 50))[number % 3]
        noise = cv2.resize(rng.integers(0, 255, (8, 8, 3)).astype(np.uint8), hw[::-1])
        cv2.imwrite(str(folder / f"{number:02d}.jpg"), noise)
    (folder / "03.jpg").write_bytes(b"no image")
    (folder / "06.jpg").write_bytes((folder / "06.jpg").read_bytes()[:-90] + b"\xff\xd9")
    cv2.imwrite(str(folder / "07b.pgm"), np.zeros((1, 70000), np.uint8))
    shutil.copy(clip, folder / "04.mp4")
    return folder


@pytest.mark.parametrize("batch", [1, 4])
def test_threads_and_batches_change_neither_results_nor_lines(
    weights, odd_folder, tmp_path, capsys, monkeypatch, batch
):
    """With threads alone, not a single byte changes; a batch rounds differently."""
    found = []
    for _ in range(2):
        with refused("2 of 13 files could not be used (first: .../in/03.jpg: ..."):
            run(weights, odd_folder, tmp_path, "--save-txt", "--save-conf", "--save-json", "--save-crop")
        folder = max((tmp_path / "runs").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        found.append((folder, lines_of(capsys.readouterr().out, folder)))
        monkeypatch.setattr(Predictor, "threads", 3)
        monkeypatch.setattr(detection, "ReadAhead", lambda _: ReadAhead(4))
        monkeypatch.setattr(Predictor, "images_at_once", batch)
    (one, lines), (many, lines_of_many) = found
    assert lines_of_many == lines
    warnings = [line.partition(":")[2] for line in lines if line.startswith("warning")]
    assert [re.search(r"(\d\d)[.b]", line)[1] for line in warnings] == ["03", "07"], warnings
    assert names_in(many) == names_in(one)
    if batch == 1:
        assert all((many / name).read_bytes() == (one / name).read_bytes() for name in names_in(one))
    for name in names_in(one / "labels"):
        np.testing.assert_allclose(read_txt(many / "labels" / name), read_txt(one / "labels" / name), atol=1e-4)


def test_a_model_of_cocos_classes_writes_cocos_category_ids(pictures, tmp_path):
    names = load_dataset_spec(CONFIGS / "data" / "coco.yaml").names
    path = write_detector(tmp_path / "best.pt", build_detector(TINY_MODEL, 80, names=names, seed=1))
    folder = run(path, pictures / "a.png", tmp_path, "--save-json", "--save-txt", "--max-det", "50")
    rows = read(folder)
    numbers = read_txt(folder / "labels" / "a.txt")[:, 0].astype(int)
    assert len(set(numbers)) > 3
    assert [row["category_id"] for row in rows] == [COCO_IDS[number] for number in numbers]
    assert [row["category"] for row in rows] == [names[number] for number in numbers]


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
