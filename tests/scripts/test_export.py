"""export.py from end to end on a tiny model and data set, and its files in val.py."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cv2
import pytest
import torch

import detect
import export
import train
import val
from engine.export import exporter
from engine.formats import torch_formats
from engine.inference.open_model import open_model
from engine.inference.predictor import load
from tests.helpers.exports import calibrated_detector
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL, call, error_of
from tests.helpers.session import session_file
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_detector
from utils.config.export_formats import EXPORT_FORMATS
from utils.files.torch_file import read_checkpoint

CPU = torch.device("cpu")
NAMES = ("light", "dark")
KNOWN = {"config": {"weights": "", "epochs": 3}, "progress": {"best_fitness": 0.25, "epoch": 3}}
# With box voting, as after NMS of other programs, and as after the NMS of validation, which is that of end2end.
KNOWN["progress"] |= {"confidence": 0.4, "plain_confidence": 0.3, "scored_confidence": 0.5}
VAL = ["--device", "cpu", "--workers", "0", "--noplots", "--trust"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("export") / "set", train=6, val=4)


@pytest.fixture
def weights(tmp_path: Path, data: Path) -> Path:
    known = KNOWN | {"data": {"source": str(data)}}
    return write_detector(tmp_path / "best.pt", calibrated_detector(TINY_MODEL, NAMES), **known)


FILES = {"onnx": "best.onnx", "openvino": "best_openvino_model", "torchscript": "best.torchscript", "pt2": "best.pt2"}
RECORD = "exported.pickle"  # what `export_and_move` has printed and checked


@dataclass(frozen=True)
class Exported:
    """A folder with a data set, a checkpoint in run/ that names it, all its exports, and the record of these in cache/.
    It has been moved since, so the absolute paths in it lead nowhere."""

    folder: Path
    printed: str
    checked: list[dict[str, bytes | int]]  # the contents of each file when it was opened for its check


def contents(path: Path) -> dict[str, bytes | int]:
    """Returns the bytes and the inode of each file of an export."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found: dict[str, bytes | int] = {}
    for file in files:
        found[file.name] = file.read_bytes()
        found[f"inode of {file.name}"] = file.stat().st_ino
    return found


@pytest.fixture(scope="module")
def made_once() -> Exported:
    for package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    folder = session_file("exported-and-moved", export_and_move)
    printed, checked = pickle.loads((folder / RECORD).read_bytes())
    return Exported(folder, printed, checked)


