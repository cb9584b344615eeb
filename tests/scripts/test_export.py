"""export.py from end to end on a tiny model and data set, and its files in val.py."""

from __future__ import annotations

import io
import json
import shlex
import zipfile
from pathlib import Path

import pytest
import torch

import export
import train
import val
from engine.commands import export as export_command
from engine.export.graphs import ModelGraphs
from engine.inference.model import open_model
from tests.helpers.exports import calibrated_detector
from tests.helpers.messages import refused
from tests.helpers.scripts import SMALL, call, error_of
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_detector
from utils.config.export_formats import EXPORT_FORMATS
from utils.files.safe_io import sha256_of

CPU = torch.device("cpu")
NAMES = ("light", "dark")
KNOWN = {"config": {"weights": "", "epochs": 3}, "progress": {"best_fitness": 0.25, "epoch": 3}}
KNOWN["progress"] |= {"confidence": 0.4}
VAL = ["--device", "cpu", "--workers", "0", "--noplots", "--trust"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("export") / "set", train=6, val=4)


@pytest.fixture
def weights(tmp_path: Path, data: Path) -> Path:
    known = KNOWN | {"data": {"source": str(data)}, "origin": {"weights": "random", "license": "yours to choose"}}
    known |= {"val_images": ["images/train/face of a customer.png"]}
    return write_detector(tmp_path / "best.pt", calibrated_detector(TINY_MODEL, NAMES), **known)


def opened(path: Path):
    return open_model(path, device=CPU, trust=True)


@pytest.mark.parametrize(
    ("formats", "files"),
    [
        (["torchscript"], ["best.torchscript"]),
        pytest.param(["pt2"], ["best.pt2"], marks=pytest.mark.slow),
        (["onnx", "openvino"], ["best.onnx", "best_openvino_model"]),
        (["ncnn"], ["best_ncnn_model"]),
        (["litert"], ["best.tflite"]),
    ],
)
def test_files_are_checked_and_score_as_the_checkpoint(
    weights: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, formats: list[str], files: list[str]
):
    """They are given to others, and name neither the data set nor its images."""
    for name in formats:
        for package in EXPORT_FORMATS[name].packages:
            pytest.importorskip(package)
    call(export.main, "--weights", weights, "--format", *formats)
    printed = capsys.readouterr().out
    assert printed.count("4 images (64x64 squares): AP ") == len(files)
    assert {path.name for path in weights.parent.glob("best*")} == {*files, "best.pt"}
    commands = [line.partition("next: python ")[2] for line in printed.splitlines() if "next: " in line]
    assert len(commands) == len(files)
    val.main(["--weights", str(weights), *VAL, "--no-rect", "--project", str(tmp_path / "val")])
    expected = results_of(tmp_path / "val" / "exp")
    for number, (name, command) in enumerate(zip(files, commands), 2):
        model = opened(weights.with_name(name))
        assert (model.names, model.input_hw, model.nms_iou) == (NAMES, (64, 64), 0.7)
        # The checkpoint's: no detection is correct in these images.
        assert (model.threshold(box_voting=True), model.threshold(box_voting=False)) == (0.4, 0.25)
        assert model.info["license"] == "yours to choose"
        assert model.info["details"]["weights_sha256"] == sha256_of(weights)
        content = b"".join(contents_of(weights.with_name(name)))
        assert not [word for word in (str(data.parent), "customer") if word.encode() in content]
        script, *flags = shlex.split(command)  # the exact next command
        assert script == "val.py"
        assert flags[:2] == ["--weights", str(weights.with_name(name))]
        val.main([*flags, *VAL[:-1], "--no-rect", "--project", str(tmp_path / "val")])
        assert results_of(tmp_path / "val" / f"exp{number}") == expected


def contents_of(path: Path) -> list[bytes]:
    """Returns the contents of a file, or of the files of a folder, and of what is in archives."""
    contents = [file.read_bytes() for file in (path.iterdir() if path.is_dir() else [path])]
    for content in contents.copy():
        if zipfile.is_zipfile(io.BytesIO(content)):
            archive = zipfile.ZipFile(io.BytesIO(content))
            contents += [archive.read(entry) for entry in archive.namelist()]
    return contents


def test_a_file_without_its_checkpoint_needs_data(weights: Path):
    call(export.main, "--weights", weights, "--format", "torchscript", "--no-check")
    moved = weights.with_suffix(".torchscript").rename(weights.with_name("elsewhere.torchscript"))
    with refused(f"{moved}: does not name its data set; name a YAML with --data"):
        val.main(["--weights", str(moved), *VAL])


