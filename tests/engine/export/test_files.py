"""Exported files, each opened by its own runtime, against the detector that they were made of."""

from __future__ import annotations

import pickle
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.export.graphs import ModelGraphs
from engine.export.torchscript import move_constants
from engine.inference.model import open_model
from engine.inference.predict import Predictor
from tests.helpers.exports import (
    FAMILIES,
    FORMATS,
    NAMES,
    calibrated_detector,
    check_threads_get_the_same_bits,
    noise_images,
    options,
    shallow_spec,
    tiny_graph,
    write_exports,
)
from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from tests.helpers.session import session_file
from tests.helpers.tiny import TINY_MODEL
from utils.errors import UserError

CPU = torch.device("cpu")
ALL_FORMATS = (*FORMATS, "a_ncnn_model", "a.tflite")
HALF_FORMATS = ["a.torchscript", *(pytest.param(f, marks=pytest.mark.slow) for f in ("a.onnx", "a.tflite"))]


def file_of(name: str) -> Path:
    """Returns the file ``name`` of a tiny detector, for two images except in ncnn; it must not be changed."""
    batch = 1 if name == "a_ncnn_model" else 2

    def write(folder: Path) -> None:
        folder.mkdir()
        graph = tiny_graph(NAMES, batch=2) if name in FORMATS[:2] else None
        write_exports(folder, calibrated_detector(TINY_MODEL, NAMES), [name], graph=graph, batch=batch)

    return session_file(f"export-{name}", write) / name


