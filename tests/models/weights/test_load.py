"""Checkpoints: public ones give the reference outputs, ours are restored completely, hostile ones run no code."""

from __future__ import annotations

import copy
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from models.detector import build_detector
from models.heads.base import ONE_TO_ONE
from models.weights.load import load_detector
from models.weights.transfer import transfer_weights
from tests.helpers.hostile_files import Touch, zip_around
from tests.helpers.messages import refused
from tests.helpers.public_layouts import save_module
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, write_detector
from utils.boxes import xyxy_to_cxcywh

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
    detector, content = load_detector(path)
    assert (detector.spec["name"], detector.names) == (name, ("a", "b", "c"))
    assert content == {"format": "foreign", "names": ["a", "b", "c"], "imgsz": 320}
    assert not detector.training
    expected = original.half().state_dict()
    for key, value in detector.state_dict().items():
        assert value.dtype in (torch.float32, torch.int64)
        assert torch.equal(value, expected[key].to(value.dtype)), key


def test_a_plain_state_dict_is_recognized(tmp_path: Path) -> None:
    original = build_detector("yolov8n", 2, seed=5)
    state = OrderedDict((f"module.{k}", v) for k, v in original.state_dict().items())
    torch.save(state, tmp_path / "state.pt")
    detector, _ = load_detector(tmp_path / "state.pt")
    assert torch.equal(detector.state_dict()["model.0.conv.weight"], state["module.model.0.conv.weight"])
    assert detector.names == ("0", "1")


# Our checkpoints


def test_own_checkpoint_round_trip_prefers_the_ema(tmp_path: Path) -> None:
    detector, ema = (build_detector(TINY_MODEL, 2, names=["x", "y"], seed=s) for s in (1, 2))
    both = {"model": detector.state_dict(), "ema": ema.half().state_dict()}
    loaded, content = load_detector(write_detector(tmp_path / "own.pt", detector, **both, epoch=4))
    assert (content["epoch"], loaded.names, loaded.spec) == (4, ("x", "y"), detector.spec)
    assert not loaded.training
    expected = ema.float().state_dict()
    for key, value in loaded.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    wrong = detector.state_dict() | {"model.0.conv.weight": torch.zeros(1)}
    with refused("wrong.pt: its weights do not match its model (model.0.conv.weight: ..., the file [1])"):
        load_detector(write_detector(tmp_path / "wrong.pt", detector, ema=wrong))


# Transfer


@pytest.mark.parametrize(("spec", "groups", "before"), [(TINY_ANCHOR_MODEL, 3, 5), (TINY_MODEL, 1, 0)])
def test_transfer_maps_class_rows_by_name(tmp_path: Path, spec: dict, groups: int, before: int) -> None:
    source = build_detector(spec, 3, names=["cat", "Dog", "emu"], seed=1)
    path = write_detector(tmp_path / "own.pt", source)
    target = build_detector(spec, 2, names=["dog ", "fox"], seed=2)
    fresh = build_detector(spec, 2, names=["dog ", "fox"], seed=2).state_dict()
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
        ours, was, theirs = (t.view(groups, before + n, -1) for t, n in ((new[key], 2), (fresh[key], 2), (old[key], 3)))
        assert torch.equal(ours[:, :before], theirs[:, :before])
        assert torch.equal(ours[:, before], theirs[:, before + 1])
        assert torch.equal(ours[:, before + 1], was[:, before + 1])
        is_new = torch.zeros(groups, before + 2, dtype=torch.bool)
        is_new[:, before + 1] = True
        assert report.new_rows[key] == tuple(is_new.flatten().nonzero().flatten().tolist())


@pytest.mark.parametrize("spec", [TINY_ANCHOR_MODEL, TINY_MODEL | {"end2end": True}])
def test_a_new_class_scores_as_the_similar_one_whose_rows_it_gets(tmp_path: Path, spec: dict) -> None:
    source = build_detector(spec, 4, names=["cat", "dog", "emu", "bus"], seed=1).eval()
    path = write_detector(tmp_path / "own.pt", source)
    target = build_detector(spec, 3, names=["fox", "dog", "car"], seed=2).eval()
    by_name = transfer_weights(build_detector(spec, 3, names=["fox", "dog", "car"]), path)
    report = transfer_weights(target, path, similar={0: 2, 1: 0, 2: 3})
    assert report.similar == (("fox", "emu"), ("car", "bus"))
    assert report.new_rows == by_name.new_rows  # they are no less new to the optimizer
    images = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        scores = target.decode(target(images))[1]
        all_scores = source.decode(source(images))[1]
    torch.testing.assert_close(scores, all_scores[..., [2, 1, 3]])


def test_weights_of_a_single_head_initialize_both_heads(tmp_path) -> None:
    single = build_detector(TINY_MODEL, 2, names=["light", "dark"], seed=1)
    write_detector(tmp_path / "single.pt", single)
    pair = build_detector(TINY_MODEL | {"end2end": True}, 2, names=["dark", "new"], seed=2)
    fresh = {key: value.clone() for key, value in pair.state_dict().items()}
    report = transfer_weights(pair, tmp_path / "single.pt")
    assert not report.skipped | dict.fromkeys(report.unused)
    state = pair.state_dict()
    source = single.state_dict()
    head = f"model.{len(single.model) - 1}."
    for prefix in ("", ONE_TO_ONE):
        assert torch.equal(state[f"{head}{prefix}cv2.0.0.conv.weight"], source[f"{head}cv2.0.0.conv.weight"])
        rows = f"{head}{prefix}cv3.1.2.weight"
        assert torch.equal(state[rows][0], source[f"{head}cv3.1.2.weight"][1])
        assert torch.equal(state[rows][1], fresh[rows][1])
    write_detector(tmp_path / "pair.pt", pair, names=["light", "dark"])
    back = build_detector(TINY_MODEL, 2, names=["light", "dark"], seed=3)
    report = transfer_weights(back, tmp_path / "pair.pt")
    assert not report.skipped
    assert {name.split(".")[2] for name in report.unused} == {f"{ONE_TO_ONE}cv2", f"{ONE_TO_ONE}cv3"}


def test_transfer_reports_what_does_not_fit(tmp_path: Path) -> None:
    source = build_detector("yolov8n", 2, names=["a", "b"], seed=1)
    target = build_detector("yolo11n", 2, names=["a", "c"], seed=2)
    report = transfer_weights(target, write_detector(tmp_path / "own.pt", source))
    assert "model.0.conv.weight" in report.taken
    assert report.skipped["model.10.cv1.conv.weight"] == "not in the file"
    assert set(report.taken) | set(report.new_rows) | set(report.skipped) == set(target.state_dict())
    assert "model.22.cv2.0.0.conv.weight" in report.unused
    torch.save({"elsewhere.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with refused("other.pt: no tensor matches this model; wrong family or size?"):
        transfer_weights(target, tmp_path / "other.pt")


# Hostile and broken files


def test_files_without_a_known_model_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Conv2d(3, 4, 1).state_dict(), tmp_path / "conv.pt")
    zip_around(pickle.dumps({"model": Touch((os.system, ("true",)))}, protocol=2), tmp_path / "evil.pt")
    for name, message in (
        ("conv.pt", "its tensors match no known model (...)"),
        ("evil.pt", "no detector weights in the file (...)"),
        ("gone.pt", "no such checkpoint"),
    ):
        with refused(f"{name}: {message}"):
            load_detector(tmp_path / name)