def results_of(folder: Path) -> str:
    return f"{json.loads((folder / 'results.json').read_text())['ap']:.4f}"


def test_canvases_and_precisions(weights: Path, data: Path, capsys: pytest.CaptureFixture):
    common = ("--weights", weights, "--format", "torchscript")
    file = weights.with_name("best.torchscript")
    call(export.main, *common, "--imgsz", "64", "96", "--no-check")
    assert (opened(file).input_hw, opened(file).imgsz) == ((64, 96), 96)
    call(val.main, "--weights", file, "--data", data, *VAL)
    assert "takes 64x96 pixels" in error_of(capsys, val.main, "--weights", file, *VAL, "--imgsz", "128")
    call(export.main, *common, "--dynamic")
    model = opened(file)
    assert (model.input_hw, model.batch) == (None, None)
    assert "replaces an earlier export" in capsys.readouterr().out
    # Training's: it validates rectangles, too.
    assert (model.threshold(box_voting=True), model.threshold(box_voting=False)) == (0.4, 0.25)
    content = file.read_bytes()
    call(export.main, *common, "--half", "--no-check")
    assert file.read_bytes() == content
    unchecked = opened(weights.with_name("best_half.torchscript"))
    assert (unchecked.info["details"]["half"], unchecked.info["details"]["unchecked"]) == (True, True)


@pytest.mark.parametrize("name", ["onnx", *(pytest.param(n, marks=pytest.mark.slow) for n in ("openvino", "litert"))])
@torch.no_grad()
def test_int8(weights: Path, data: Path, capsys: pytest.CaptureFixture, name: str):
    for package in (*EXPORT_FORMATS[name].packages, "onnxruntime"):
        pytest.importorskip(package)
    flags = ["--weights", weights, "--int8", "--no-check", "--format", name]
    message = error_of(capsys, export.main, *flags, "--batch", "8")
    assert "--batch 8: is more than there are images to calibrate (6)" in message
    call(export.main, *flags)
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    exact = opened(weights)
    boxes, scores = exact.decode(exact(pixels))
    model = opened(weights.with_name(f"best_int8{EXPORT_FORMATS[name].suffix}"))
    found_boxes, found_scores = model.decode(model(pixels))
    assert model.info["details"]["int8"]
    assert (found_scores - scores).abs().mean() < 0.5 * scores.std()  # a random model amplifies rounding
    assert (found_boxes - boxes).abs().mean() < 0.5 * boxes.std()
    assert not torch.equal(found_scores, scores)


def test_a_file_out_of_tolerance_is_renamed(weights: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """The other format is written nevertheless, and existing files stay."""
    weights.with_name("best.torchscript").write_text("an older export")
    weights.with_name("best.pt2.failed").write_text("an older failure")
    good = ModelGraphs.trace

    def broken(graphs: ModelGraphs, *, half: bool):
        graphs.detector.head.cv3[0][-1].bias += 1.0
        program = good(graphs, half=half)
        graphs.detector.head.cv3[0][-1].bias -= 1.0
        return program

    monkeypatch.setattr(ModelGraphs, "trace", torch.no_grad()(broken))
    message = error_of(capsys, export.main, "--weights", weights, "--format", "torchscript", "pt2", code=1)
    assert "best.torchscript.failed: differs too much from the checkpoint on 4 images" in message
    for part in ("scores differ by", "best.torchscript is still the file", "--no-check"):
        assert part in message
    names = {"best.pt", "best.pt2", "best.torchscript", "best.torchscript.failed"}
    assert {path.name for path in weights.parent.glob("*best*")} == names
    assert weights.with_name("best.torchscript").read_text() == "an older export"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "onnx", "engine"], "trtexec --onnx=best.onnx --saveEngine=best.engine"),
        (["--int8"], "--int8: not for torchscript; use --format onnx or openvino or litert"),
        (["--imgsz", "70"], "not a multiple"),
        (["--nms"], "has one branch"),
    ],
)
def test_mistakes_are_refused_in_one_line(weights: Path, capsys, flags: list[str], message: str, monkeypatch):
    monkeypatch.setattr(export_command, "require_packages", lambda *_, **__: None)
    assert message in error_of(capsys, export.main, "--weights", weights, "--format", "torchscript", *flags)
    assert not list(weights.parent.glob("best?*.*t*"))