def images(count: int, height: int = 64, width: int = 96) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_each_runtime_gives_the_detectors_boxes_and_scores(name: str, monkeypatch: pytest.MonkeyPatch):
    """Also from several threads, and after pickling, which stores the path alone."""
    path = file_of(name)
    fused = calibrated_detector(TINY_MODEL, NAMES).fuse()
    monkeypatch.chdir(path.parent)
    model = open_model(name, device=CPU, trust=True)
    assert (model.names, model.stride, model.imgsz, model.confidence) == (NAMES, 32, 96, 0.3)
    assert (model.nms_iou, model.input_hw) == (fused.nms_iou, (64, 96))
    stored = pickle.dumps(Predictor(model, conf=0.4, max_det=7))
    assert len(stored) < 5000
    monkeypatch.chdir("/")
    for opened in (model, pickle.loads(stored).model):
        for count in (1, 3):
            boxes, scores = opened.decode(opened(images(count)))
            expected_boxes, expected_scores = fused.decode(fused(images(count)))
            torch.testing.assert_close(boxes, expected_boxes, rtol=1e-3, atol=1e-2)
            torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-4)
            assert expected_scores.amax() - expected_scores.amin() > 0.2  # there is something to compare
    check_threads_get_the_same_bits(model, [images(n) for n in (1, 2, 3)])
    with refused(f"{name}: takes inputs of 64x96 pixels (height x width), not 96x64"):
        model(images(1, 96, 64))


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "files"),
    [
        (FAMILIES[0], ["a.torchscript"]),
        *(pytest.param(family, ALL_FORMATS, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_every_family(tmp_path: Path, family: str | dict, files: list[str]):
    detector = calibrated_detector(shallow_spec(family) if isinstance(family, str) else family, NAMES)
    fused = detector.fuse()
    boxes, scores = fused.decode(fused(noise_images()[:1]))
    for name in files:
        write_exports(tmp_path, detector, [name])
        model = open_model(tmp_path / name, device=CPU, trust=True)
        found_boxes, found_scores = model.decode(model(noise_images()[:1]))
        torch.testing.assert_close(found_boxes, boxes, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(found_scores, scores, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["a.torchscript", pytest.param("a.onnx", marks=pytest.mark.slow)])
def test_dynamic_files_take_any_canvas_of_whole_strides(tmp_path: Path, name: str):
    detector = calibrated_detector(TINY_MODEL, NAMES)
    write_exports(tmp_path, detector, [name], dynamic=True)
    model = open_model(tmp_path / name, device=CPU, trust=True)
    fused = detector.fuse()
    assert (model.input_hw, model.batch) == (None, None)
    for size in ((1, 64, 96), (3, 128, 64), (2, 32, 32)):
        boxes, scores = model.decode(model(images(*size)))
        expected_boxes, expected_scores = fused.decode(fused(images(*size)))
        torch.testing.assert_close(boxes, expected_boxes, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", HALF_FORMATS)
def test_half_stores_float16_and_decodes_in_float32(tmp_path: Path, name: str):
    detector = calibrated_detector(TINY_MODEL, NAMES)
    write_exports(tmp_path, detector, [name], half=True)
    fused = detector.fuse()
    path = tmp_path / name
    parameters = sum(p.numel() for p in fused.parameters())
    assert path.stat().st_size < 2 * parameters + 60_000  # two bytes each, and the graph
    model = open_model(path, device=CPU, trust=True)
    boxes, scores = model.decode(model(noise_images()[:1]))
    expected_boxes, expected_scores = fused.decode(fused(noise_images()[:1]))
    torch.testing.assert_close(boxes, expected_boxes, rtol=0.02, atol=0.5)
    torch.testing.assert_close(scores, expected_scores, rtol=0, atol=0.02)
    assert not torch.equal(scores, scores.half().float())  # in float16 they would be


@pytest.mark.parametrize("name", ["a.onnx", "a_openvino_model", "a.pt2", "a_ncnn_model"])
def test_files_name_no_path_of_this_machine(name: str):
    path = file_of(name)
    texts = [file.read_bytes() for file in (path.iterdir() if path.is_dir() else [path])]
    if name == "a.pt2":
        with zipfile.ZipFile(path) as archive:
            texts = [archive.read(entry) for entry in archive.namelist()]
    assert not any(str(ROOT).encode() in text for text in texts)


def test_the_devices_that_tracing_stored_follow_a_torchscript_file():
    """pytorch#31141."""
    module = torch.jit.load(str(file_of("a.torchscript")), map_location=CPU)
    devices = 'Device = prim::Constant[value="{}"]'.format
    stored = str(module.inlined_graph).count(devices("cpu"))
    move_constants(module.graph, torch.device("cuda:0"))
    moved = str(module.inlined_graph)
    assert (moved.count(devices("cpu")), moved.count(devices("cuda:0"))) == (0, stored)
    assert stored


@torch.no_grad()
def test_an_onnx_file_of_another_program(tmp_path: Path):
    """Its names tell the layout; without them it is refused."""
    onnx = pytest.importorskip("onnx")
    proto = onnx.load(file_of("a.onnx"))
    entries = {entry.key: entry.value for entry in proto.metadata_props}
    fused = calibrated_detector(TINY_MODEL, NAMES).fuse()
    expected = fused.decode(fused(images(2)))
    for kept in (("names", "stride", "imgsz", "batch", "task"), ("names", "stride")):  # of Ultralytics, of YOLOv5
        del proto.metadata_props[:]
        for key in kept:
            proto.metadata_props.add(key=key, value=entries[key])
        onnx.save(proto, tmp_path / "b.onnx")
        model = open_model(tmp_path / "b.onnx", device=CPU)
        assert (model.names, model.stride, model.nms_iou, model.confidence) == (NAMES, 32, 0.7, None)
        assert (model.input_hw, model.batch) == ((64, 96), 2)
        for found, wanted in zip(model.decode(model(images(2))), expected):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "b.onnx")
    with refused("b.onnx: has no class names; expected ..."):
        open_model(tmp_path / "b.onnx", device=CPU)


def test_onnx_files_read_no_file_outside_of_their_folder_and_load_no_library(tmp_path: Path, capfd):
    onnx = pytest.importorskip("onnx")
    proto = onnx.load(file_of("a.onnx"))
    folder = tmp_path / "models"
    folder.mkdir()
    tensor = max(proto.graph.initializer, key=lambda t: len(t.raw_data))
    secret = tmp_path / "secret.bin"
    secret.write_bytes(tensor.raw_data)
    shutil.copy(secret, folder / "inside.bin")
    (folder / "link.bin").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add(key="location")
    for location in ("../secret.bin", str(secret), "link.bin", "up/secret.bin", "missing/../../secret.bin"):
        entry.value = location
        (folder / "a.onnx").write_bytes(proto.SerializeToString())
        with refused("models/a.onnx: cannot be opened (...)"):
            open_model(folder / "a.onnx", device=CPU)
    entry.value = "inside.bin"
    (folder / "a.onnx").write_bytes(proto.SerializeToString())
    open_model(folder / "a.onnx", device=CPU)
    assert capfd.readouterr().err == ""
    node = onnx.helper.make_node("EPContext", ["images"], ["x"], domain="com.microsoft", ep_cache_context="lib.so")
    proto.graph.node.insert(0, node)
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    for domain in ("com.microsoft", "my.domain"):
        proto.graph.node[0].domain = proto.opset_import[-1].domain = domain
        (folder / "a.onnx").write_bytes(proto.SerializeToString())
        with refused("models/a.onnx: cannot be opened (...)"):
            open_model(folder / "a.onnx", device=CPU)


@pytest.mark.parametrize("name", ["a.onnx", "a.xml", "a.torchscript", "a.pt2", "a.tflite", "model.ncnn.param"])
def test_missing_and_damaged_files_are_one_line(tmp_path: Path, name: str):
    with refused(f"{name}: no such file"):
        open_model(tmp_path / name, device=CPU)
    (tmp_path / name).write_bytes(b"not a model")
    with pytest.raises(UserError) as caught:
        open_model(tmp_path / name, device=CPU, trust=True)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_other_programs_find_channels_last_and_fractions_in_a_tflite_file():
    path = file_of("a.tflite")
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path))
    interpreter.allocate_tensors()
    (details,) = interpreter.get_input_details()
    (output,) = interpreter.get_output_details()
    assert details["shape"].tolist() == [2, 64, 96, 3]
    interpreter.set_tensor(details["index"], images(2).permute(0, 2, 3, 1).contiguous().numpy())
    interpreter.invoke()
    graphs = ModelGraphs(calibrated_detector(TINY_MODEL, NAMES), options(nms_iou=0.7))
    scaled = graphs.module(half=False)(images(2)) / torch.tensor([96, 64, 96, 64, *[1] * len(NAMES)])[:, None]
    np.testing.assert_allclose(interpreter.get_tensor(output["index"]), scaled, atol=1e-5)
    with zipfile.ZipFile(path) as archive:
        assert re.search(rb'"input_layout": "NHWC"', archive.read("metadata.json"))