def export_and_move(destination: Path) -> None:
    folder = destination.with_name("exported")
    shutil.rmtree(folder, ignore_errors=True)  # left by an export that failed
    stored = {"source": str(write_dataset(folder / "set", train=6, val=4)), "root": str(folder / "set")}
    known = KNOWN | {"data": stored}
    known["origin"] = {"weights": "random weights", "license": "yours to choose"}
    (folder / "run").mkdir()
    weights = write_detector(folder / "run" / "best.pt", calibrated_detector(TINY_MODEL, NAMES), **known)
    out = io.StringIO()
    err = io.StringIO()
    checked = []

    def open_and_read(path: Path, **options):
        checked.append(contents(path))
        return open_model(path, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(exporter, "open_model", open_and_read)
        export.main(["--weights", str(weights), "--format", *FILES])
    assert err.getvalue() == ""
    (folder / RECORD).write_bytes(pickle.dumps((out.getvalue(), checked)))
    folder.rename(destination)


@pytest.fixture
def exported(made_once: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkpoint, with its exports beside it, on the machine where they were made."""
    shutil.copytree(made_once.folder, tmp_path / "both")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "both" / "cache"))
    return tmp_path / "both" / "run" / "best.pt"


def test_all_formats_are_checked_and_scored(
    exported: Path, made_once: Exported, capsys: pytest.CaptureFixture, data: Path, tmp_path: Path
):
    weights = exported
    files = [*FILES.values()]
    for name in files:
        line = next(line for line in made_once.printed.splitlines() if f"/{name}: " in line)
        assert "; 4 images: AP " in line
        assert "match, 0 do not;" in line
        model = open_model(weights.with_name(name), device=CPU, trust=True)
        assert (model.names, model.input_hw, model.nms_iou) == (NAMES, (64, 64), 0.7)
        assert (model.threshold(box_voting=True), model.threshold(box_voting=False)) == (0.4, 0.3)
        details = model.info["details"]
        assert (details["checked"], details["ap"]) == ("yes", 0.25)
        assert model.info["license"] == "yours to choose"
    assert {path.name for path in weights.parent.iterdir()} == {*files, "best.pt"}

    torch.jit.load(str(weights.with_name("best.torchscript")), _extra_files=(texts := {"config.txt": ""}))
    content = json.loads(texts["config.txt"])
    assert content["names"] == {"0": "light", "1": "dark"}
    assert (content["stride"], content["imgsz"], content["batch"], content["task"]) == (32, [64, 64], 1, "detect")

    for name in ("best.pt", *files):
        moved = ["--data", str(weights.parents[1] / "set" / "data.yaml")]
        val.main(["--weights", str(weights.with_name(name)), *moved, *VAL, "--no-rect", "--project", str(tmp_path)])
    results = [json.loads(path.read_text()) for path in tmp_path.glob("exp*/results.json")]
    assert len(results) == 5
    assert len({f"{result['ap']:.4f}" for result in results}) == 1
    args = ["--weights", weights.with_name("best.onnx"), "--data", data, *VAL]
    fixed = "best.onnx takes 64x64 pixels (height x width) only; leave --imgsz out"
    assert fixed in error_of(capsys, val.main, *args, "--imgsz", "96")
    assert "--tta" in error_of(capsys, val.main, *args, "--tta")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_refused_in_one_line(tmp_path: Path, data: Path, capsys, value: float):
    detector = calibrated_detector(TINY_MODEL, NAMES)
    with torch.no_grad():
        detector.model[0].bn.bias[1] = detector.model[2].bn.running_var[0] = value
    weights = write_detector(tmp_path / "a.pt", detector)
    common = ["--weights", weights, "--data", data]
    for main, flags in (
        (export.main, common),
        (export.main, [*common, "--no-check"]),
        (val.main, [*common, *VAL]),
        (detect.main, ["--weights", weights, "--source", data.parent / "images" / "val", "--device", "cpu"]),
        (train.main, [*common, *SMALL, "--epochs", "1", "--project", tmp_path]),
    ):
        line = error_of(capsys, main, *flags)
        assert f"{weights}: its weights contain non-finite values in 2 tensors (first: model.0.bn.bias)" in line


def test_rectangular_and_dynamic_canvases(weights: Path, data: Path, capsys: pytest.CaptureFixture):
    file = weights.with_name("best.torchscript")
    call(export.main, "--weights", weights, "--format", "torchscript", "--imgsz", "64", "96")
    model = open_model(file, device=CPU, trust=True)
    assert (model.input_hw, model.imgsz) == ((64, 96), 96)
    call(val.main, "--weights", file, "--data", data, *VAL)
    call(export.main, "--weights", weights, "--format", "torchscript", "--dynamic")
    model = open_model(file, device=CPU, trust=True)
    assert (model.input_hw, model.batch) == (None, None)
    assert "match, 0 do not;" in capsys.readouterr().out


def test_int8(weights: Path, data: Path, capsys: pytest.CaptureFixture):
    for package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    message = error_of(capsys, export.main, "--weights", weights, "--int8", "--batch", "8", "--no-check")
    assert "--batch 8: is more than there are images to calibrate --int8 with (6)" in message
    export.main(["--weights", str(weights), "--int8", "--no-check", "--format", "onnx", "openvino"])
    out = capsys.readouterr().out
    assert "not checked (--no-check)" in out
    assert f"{weights.with_name('best_int8.onnx')}: opset 18 and IR version 8 need ONNX Runtime 1.14 or newer" in out
    exact = open_model(weights, device=CPU, trust=True)
    picture = cv2.imread(str(next((data.parent / "images" / "val").glob("*.png"))))
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255
    boxes, scores = exact.decode(exact(pixels))
    for name in ("best_int8.onnx", "best_int8_openvino_model"):
        model = open_model(weights.with_name(name), device=CPU, trust=True)
        assert (model.info["details"]["checked"], model.info["details"]["int8"]) == ("no", True)
        found_boxes, found_scores = model.decode(model(pixels))
        assert (found_scores - scores).abs().mean() < 0.35 * scores.std()  # a random model amplifies rounding
        assert (found_boxes - boxes).abs().mean() < 0.35 * boxes.std()
        assert not torch.equal(found_scores, scores)


def test_a_half_file_lies_beside_the_float32_one(weights: Path, capsys: pytest.CaptureFixture):
    """A file that is replaced is mentioned."""
    common = ("--weights", weights, "--format", "torchscript", "--no-check")
    call(export.main, *common)
    content = weights.with_name("best.torchscript").read_bytes()
    assert "replaces" not in capsys.readouterr().out
    call(export.main, *common, "--half")
    assert weights.with_name("best.torchscript").read_bytes() == content
    half = open_model(weights.with_name("best_half.torchscript"), device=CPU, trust=True)
    assert half.info["details"]["half"]
    call(export.main, *common, "--half")
    assert "not checked (--no-check); replaces an earlier export\n" in capsys.readouterr().out


def test_a_file_out_of_tolerance_is_renamed(weights: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """The other format is written nevertheless, and existing files stay."""
    weights.with_name("best.torchscript").write_text("an older export")
    weights.with_name("best.pt2.failed").write_text("an older failure")
    good = torch_formats.trace

    def broken(module, *args):
        module.detector.head.cv3[0][-1].bias += 1.0
        return good(module, *args)

    monkeypatch.setattr(torch_formats, "trace", broken)
    message = error_of(capsys, export.main, "--weights", weights, "--format", "torchscript", "pt2", code=1)
    assert "1 of 2 formats failed (first: torchscript: " in message
    assert "best.torchscript.failed: differs too much from the checkpoint: scores differ by" in message
    assert "worst image: " in message
    assert weights.with_name("best.torchscript").read_text() == "an older export"
    assert "best.torchscript is still the file of an earlier export" in message
    assert not weights.with_name("best.pt2.failed").exists()
    failed = weights.with_name("best.torchscript.failed").rename(weights.with_name("failed.torchscript"))
    assert open_model(failed, device=CPU, trust=True).info["details"]["checked"] == "failed"
    assert open_model(weights.with_name("best.pt2"), device=CPU, trust=True).info["details"]["checked"] == "yes"
    assert not list(weights.parent.glob(".*.tmp"))


def test_the_file_that_is_kept_is_the_checked_one(made_once: Exported):
    """The file is written once, because a second conversion would not be checked."""
    assert made_once.checked == [contents(made_once.folder / "run" / name) for name in FILES.values()]


def test_files_name_their_data_set(exported: Path, tmp_path: Path, data: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """They do so like checkpoints: by an absolute path and relative to their folder, so both may move together."""
    formats = ("torchscript", "pt2", "openvino")
    stored = {
        name: open_model(exported.with_name(FILES[name]), device=CPU, trust=True).info["data"] for name in formats
    }
    expected = read_checkpoint(exported)["data"]
    assert stored == dict.fromkeys(formats, expected)
    export.main(["--weights", str(exported), "--format", "torchscript", "--no-check"])
    assert open_model(exported.with_suffix(".torchscript"), device=CPU, trust=True).info["data"] == expected
    unnamed = write_detector(tmp_path / "other.pt", calibrated_detector(TINY_MODEL, NAMES))
    export.main(["--weights", str(unnamed), "--format", "torchscript", "--data", str(data)])  # the data of the check
    assert open_model(tmp_path / "other.torchscript", device=CPU, trust=True).info["data"]["source"] == str(data)
    (tmp_path / "deeper" / "folder").mkdir(parents=True)
    moved = shutil.copy(tmp_path / "other.torchscript", tmp_path / "deeper" / "folder")
    val.main(["--weights", str(moved), *VAL])  # found by the absolute path
    export.main(["--weights", str(unnamed), "--format", "torchscript", "--no-check"])
    message = error_of(capsys, val.main, "--weights", tmp_path / "other.torchscript", *VAL)
    assert "other.torchscript: does not name its data set; name a YAML with --data" in message

    monkeypatch.chdir("/")
    for name in ("best.pt", "best.torchscript", "best.pt2", "best_openvino_model", "best_openvino_model/best.xml"):
        val.main(["--weights", str(exported.parent / name), *VAL, "--project", str(tmp_path / "val")])
        assert "AP by size" in capsys.readouterr().out


def test_a_checkpoint_of_a_single_class(tmp_path: Path, data: Path):
    detector = calibrated_detector(TINY_MODEL, ("item",))
    known = {"data": {"source": str(data)}, "config": {"single_cls": True}}
    weights = write_detector(tmp_path / "best.pt", detector, **known)
    export.main(["--weights", str(weights), "--format", "torchscript"])
    exported = tmp_path / "best.torchscript"
    assert open_model(exported, device=CPU, trust=True).info["details"]["checked"] == "yes"
    val.main(["--weights", str(exported), "--single-cls", *VAL, "--project", str(tmp_path / "val")])


def test_errors_of_the_data_are_reported_once(weights: Path, tmp_path: Path, data: Path, capsys):
    """The first format is no different from the others, and nothing is built."""
    alone = tmp_path / "alone.yaml"
    alone.write_text(f"path: {data.parent}\ntrain: images/train\nval: images/absent\nnames: [light, dark]\n")
    line = error_of(capsys, export.main, "--weights", weights, "--format", "torchscript", "pt2", "--data", alone)
    assert "images/absent" in line
    assert not list(tmp_path.glob("best?*.*t*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "onxx"], f"--format: must be one of {', '.join(EXPORT_FORMATS)}, got 'onxx'"),
        (["--format", "onnx", "engine"], "trtexec --onnx=best.onnx --saveEngine=best.engine"),
        (["--half", "--int8"], "choose one"),
        (["--int8", "--format", "pt2"], "--int8: not for pt2; use --format onnx, openvino or litert"),
        (["--format", "onnx", "ncnn", "--dynamic"], "--dynamic: not for ncnn; use --format onnx, openvino, "),
        (["--format", "ncnn", "--batch", "2"], "--batch: not for ncnn"),
        (["--format", "ncnn", "--layout", "end2end"], "--layout end2end: not for ncnn"),
        (["--no-box-voting"], "--no-box-voting: the layout raw has no NMS inside"),
        (["--dynamic", "--batch", "4"], "leave --batch out"),
        (["--imgsz", "64", "64", "64"], "one number or two"),
        (["--imgsz", "70"], "not a multiple"),
        (["--imgsz", "32", "--dynamic"], "too small for --dynamic"),
        (["--nms"], "has one branch"),
        (["--check-images", "0"], "--check-images: must be at least 1, got 0"),
        (["--opset", "5"], "--opset: must be at least 18, got 5"),
    ],
)
def test_mistakes_are_refused_in_one_line(weights: Path, capsys, flags: list[str], message: str):
    assert message in error_of(capsys, export.main, "--weights", weights, "--format", "torchscript", *flags)
    assert not list(weights.parent.glob("best?*.*t*"))


def test_weights_without_a_data_set_need_one_or_no_check(tmp_path: Path, capsys):
    weights = write_detector(tmp_path / "a.pt", calibrated_detector(TINY_MODEL, NAMES))
    given = ["--weights", weights, "--format", "torchscript"]
    message = error_of(capsys, export.main, *given)
    assert "does not name its data set" in message
    assert "--no-check" in message
    call(export.main, *given, "--no-check")
    assert open_model(tmp_path / "a.torchscript", device=CPU, trust=True).info["details"]["checked"] == "no"


def test_layouts_and_branches(tmp_path: Path, data: Path, capsys):
    weights = write_detector(
        tmp_path / "a.pt", calibrated_detector({**TINY_MODEL, "end2end": True}, NAMES), progress=KNOWN["progress"]
    )
    common = ["--weights", weights, "--format", "torchscript", "--data", data]
    end2end = ["--layout", "end2end"]
    # What reads one branch or layout cannot read the other.
    for flags, nms_iou in (([], None), (["--nms"], 0.7), (["--nms", "--iou-thres", "0.5"], 0.5)):
        call(export.main, *common, "--no-check", *flags)
        file = tmp_path / ("a_nms.torchscript" if flags else "a.torchscript")
        assert open_model(file, device=CPU, trust=True).nms_iou == nms_iou
    for flags, votes, confidence in (
        ([], False, 0.5),
        (["--nms"], True, None),  # training has validated the other branch
        (["--nms", "--no-box-voting"], False, None),
    ):
        call(export.main, *common, *end2end, *flags, *([] if votes else ["--no-check"]))
        rows = tmp_path / ("a_nms_end2end.torchscript" if flags else "a_end2end.torchscript")
        model = open_model(rows, device=CPU, trust=True)
        assert (model.nms_iou, model.info["end2end"], model.has_builtin_voting) == (None, True, votes)
        assert model.confidence == model.info["confidence"] == confidence
        if votes:
            unvoted = ["--weights", rows, "--data", data, "--no-box-voting", *VAL]
            assert "box voting is part of the file" in error_of(capsys, val.main, *unvoted)
        with (
            refused("a_nms_end2end.torchscript: box voting is part of the file; export it with --no-box-voting")
            if votes
            else contextlib.nullcontext()
        ):
            load(rows, device="cpu", trust=True, box_voting=False)
    assert "need no NMS" in error_of(capsys, export.main, *common, "--iou-thres", "0.5")
    message = error_of(capsys, export.main, *common, *end2end, "--no-box-voting")
    assert "--no-box-voting: the model's detections need no NMS" in message


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))  # a full disk for every file above this size
import export
from utils.process.main import run_main
run_main(export.main, sys.argv[1:])
"""


@pytest.mark.parametrize(
    "formats",
    [["torchscript"], *(pytest.param(f, marks=pytest.mark.slow) for f in (["pt2", "torchscript"], ["openvino"]))],
)
def test_a_full_disk_is_one_line_and_older_exports_stay(weights: Path, formats: list[str]):
    """No temporary file stays behind, and no half file has a final name."""
    if "openvino" in formats:
        for package in ("onnx", "onnxscript", "openvino"):
            pytest.importorskip(package)
    old = weights.with_name("best.torchscript")
    old.write_text("an older export")
    args = ["--weights", str(weights), "--format", *formats, "--no-check"]
    done = subprocess.run([python(), "-c", LIMITED, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "cannot be written (file too large)" in line or "is the disk full?" in line
    assert done.stdout.count("cannot be written (file too large)") == (2 if len(formats) == 2 else 0)
    assert ".tmp" not in done.stderr + done.stdout
    assert sorted(os.listdir(weights.parent)) == ["best.pt", "best.torchscript"]
    assert old.read_text() == "an older export"


def test_a_folder_that_cannot_be_written_to(weights: Path, capsys):
    with open(weights, "rb") as file:  # nobody, not even root, can create a file beside this name
        path = f"/proc/self/fd/{file.fileno()}"
        message = error_of(capsys, export.main, "--weights", path, "--no-check", "--format", "torchscript")
    assert f"{path}.torchscript: cannot be written (" in message


def training(data: Path, tmp_path: Path, *more: str) -> list[str]:
    """Returns the flags of a training that does not change the weights of a model that detects something."""
    weights = write_detector(tmp_path / "lively.pt", calibrated_detector(TINY_MODEL, NAMES))
    flags = ["--data", data, "--weights", weights, "--set", "lr0=0", "--project", tmp_path / "runs", *SMALL]
    return [str(flag) for flag in (*flags, "--epochs", "1", "--cache-dir", tmp_path / "cache", *more)]


def test_a_training_tries_an_export_before_and_exports_its_best_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    train.main(training(data, tmp_path, "--export", "torchscript"))
    printed = capsys.readouterr().out
    tried = printed.index("--export: tested: torchscript")
    trained = printed.index("epoch 1/1")
    assert tried < trained < printed.index("best.torchscript: ")
    folder = tmp_path / "runs" / "exp"
    assert open_model(folder / "best.torchscript", device=CPU, trust=True).info["details"]["checked"] == "yes"


def test_an_export_that_cannot_succeed_ends_the_training_before_it_begins(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    build = torch_formats.trace

    def build_other(module: torch.nn.Module, *rest):
        for parameter in module.parameters():
            parameter.mul_(1.1)
        return build(module, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(torch_formats, "trace", build_other)
        line = error_of(capsys, train.main, *training(data, tmp_path, "--export", "torchscript"), code=1)
        assert "--export torchscript: the file does not compute what the model does: boxes differ by" in line
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        line = error_of(capsys, train.main, *training(data, tmp_path, "--export", "onnx"))
        assert "the package onnxscript is not installed; pip install onnxscript, or choose other formats" in line
    assert not (tmp_path / "runs").exists()