def test_a_check_needs_objects_of_the_models_classes_in_its_order(tmp_path: Path, capsys):
    """Otherwise the scores, and the threshold in the file, would be those of other classes, or of nothing."""
    data = write_dataset(tmp_path / "set", train=2, val=4)
    weights = write_detector(tmp_path / "best.pt", calibrated_detector(TINY_MODEL, NAMES), used_classes=list(NAMES))
    given = ["--weights", weights, "--format", "torchscript", "--data", data]
    names = "names: [light, dark]"
    text = data.read_text().replace("names:\n- light\n- dark", names)
    data.write_text(text.replace(names, "names: [dark, gray, light]"))
    assert "in another order" in error_of(capsys, export.main, *given)
    data.write_text(text)
    for labels in (tmp_path / "set/labels/val").iterdir():
        labels.write_text("")
    assert "there is no object in 4 validation images" in error_of(capsys, export.main, *given)


@pytest.mark.parametrize(
    ("flags", "file", "nms_iou"),
    [
        ([], "a.torchscript", None),
        (["--nms", "--iou-thres", "0.5"], "a_nms.torchscript", 0.5),
        (["--layout", "end2end"], "a_end2end.torchscript", None),
        (["--layout", "end2end", "--nms"], "a_nms_end2end.torchscript", 0.45),
    ],
)
def test_layouts_and_branches(tmp_path: Path, flags: list[str], file: str, nms_iou: float | None):
    """What reads one branch or layout cannot read the other. Training has validated the branch without NMS."""
    detector = calibrated_detector({**TINY_MODEL, "end2end": True}, NAMES)
    weights = write_detector(tmp_path / "a.pt", detector, progress=KNOWN["progress"])
    call(export.main, "--weights", weights, "--format", "torchscript", "--no-check", *flags)
    model = opened(tmp_path / file)
    assert (model.info["nms_iou"], model.info["end2end"]) == (nms_iou, "--layout" in flags)
    assert model.nms_iou == (None if "--layout" in flags else nms_iou)  # to follow on the output
    assert model.info["confidence"] == (None if "--nms" in flags else 0.4)


def training(data: Path, tmp_path: Path, *more: str) -> list[str]:
    """Returns the flags of a training that does not change the weights of a model that detects something."""
    weights = write_detector(tmp_path / "lively.pt", calibrated_detector(TINY_MODEL, NAMES))
    flags = ["--data", data, "--weights", weights, "--set", "lr0=0", "--project", tmp_path / "runs", *SMALL]
    return [str(flag) for flag in (*flags, "--epochs", "1", "--cache-dir", tmp_path / "cache", *more)]


def test_a_training_exports_its_best_checkpoint_and_replaces_only_files_that_its_flag_has_written(
    data: Path, tmp_path: Path, capsys
):
    """It is tried before the training; an ended run writes it again if it is not that of its best checkpoint."""
    flags = training(data, tmp_path, "--name", "one", "--resume", "auto", "--export", "torchscript")
    train.main(flags)
    printed = capsys.readouterr().out
    tried = printed.index("--export: tested: torchscript")
    assert tried < printed.index("epoch 1/1") < printed.index("best.torchscript: ")
    best = tmp_path / "runs" / "one" / "best.pt"
    file = best.with_suffix(".torchscript")
    earlier = file.read_bytes()
    write_detector(best, calibrated_detector(TINY_MODEL, NAMES), data={"source": str(data)})  # of a later epoch
    train.main(flags)
    assert opened(file).info["details"]["weights_sha256"] == sha256_of(best)
    by_person = ("--weights", best, "--format", "torchscript", "--no-check")
    call(export.main, *by_person, "--dynamic")
    dynamic = file.read_bytes()
    for kept in (dynamic, earlier[: len(earlier) // 2]):
        file.write_bytes(kept)
        capsys.readouterr()
        train.main(flags)
        assert file.read_bytes() == kept
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "is kept" in line]
        assert f"export.py --weights {best} --format torchscript" in line
    call(export.main, *by_person)
    assert opened(file).imgsz == 64


def test_an_export_that_cannot_succeed_ends_the_training_before_it_begins(
    data: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    build = ModelGraphs.trace

    def build_other(graphs: ModelGraphs, *, half: bool):
        graphs.detector.head.cv3[0][-1].bias += 0.1
        return build(graphs, half=half)

    monkeypatch.setattr(ModelGraphs, "trace", torch.no_grad()(build_other))
    line = error_of(capsys, train.main, *training(data, tmp_path, "--export", "torchscript"), code=1)
    assert "--export torchscript: the file does not compute what the model does" in line
    assert not (tmp_path / "runs").exists()
