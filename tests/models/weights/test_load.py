"""Checkpoints: public ones give the reference outputs, ours are restored completely, hostile ones run no code."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from models.detector import build_detector
from models.weights.load import load_detector
from models.weights.safe_torch_file import ForeignFile
from models.weights.transfer import transfer_weights
from tests.helpers.hostile_files import Touch, opcode_call, tensor_program, zip_around
from tests.helpers.messages import refused
from tests.helpers.public_layouts import save_module
from tests.helpers.same_content import assert_same_content
from tests.helpers.tiny import TINY_MODEL, write_detector, write_weights
from utils.boxes import xyxy_to_cxcywh
from utils.files.pickle_program import Name

# Public checkpoints


@pytest.mark.parametrize("name", ["yolov8n", "yolov5n"])
def test_public_weights_give_the_reference_output(shared: Path, name: str) -> None:
    weights = shared / "weights" / f"{name}.pt"
    golden = shared / "golden" / f"{name}_raw.npz"
    picture = next((shared / "datasets" / "coco128").rglob("000000000009.jpg"), None)
    if picture is None or not weights.is_file() or not golden.is_file():
        pytest.skip("needs weights, golden outputs and coco128")
    canvas = np.full((640, 640, 3), 114, np.uint8)
    canvas[80:560] = cv2.imread(str(picture))[..., ::-1]
    images = torch.from_numpy(canvas).permute(2, 0, 1)[None].float() / 255
    detector, content = load_detector(weights)
    assert detector.spec["name"] == name
    assert content["format"] == "foreign"
    assert content["names"] == list(detector.names)
    assert detector.names[:2] == ("person", "bicycle")
    reference = torch.from_numpy(np.load(golden)["output"])
    if name == "yolov8n":
        boxes, scores = reference.transpose(1, 2).split((4, 80), -1)
    else:
        boxes, objectness, classes = reference.split((4, 1, 80), -1)
        scores = objectness * classes
    with torch.inference_mode():
        for model, slack in ((detector, 1), (detector.fuse(), 4)):
            found_boxes, found_scores = model.decode(model(images))
            assert (xyxy_to_cxcywh(found_boxes) - boxes).abs().max() < 5e-3 * slack
            assert (found_scores - scores).abs().max() < 1e-4


@pytest.mark.parametrize("name", [pytest.param("yolov5s", marks=pytest.mark.slow), "yolov8n", "yolo11n"])
def test_a_foreign_module_is_recognized_by_its_shapes(tmp_path: Path, name: str) -> None:
    original = build_detector(name, 3, seed=5)
    beside = {"epoch": 3, "ema": None, "train_args": {"imgsz": 320}}
    half = copy.deepcopy(original.model).half()
    path = save_module(tmp_path / "foreign.pt", half, beside, names={0: "a", 1: "b", 2: "c"})
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        torch.load(path, weights_only=False)
    detector, content = load_detector(path)
    assert (detector.spec["name"], detector.names) == (name, ("a", "b", "c"))
    assert content == {"format": "foreign", "names": ["a", "b", "c"], "imgsz": 320}
    assert not detector.training
    expected = original.half().state_dict()
    for key, value in detector.state_dict().items():
        assert value.dtype in (torch.float32, torch.int64)
        assert torch.equal(value, expected[key].to(value.dtype)), key


@pytest.mark.parametrize("names", [("p", "q"), ("p", "q", "r", "s")])
def test_names_that_are_not_those_of_the_classes_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    model = build_detector("yolov8n", 3).model
    path = save_module(tmp_path / "foreign.pt", model, {}, names=dict(enumerate(names)))
    detector, _ = load_detector(path)
    assert detector.names == ("0", "1", "2")
    assert f"foreign.pt: has {len(names)} names for 3 classes; the names are not used" in caplog.text


def test_a_plain_state_dict_is_recognized(tmp_path: Path) -> None:
    original = build_detector("yolov8n", 2, seed=5)
    state = OrderedDict((f"module.{k}", v) for k, v in original.state_dict().items())
    torch.save(state, tmp_path / "state.pt")
    detector, _ = load_detector(tmp_path / "state.pt")
    assert torch.equal(detector.state_dict()["model.0.conv.weight"], state["module.model.0.conv.weight"])
    assert detector.names == ("0", "1")


# Our checkpoints


def test_own_checkpoint_round_trip_prefers_the_ema(tmp_path: Path) -> None:
    detector, ema = (build_detector("yolo11n", 2, names=["x", "y"], seed=s) for s in (1, 2))
    both = {"model": detector.state_dict(), "ema": ema.half().state_dict()}
    loaded, content = load_detector(write_detector(tmp_path / "own.pt", detector, **both, epoch=4))
    assert content["epoch"] == 4
    assert loaded.names == ("x", "y")
    assert loaded.spec == detector.spec
    assert not loaded.training
    expected = ema.state_dict()
    assert all(torch.equal(v.float(), expected[k].float()) for k, v in loaded.state_dict().items())
    assert all(v.dtype != torch.float16 for v in loaded.state_dict().values())


def test_the_default_device_of_the_program_does_not_matter(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "a.pt", ("a", "b"))
    expected = load_detector(path)[0].state_dict()
    with torch.device("meta"):
        detector, _ = load_detector(path)
    assert_same_content(detector.state_dict(), expected)
    assert detector(torch.zeros(1, 3, 64, 64))


def test_an_own_checkpoint_with_wrong_weights_is_refused(tmp_path: Path) -> None:
    detector = build_detector("yolov5n", 2, seed=1)
    wrong = detector.state_dict() | {"model.0.conv.weight": torch.zeros(1)}
    with refused(
        "own.pt: its weights do not match its model (model.0.conv.weight: the model has [16, 3, 6, 6], the file [1])"
    ):
        load_detector(write_detector(tmp_path / "own.pt", detector, ema=wrong))


# Transfer


@pytest.mark.parametrize("name", ["yolov5n", "yolov8n"])
def test_transfer_maps_class_rows_by_name(tmp_path: Path, name: str) -> None:
    source = build_detector(name, 3, names=["cat", "Dog", "emu"], seed=1)
    path = write_detector(tmp_path / "own.pt", source)
    target = build_detector(name, 2, names=["dog ", "fox"], seed=2)
    fresh = build_detector(name, 2, names=["dog ", "fox"], seed=2).state_dict()
    report = transfer_weights(target, path)
    assert report.classes == ("dog ",)
    assert len(report.new_rows) == 6
    assert not report.skipped
    assert "6 loaded partly (rows of 1 common class: dog )" in report.lines()[0]
    old = source.state_dict()
    new = target.state_dict()
    for key in report.taken:
        assert torch.equal(new[key], old[key])
    for key in report.new_rows:
        groups, before = (3, 5) if name == "yolov5n" else (1, 0)
        ours, was, theirs = (t.view(groups, before + n, -1) for t, n in ((new[key], 2), (fresh[key], 2), (old[key], 3)))
        assert torch.equal(ours[:, :before], theirs[:, :before])
        assert torch.equal(ours[:, before], theirs[:, before + 1])
        assert torch.equal(ours[:, before + 1], was[:, before + 1])
        is_new = torch.zeros(groups, before + 2, dtype=torch.bool)
        is_new[:, before + 1] = True
        assert report.new_rows[key] == tuple(is_new.flatten().nonzero().flatten().tolist())


@pytest.mark.parametrize("name", ["yolov5n", "yolov8n", "yoloxnano", "yolo26n"])
def test_a_model_of_the_first_classes_of_a_file_scores_them_alike(tmp_path: Path, name: str) -> None:
    """As with the class person and weights of COCO, whose first class it is."""
    source = build_detector(name, 5, names=["person", "bicycle", "car", "bus", "dog"], seed=1).eval()
    target = build_detector(name, 2, names=["person", "bicycle"], seed=2).eval()
    report = transfer_weights(target, write_detector(tmp_path / "own.pt", source))
    assert not report.skipped
    assert report.classes == ("person", "bicycle")
    images = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        boxes, scores = target.decode(target(images))
        all_boxes, all_scores = source.decode(source(images))
    torch.testing.assert_close(boxes, all_boxes)
    torch.testing.assert_close(scores, all_scores[..., :2])


def test_transfer_reports_what_does_not_fit(tmp_path: Path) -> None:
    source = build_detector("yolov8n", 2, names=["a", "b"], seed=1)
    target = build_detector("yolo11n", 2, names=["a", "c"], seed=2)
    report = transfer_weights(target, write_detector(tmp_path / "own.pt", source))
    assert "model.0.conv.weight" in report.taken
    assert report.skipped["model.10.cv1.conv.weight"] == "not in the file"
    assert set(report.taken) | set(report.new_rows) | set(report.skipped) == set(target.state_dict())
    assert "model.22.cv2.0.0.conv.weight" in report.unused
    assert any(
        line.startswith("left as initialized: ") and line.endswith(": not in the file") for line in report.lines()
    )
    torch.save({"elsewhere.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with refused("other.pt: no tensor matches this model; wrong family or size?"):
        transfer_weights(target, tmp_path / "other.pt")


# Hostile and broken files


def test_code_in_a_pickle_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "touched"
    evil = pickle.dumps({"model": Touch((os.system, (f"touch '{marker}'",)))}, protocol=2)
    pickle.loads(evil)
    assert marker.exists()  # the attack is real
    marker.unlink()
    path = zip_around(evil, tmp_path / "evil.pt")
    for read in (load_detector, lambda p: transfer_weights(build_detector("yolov8n", 1), p)):
        with refused("evil.pt: no detector weights in the file (neither 'model' nor 'ema' nor a state dict)"):
            read(path)
    assert not marker.exists()


@pytest.mark.parametrize("function", ["os.system", "builtins.eval", "__builtin__.exec", "torch.hub.load", "trap.go"])
def test_code_becomes_inert_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    marker = tmp_path / "touched"
    (tmp_path / "trap.py").write_text(f"open({str(marker)!r}, 'w')\ndef go(x): open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    module, _, name = function.rpartition(".")
    path = zip_around(opcode_call(module, name, f"touch '{marker}'"), tmp_path / "evil.pt")
    with ForeignFile(path) as file:
        assert (file.content.kind, file.content.args) == (Name(module, name), (f"touch '{marker}'",))
    with refused("evil.pt: no detector weights in the file (neither 'model' nor 'ema' nor a state dict)"):
        load_detector(path)
    assert not marker.exists()
    assert "trap" not in sys.modules


def test_a_valid_tensor_is_read(tmp_path: Path) -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    path = zip_around(tensor_program((2, 2), (1, 2), 6, 1), tmp_path / "ok.pt", **{"0": data})
    with ForeignFile(path) as file:
        assert file.state_dict(file.content)["w"].tolist() == [[1.0, 3.0], [2.0, 4.0]]


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"size": (2**40,), "stride": (1,), "count": 2**40}, "a tensor does not match the stored data"),
        ({"size": (2**40,), "stride": (0,), "count": 6}, "its tensors declare far more data than the file has"),
        ({"size": (6,), "stride": (1,), "count": 6, "offset": 1}, "a tensor does not match the stored data"),
        ({"size": (2,), "stride": (-1,), "count": 6}, "a tensor does not match the stored data"),
        ({"size": (2, 2), "stride": (1,), "count": 6}, "a tensor does not match the stored data"),
        ({"size": (2,), "stride": (1,), "count": 6, "key": "../0"}, "a tensor does not match the stored data"),
        ({"size": ("a",), "stride": (1,), "count": 6}, "a tensor does not match the stored data"),
        ({"size": (2,), "stride": (1,), "count": 6, "offset": -1}, "a tensor does not match the stored data"),
    ],
)
def test_a_tensor_with_a_false_size_is_refused(tmp_path: Path, lie: dict, message: str) -> None:
    path = zip_around(tensor_program(**lie), tmp_path / "lie.pt", **{"0": bytes(24)})
    with refused(f"lie.pt: refused: {message}"):
        load_detector(path)


def other_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Writes files and yields each with the message that refuses it."""
    no_checkpoint = "truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)"
    yield folder / "gone.pt", "no such checkpoint"
    torch.save({"model": {"w": torch.zeros(1000)}}, folder / "whole.pt")
    contents = (folder / "whole.pt").read_bytes()[:-200], b"", b"not a model\n" * 50, pickle.dumps({"model": 1})
    for number, content in enumerate(contents):
        (folder / f"{number}.pt").write_bytes(content)
        yield folder / f"{number}.pt", no_checkpoint
    (folder / "broken.safetensors").write_bytes(b"not a model")
    yield folder / "broken.safetensors", "truncated, damaged, or not a safetensors file (header too large)"
    with zipfile.ZipFile(folder / "zip.pt", "w") as file:
        file.writestr("readme.txt", "hello")
    yield folder / "zip.pt", "not a PyTorch checkpoint (no data.pkl inside)"
    torch.save(nn.Conv2d(3, 4, 1).state_dict(), folder / "conv.pt")
    families = "yolo11, yolo26, yolov5, yolov8, yolov9, yolox"
    yield folder / "conv.pt", f"its tensors match no known model ({families}; unfused)"
    torch.save(build_detector("yolov8n", 1).state_dict(), folder / "flipped.pt")
    data = bytearray((folder / "flipped.pt").read_bytes())
    data[len(data) // 2] ^= 255
    (folder / "flipped.pt").write_bytes(data)
    yield folder / "flipped.pt", "damaged (entry flipped/data/216 cannot be read)"
    views = torch.zeros(5000)  # many views of one storage
    torch.save({f"w{i}": views.view(-1) for i in range(1000)}, folder / "views.pt")
    yield folder / "views.pt", "refused: its tensors declare far more data than the file has"
    bomb = zip_around(pickle.dumps({}, 2), folder / "bomb.pt", zipfile.ZIP_DEFLATED, **{"0": bytes(2**24)})
    assert bomb.stat().st_size < 2**16
    yield bomb, "refused: its entries are compressed, but PyTorch's never are"


def test_files_that_are_no_checkpoints_damaged_or_zip_bombs_are_refused(tmp_path: Path) -> None:
    for path, message in other_files(tmp_path):
        with refused(f"{path.name}: {message}"):
            load_detector(path)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (pickle.dumps({"model": 1}, 2)[:-3], "bad.pt: refused: its object graph is malformed"),
        (b"\x80\x02r\xff\xff\xff\x7f.", "bad.pt: refused: its object graph is malformed"),
        (
            b"\x80\x02}r\xff\xff\xff\x7f.",
            "bad.pt: no detector weights in the file (neither 'model' nor 'ema' nor a state dict)",
        ),
        (b"(ios\nsystem\n.", "bad.pt: refused: its pickle has the opcode INST, which PyTorch does not write"),
        (b"\x80\x02\x82\x01.", "bad.pt: refused: its pickle has the opcode EXT1, which PyTorch does not write"),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "bad.pt: refused: its object graph is malformed"),
        (b"\x80\x02cbuiltins\nset\nK\x01a.", "bad.pt: refused: its object graph is malformed"),
        (b"\x80\x02cbuiltins\nset\n(K\x01K\x02e.", "bad.pt: refused: its object graph is malformed"),
        (b"\x80\x02K\x01K\x02R.", "bad.pt: refused: its object graph is malformed"),
        (b"\x80\x02}}X\x01\x00\x00\x00a1b.", "bad.pt: refused: its object graph is malformed"),
        (b"\x80\x02cmodels.x\nY\n}b.", "bad.pt: refused: its object graph is malformed"),
        (
            pickle.dumps({"model": None}, 2),
            "bad.pt: no detector weights in the file (neither 'model' nor 'ema' nor a state dict)",
        ),
        (
            pickle.dumps([1, 2], 2),
            "bad.pt: no detector weights in the file (neither 'model' nor 'ema' nor a state dict)",
        ),
    ],
)
def test_damaged_object_graphs_are_refused(tmp_path: Path, program: bytes, message: str) -> None:
    with refused(message):
        load_detector(zip_around(program, tmp_path / "bad.pt"))


def test_the_first_rows_of_a_file_without_class_names_are_reported(tmp_path):
    source = build_detector(TINY_MODEL, 3, seed=1)
    target = build_detector(TINY_MODEL, 5, seed=2)
    torch.save(source.state_dict(), tmp_path / "bare.pt")
    report = transfer_weights(target, tmp_path / "bare.pt", grow=True)
    assert report.lines() == [f"{tmp_path}/bare.pt: 109 of 115 tensors loaded, 6 loaded partly (their first rows)"]
    for name, rows in report.new_rows.items():
        assert rows == (3, 4)
        assert torch.equal(target.state_dict()[name][:3], source.state_dict()[name])


@pytest.mark.parametrize(("stored", "used"), [(650, 672), (640, 640)])
def test_the_image_size_of_a_foreign_file_is_rounded_up_to_whole_strides(tmp_path, stored, used):
    detector = build_detector("yolov8n", 3)
    path = save_module(tmp_path / "a.pt", detector.model, {"opt": {"imgsz": stored}}, names=["a", "b", "c"])
    assert load_detector(path)[1]["imgsz"] == used
