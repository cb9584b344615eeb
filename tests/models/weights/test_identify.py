"""Metadata of foreign checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.detector import Detector, build_detector
from models.weights.load import load_detector
from models.weights.transfer import transfer_weights
from tests.helpers.messages import refused
from tests.helpers.public_layouts import save_module
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL
from utils.files.torch_file import write_safetensors


def pictures() -> Tensor:
    return torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def same_outputs(one: Detector, other: Detector, slack: float = 0.0) -> bool:
    one.eval()
    other.eval()
    with torch.inference_mode():
        return all((a - b).abs().max() <= slack for a, b in zip(one(pictures()), other(pictures())))


def test_a_module_of_unknown_size_is_rebuilt_from_its_own_graph(tmp_path):
    graph = {**TINY_ANCHOR_MODEL, "ch": 3, "yaml_file": "/x/small.yaml"}
    original = build_detector(TINY_ANCHOR_MODEL, 2, seed=3)
    detector, content = load_detector(
        save_module(tmp_path / "own.pt", original.model, {"opt": {"imgsz": 416}}, yaml=graph, names={0: "p", 1: "q"})
    )
    assert same_outputs(original, detector)
    assert (detector.spec["name"], detector.names, content["imgsz"]) == ("small", ("p", "q"), 416)
    unknown = {**graph, "backbone": [[-1, 1, "GhostConv", [8]], *graph["backbone"][1:]]}
    path = save_module(tmp_path / "ghost.pt", original.model, yaml=unknown)
    with refused("ghost.pt: its tensors match no known model (...); its stored graph: small: ...module 'GhostConv'..."):
        load_detector(path)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1)])
def test_the_activation_is_read_from_the_module(tmp_path, activation):
    """Shapes do not determine it: a model with the default activation would fit but give wrong detections."""
    original = build_detector({**TINY_MODEL, "activation": repr(activation)}, 2, seed=3)
    detector, _ = load_detector(save_module(tmp_path / "act.pt", original.model, yaml=TINY_MODEL))
    assert same_outputs(original, detector)
    assert not same_outputs(original, build_detector(TINY_MODEL, 2, seed=3), 1e-6)
    original.model[0].act = nn.SiLU()
    with refused("mixed.pt: its convolutions have different activations (...)"):
        load_detector(save_module(tmp_path / "mixed.pt", original.model, yaml=TINY_MODEL))
    for module in original.modules():
        if hasattr(module, "act"):
            module.act = nn.Softplus()
    with refused("soft.pt: ...unknown activation 'nn.Softplus()'..."):
        load_detector(save_module(tmp_path / "soft.pt", original.model, yaml=TINY_MODEL))


def test_strides_that_do_not_match_the_model_are_refused(tmp_path):
    layers = build_detector(TINY_MODEL, 2).model
    path = save_module(tmp_path / "strides.pt", layers, yaml=TINY_MODEL, stride=torch.tensor([4.0, 8.0, 16.0]))
    with refused(
        "strides.pt: its weights do not match its model (strides: the model has [8, 16, 32], the file [4, 8, 16])"
    ):
        load_detector(path)


def test_eighty_classes_without_names_get_cocos_names(tmp_path, caplog):
    torch.save(build_detector("yolov5n", 80, seed=1).state_dict(), tmp_path / "bare.pt")
    with caplog.at_level("INFO", logger="lockstep"):
        detector, content = load_detector(tmp_path / "bare.pt")
    assert detector.names[:2] == ("person", "bicycle")
    assert content["names"] == list(detector.names)
    assert "80 classes are assumed to be COCO's" in caplog.text
    target = build_detector("yolov5n", 2, names=["zebra", "cell"], seed=2)
    report = transfer_weights(target, tmp_path / "bare.pt")
    assert report.classes == ("zebra",)


def test_safetensors_of_other_programs_are_recognized(tmp_path):
    original = build_detector("yolov8n", 3, seed=1)
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in original.state_dict().items()}
    write_safetensors(tmp_path / "x.safetensors", tensors, {})
    detector, content = load_detector(tmp_path / "x.safetensors")
    assert (detector.spec["name"], detector.num_classes, content["imgsz"]) == ("yolov8n", 3, 640)
    assert all(t.dtype != torch.float16 for t in detector.state_dict().values())
