"""Exported files, each opened by its own runtime, against the detector that they were made of."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import zipfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.formats.graphs import build_onnx
from engine.formats.layouts import ExportModule, make_layout
from engine.formats.onnx_format import ONNX_RUNTIMES, OnnxFormat
from engine.formats.torch_formats import move_constants
from engine.inference import open_model as opening
from engine.inference.open_model import is_exported
from engine.inference.predictor import Predictor
from models.detector import build_detector
from tests.engine.formats.exported import FORMATS, NAMES, write_all
from tests.helpers.exports import (
    FAMILIES,
    calibrated_detector,
    check_threads_get_the_same_bits,
    noise_images,
    options,
    shallow_spec,
    tiny_graph,
)
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.session import session_file
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_detector
from utils.errors import UserError

CPU = torch.device("cpu")
open_model = partial(opening.open_model, trust=True)


@pytest.fixture(scope="module")
def packages() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="static"), pytest.param(True, id="dynamic", marks=pytest.mark.slow)]
)
def tiny(request: pytest.FixtureRequest, packages: None):
    """All formats of a tiny detector, in a folder that must not be changed."""
    detector = calibrated_detector(TINY_MODEL, NAMES)
    sizes = {"dynamic": True} if request.param else {"batch": 2}

    def write(folder: Path) -> None:
        folder.mkdir()
        write_all(folder, detector, graph=tiny_graph(NAMES, **sizes), **sizes)

    folder = session_file("exports-dynamic" if request.param else "exports-static", write)
    return folder, detector.fuse(), write_all(folder, detector, files=(), **sizes)


# For what does not depend on the sizes that a file takes.
STATIC = pytest.mark.parametrize("tiny", [False], indirect=True, ids=["static"])


def images(count: int, height: int = 64, width: int = 96) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
@pytest.mark.parametrize("name", FORMATS)
def test_each_runtime_gives_the_detectors_boxes_and_scores(tiny, name: str):
    folder, fused, metadata = tiny
    model = open_model(folder / name, device=CPU, trust=True)
    assert (model.names, model.stride, model.imgsz, model.confidence) == (NAMES, 32, 96, 0.3)
    rules = (fused.nms_iou, fused.head.validation_iou)
    assert (model.nms_iou, model.validation_iou, model.info) == (*rules, asdict(metadata))
    assert (model.input_hw, model.batch) == ((None, None) if metadata.dynamic else ((64, 96), 2))
    sizes = [(1, 64, 96), (3, 64, 96)] + [(2, 128, 64), (1, 32, 32)] * metadata.dynamic
    for size in sizes:
        pixels = images(*size)
        boxes, scores = model.decode(model(pixels))
        expected_boxes, expected_scores = fused.decode(fused(pixels))
        torch.testing.assert_close(boxes, expected_boxes, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-5)
        assert expected_scores.amax() - expected_scores.amin() > 0.2  # there is something to compare
    if not metadata.dynamic:
        with refused(f"{name}: takes inputs of 64x96 pixels (height x width), not 96x64"):
            model(images(1, 96, 64))


def test_the_devices_that_tracing_stored_follow_a_torchscript_file(tiny):
    module = torch.jit.load(tiny[0] / "a.torchscript", map_location=CPU)
    devices = 'Device = prim::Constant[value="{}"]'.format
    stored = str(module.inlined_graph).count(devices("cpu"))
    move_constants(module.graph, torch.device("cuda:0"))
    moved = str(module.inlined_graph)
    assert (moved.count(devices("cpu")), moved.count(devices("cuda:0"))) == (0, stored)
    assert stored


@STATIC
@pytest.mark.parametrize("name", FORMATS)
def test_threads_that_share_a_model_get_the_same_bits(tiny, name: str):
    folder, _, _ = tiny
    model = open_model(folder / name, device=CPU, trust=True)
    check_threads_get_the_same_bits(model, [images(n) for n in (1, 2, 3, 1)])


@STATIC
@pytest.mark.parametrize("name", FORMATS)
def test_a_pickled_predictor_opens_its_file_again(tiny, name: str, monkeypatch: pytest.MonkeyPatch):
    folder, _, metadata = tiny
    monkeypatch.chdir(folder)
    predictor = Predictor(open_model(name, device=CPU, trust=True), conf=0.4, max_det=7, color="rgb")
    stored = pickle.dumps(predictor)
    assert len(stored) < 5000  # the file is named, not contained
    monkeypatch.chdir("/")
    again = pickle.loads(stored)
    picture = (noise_images()[0].permute(1, 2, 0) * 255).byte().numpy()
    found, expected = (p(picture)[0].boxes.data for p in (again, predictor))
    assert len(found) == 7
    assert torch.equal(found, expected)
    assert (again.names, again.settings.conf, again.model.info) == (predictor.names, 0.4, asdict(metadata))


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "files"),
    [
        (FAMILIES[0], ("a.torchscript",)),
        pytest.param(TINY_ANCHOR_MODEL, ("a.onnx", "a_openvino_model"), marks=pytest.mark.slow),
        *(pytest.param(family, FORMATS, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_every_family(tmp_path: Path, packages: None, family: str | dict, files: tuple[str, ...]):
    detector = calibrated_detector(shallow_spec(family) if isinstance(family, str) else family, NAMES)
    write_all(tmp_path, detector, files)
    fused = detector.fuse()
    pixels = noise_images()[:1]
    boxes, scores = fused.decode(fused(pixels))
    for name in files:
        model = open_model(tmp_path / name, device=CPU, trust=True)
        found_boxes, found_scores = model.decode(model(pixels))
        torch.testing.assert_close(found_boxes, boxes, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(found_scores, scores, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["a.torchscript", *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS if name != "a.torchscript")],
)
def test_half_stores_float16_and_decodes_in_float32(tmp_path: Path, packages: None, name: str):
    folder = tmp_path
    detector = calibrated_detector(TINY_MODEL, NAMES)
    graph = tiny_graph(NAMES) if name in ("a.onnx", "a_openvino_model") else None
    write_all(folder, detector, (name,), half=True, graph=graph)
    fused = detector.fuse()
    file = folder / name / "a.bin" if name == "a_openvino_model" else folder / name
    size = file.stat().st_size
    if name == "a.pt2":  # its graph is longer than its weights
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist() if "/weight_" in entry.filename)
    parameters = sum(p.numel() for p in fused.parameters())
    assert parameters > 50_000
    assert size < 2 * parameters + 60_000  # two bytes each, and the graph
    model = open_model(folder / name, device=CPU, trust=True)
    pixels = noise_images()[:2]
    (output,) = model(pixels)
    assert output.dtype == torch.float32
    boxes, scores = model.decode([output])
    expected_boxes, expected_scores = fused.decode(fused(pixels))
    torch.testing.assert_close(boxes, expected_boxes, rtol=0.02, atol=0.5)
    torch.testing.assert_close(scores, expected_scores, rtol=0, atol=0.02)
    assert not torch.equal(scores, scores.half().float())  # in float16 they would be


@torch.no_grad()
@pytest.mark.slow
def test_rows(tmp_path: Path, packages: None):
    """tests/engine/formats/test_readers.py has the rows of an ONNX file."""
    detector = calibrated_detector(TINY_MODEL, NAMES)
    write_all(tmp_path, detector, FORMATS, graph=tiny_graph(NAMES, "end2end"), layout="end2end")
    pixels = images(2)
    expected = make_layout(detector.fuse(), "end2end", nms_iou=0.7)(pixels)
    for name in FORMATS:
        (output,) = open_model(tmp_path / name, device=CPU, trust=True)(pixels)
        assert output.shape == expected.shape
        torch.testing.assert_close(output[..., 4], expected[..., 4], rtol=0, atol=1e-5)
        near = torch.isclose(output[..., :4], expected[..., :4], rtol=0, atol=0.01).all(-1)
        assert near.float().mean() > 0.97  # boxes of almost the same score may change places


def test_files_name_no_path_of_this_machine(tiny):
    folder, _, _ = tiny
    texts = [(folder / "a.onnx").read_bytes(), (folder / "a_openvino_model" / "a.xml").read_bytes()]
    with zipfile.ZipFile(folder / "a.pt2") as archive:
        texts += [archive.read(name) for name in archive.namelist()]
    assert not any(str(ROOT).encode() in text for text in texts)


@STATIC
def test_the_metadata_has_the_keys_that_other_programs_read(tiny):
    import onnx

    folder, _, _ = tiny
    found = {entry.key: entry.value for entry in onnx.load(folder / "a.onnx").metadata_props}
    assert found["names"] == str(dict(enumerate(NAMES)))
    assert (found["stride"], found["imgsz"], found["task"], found["end2end"]) == ("32", "[64, 96]", "detect", "False")
    assert json.loads(found["lockstep"])["preprocessing"]["pad_value"] == 114
    xml = (folder / "a_openvino_model" / "a.xml").read_text()
    for key, value in (("model_type", "YOLOv8"), ("resize_type", "fit_to_window_letterbox"), ("pad_value", "114")):
        assert f'<{key} value="{value}"' in xml


@torch.no_grad()
def test_an_onnx_file_of_another_program(tiny, tmp_path: Path):
    """Without our own key, the layout is recognized from the shape; without any metadata, classes are numbered."""
    import onnx

    folder, fused, metadata = tiny
    pixels = noise_images()[:2]
    expected = fused.decode(fused(pixels))
    for kept, names in (({"names", "stride", "imgsz", "batch"}, NAMES), (set(), ("0", "1", "2"))):
        proto = onnx.load(folder / "a.onnx")
        entries = [(entry.key, entry.value) for entry in proto.metadata_props if entry.key in kept]
        del proto.metadata_props[:]
        for key, value in entries:
            proto.metadata_props.add(key=key, value=value)
        onnx.save(proto, tmp_path / "b.onnx")
        model = open_model(tmp_path / "b.onnx", device=CPU, trust=True)
        assert (model.names, model.stride, model.nms_iou, model.confidence) == (names, 32, 0.7, None)
        assert model.input_hw == (None if metadata.dynamic else (64, 96))
        for found, wanted in zip(model.decode(model(pixels)), expected):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "imgsz"),
    [
        (("b", 3, "h", "w"), "[65536, 65536]"),
        ((1, 3, 65536, 65536), "[640, 640]"),
        ((10**6, 3, 640, 640), "[640, 640]"),
    ],
    ids=["metadata", "sides", "batch"],
)
def test_a_small_file_that_asks_for_gigabytes_of_images_is_refused(packages: None, tmp_path: Path, shape, imgsz):
    import onnx
    from onnx import helper

    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=1),
        helper.make_node("Squeeze", ["mean", "last"], ["level"]),
        helper.make_node("Expand", ["level", "size"], ["boxes"]),
    ]
    graph = helper.make_graph(
        nodes,
        "boxes",
        [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("boxes", onnx.TensorProto.FLOAT, ["b", "rows", "columns"])],
        [
            helper.make_tensor("size", onnx.TensorProto.INT64, [3], [1, 6, 100]),
            helper.make_tensor("last", onnx.TensorProto.INT64, [1], [3]),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    for key, value in (("imgsz", imgsz), ("names", "{0: 'a', 1: 'b'}")):
        proto.metadata_props.add(key=key, value=value)
    onnx.save(proto, tmp_path / "a.onnx")
    with pytest.raises(UserError, match=r"a.onnx: refused: its input has [\d,]+ values .*, more than any"):
        open_model(tmp_path / "a.onnx", device=CPU)


@STATIC
def test_onnx_files_read_no_file_outside_of_their_folder_and_load_no_library(tiny, tmp_path: Path, capfd):
    import onnx

    folder = tmp_path / "models"
    folder.mkdir()
    proto = onnx.load(tiny[0] / "a.onnx")
    tensor = max(proto.graph.initializer, key=lambda t: len(t.raw_data))
    secret = tmp_path / "secret.bin"
    secret.write_bytes(tensor.raw_data)
    shutil.copy(secret, folder / "inside.bin")
    (folder / "link.bin").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    (folder / "empty.bin").touch()
    locations = ("../secret.bin", str(secret), "link.bin", "up/secret.bin", "missing/../../secret.bin")
    locations = (*locations, "/etc/passwd", "empty.bin", "missing.bin", "", "inside.bin")
    outside = []
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add(key="location")
    for location in locations:
        entry.value = location
        (folder / "a.onnx").write_bytes(proto.SerializeToString())
        try:
            opening.open_model(folder / "a.onnx", device=CPU, trust=True)
        except UserError:
            outside.append(location)
    assert outside == list(locations[:-1])
    assert capfd.readouterr().err == ""
    node = onnx.helper.make_node("EPContext", ["images"], ["x"], domain="com.microsoft", ep_cache_context="lib.so")
    proto.graph.node.insert(0, node)
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    for domain in ("com.microsoft", "my.domain"):
        node.domain = proto.graph.node[0].domain = proto.opset_import[-1].domain = domain
        (folder / "a.onnx").write_bytes(proto.SerializeToString())
        with refused("models/a.onnx: cannot be opened (...)"):
            opening.open_model(folder / "a.onnx", device=CPU, trust=True)


SIGNALLED = """
import gc, os, signal, sys, threading, torch
from engine.inference.open_model import open_model

signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
opened = [open_model(sys.argv[1], device=torch.device("cpu"), trust=True) for _ in range(2)]

def close():
    while opened:
        opened.pop(0)
        gc.collect()

thread = threading.Thread(target=close)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGUSR1)
"""


@STATIC
def test_a_signal_after_openvino_models_were_closed_by_another_thread(tiny, packages: None):
    """OpenVINO installs a signal stack and unmaps it with its last `Core`."""
    command = [python(), "-c", SIGNALLED, str(tiny[0] / "a_openvino_model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


@STATIC
def test_names_of_files_in_another_case_and_renamed_folders(tiny, tmp_path: Path):
    folder, _, metadata = tiny
    shutil.copytree(folder / "a_openvino_model", tmp_path / "renamed")
    shutil.copy(folder / "a.onnx", tmp_path / "A.ONNX")
    pixels = images(metadata.batch)
    for name, original in (("renamed", "a_openvino_model"), ("A.ONNX", "a.onnx")):
        assert is_exported(tmp_path / name)
        found, expected = (open_model(path, device=CPU)(pixels) for path in (tmp_path / name, folder / original))
        assert torch.equal(found[0], expected[0])
    assert not is_exported(tmp_path)
    (tmp_path / "folder.onnx").mkdir()
    with refused("folder.onnx: is a folder without an exported model"):
        open_model(tmp_path / "folder.onnx", device=CPU, trust=True)


class Doubled(ExportModule):
    """A module that torch exports faster than a detector."""

    def __init__(self) -> None:
        super().__init__(build_detector(TINY_MODEL, 1), half=False, nms_iou=None, box_voting=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * 2


def test_a_file_has_the_lowest_ir_version_of_its_opset_and_says_what_reads_it(packages: None):
    for proto, opset, ir, release in (
        (tiny_graph(NAMES, batch=2), 18, 8, "1.14"),
        (build_onnx(Doubled(), options(opset=21)), 21, 10, "1.18"),
    ):
        assert (proto.opset_import[0].version, proto.ir_version) == (opset, ir)
        needed = f"opset {opset} and IR version {ir} need ONNX Runtime {release} or newer"
        assert OnnxFormat().requirements(proto) == needed


def test_a_file_that_no_known_runtime_reads_is_named(packages: None):
    import onnx

    graph = onnx.helper.make_graph([], "none", [], [])
    for opset, ir, text in ((18, 9, "1.15 or newer"), (18, 12, "1.24 or newer"), (99, 8, "newer than ONNX Runtime")):
        proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
        proto.ir_version = ir
        assert text in OnnxFormat().requirements(proto)


def test_the_table_of_runtimes_knows_the_installed_one(packages: None, tmp_path: Path):
    """The installed runtime reads the versions that the table states for its release."""
    import onnx
    import onnxruntime

    installed = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    known = [row for row in ONNX_RUNTIMES if tuple(map(int, row[0].split("."))) <= installed]
    release, ir, opset = known[-1]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "one", ends[:1], ends[1:])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    proto.ir_version = ir
    onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert OnnxFormat().requirements(proto) == f"opset {opset} and IR version {ir} need ONNX Runtime {release} or newer"


def test_an_opset_that_torch_does_not_write_is_refused(packages: None):
    with refused("--opset 99: torch wrote opset ... instead; use that"):
        build_onnx(Doubled(), options(opset=99))


@STATIC
def test_foreign_and_damaged_programs_of_torch_are_one_line(tiny, tmp_path: Path, caplog, capfd):
    """torch logs tracebacks of archives that it cannot read."""
    foreign = tmp_path / "checkpoint.pt2"
    damaged = tmp_path / "damaged.pt2"
    write_detector(foreign, calibrated_detector(TINY_MODEL, NAMES))
    with zipfile.ZipFile(tiny[0] / "a.pt2") as good, zipfile.ZipFile(damaged, "w") as bad:
        for name in good.namelist():
            bad.writestr(name, b"{}" if name.endswith("models/model.json") else good.read(name))
    foreign_message = "contains no pt2 program; a checkpoint's name must end with .pt"
    for path, message in ((foreign, foreign_message), (damaged, "cannot be opened [(]")):
        with pytest.raises(UserError, match=f"^{path}: {message}"):
            open_model(path, device=CPU)
    assert (caplog.records, capfd.readouterr().err) == ([], "")
