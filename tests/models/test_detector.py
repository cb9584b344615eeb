"""Model graphs, heads and their YAML: parameter counts, keys, geometry, determinism, and one line for each mistake."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from engine.assembly.starting_model import build_starting_model
from models.detector import Detector, build_detector, build_on_meta
from models.heads.base import DetectionHead
from models.layers.conv import Upsample
from models.layers.csp import Attention
from models.layers.gelan import ADown
from models.registry import ANCHOR_HEAD, REGISTRY, ModuleKind
from models.spec import MODEL_FOLDER, built_in_models, load_spec
from tests.helpers.messages import refused
from tests.helpers.tiny import TINY_MODEL, randomize_batch_norms
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging

PARAMETERS = {
    "yolov5": (1_872_157, 7_235_389, 21_190_557, 46_563_709, 86_749_405),
    "yolov8": (3_157_200, 11_166_560, 25_902_640, 43_691_520, 68_229_648),
    "yolo11": (2_624_080, 9_458_752, 20_114_688, 25_372_160, 56_966_176),
    "yolo26": (2_572_280, 10_009_784, 21_896_248, 26_299_704, 58_993_368),
}
COUNTS = {f"{family}{scale}": n for family, row in PARAMETERS.items() for scale, n in zip("nsmlx", row)}
COUNTS |= {"yolov9t": 2_128_720, "yolov9s": 7_318_368, "yolov9m": 20_216_160, "yolov9c": 25_590_912}
COUNTS |= {"yoloxnano": 912_159, "yoloxtiny": 5_055_855, "yoloxs": 8_968_255, "yoloxm": 25_326_495}
COUNTS |= {"yoloxl": 54_208_895, "yoloxx": 99_071_455}
NANO = ("yolov5n", "yolov8n", "yolo11n", "yoloxnano")

TINY = """
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 2, C2f, [16, True]]
head:
  - [-1, 1, Conv, [16, 3, 2]]
  - [[2, 3], 1, Detect, [nc]]
"""


@pytest.fixture(scope="module")
def nano() -> dict[str, Detector]:
    return {name: build_detector(name, 5, seed=1) for name in NANO}


@pytest.fixture
def tiny(tmp_path: Path):
    """Writes a YAML of TINY with one change and builds it."""

    def build(old: str = "", new: str = "", num_classes: int = 3) -> Detector:
        assert old in TINY
        path = tmp_path / "mymodel.yaml"
        path.write_text(TINY.replace(old, new, 1))
        return build_detector(path, num_classes)

    return build


def test_each_name_of_the_registry_is_a_class() -> None:
    entries = [*REGISTRY.values(), ANCHOR_HEAD]
    assert all(issubclass(entry.module, DetectionHead) == (entry.kind is ModuleKind.HEAD) for entry in entries)
    assert {entry.path.partition(".")[0] for entry in entries} == {"layers", "heads"}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_equal_the_published_ones(name: str) -> None:
    detector = build_on_meta(load_spec(name), 80)
    assert sum(p.numel() for p in detector.parameters()) == COUNTS[name]
    assert detector.strides == (8, 16, 32)


def test_every_built_in_model_has_a_tested_parameter_count() -> None:
    assert sorted(built_in_models()) == sorted(COUNTS)
    for path in MODEL_FOLDER.glob("*.yaml"):
        stated = re.findall(r"([\d,]+) parameters", path.read_text())
        assert {int(count.replace(",", "")) for count in stated} <= set(COUNTS.values()), path


@pytest.mark.parametrize("name", NANO)
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_model_runs_forward_and_backward(nano: dict[str, Detector], name: str, channels_last: bool) -> None:
    detector = copy.deepcopy(nano[name]).train()
    images = torch.rand(2, 3, 64, 96)
    if channels_last:
        detector = detector.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    raw = detector(images)
    channels = {"yolov5n": 3 * (5 + 5), "yoloxnano": 5 + 5}.get(name, 4 * 16 + 5)
    assert [tuple(x.shape) for x in raw] == [(2, channels, 64 // s, 96 // s) for s in (8, 16, 32)]
    if channels_last:
        assert all(x.is_contiguous(memory_format=torch.channels_last) for x in raw)
    sum(x.square().mean() for x in raw).backward()
    for key, parameter in detector.named_parameters():
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all(), key
            assert parameter.grad.abs().sum() > 0, key
        else:
            assert key.endswith("dfl.conv.weight")


@pytest.mark.parametrize("name", ["ADown", *(n for n in built_in_models() if n.endswith(("n", "t", "nano", "tiny")))])
def test_every_convolution_reads_dense_channels_last_maps(name: str) -> None:
    """Half of a map's channels is not a dense tensor: every convolution that reads it would copy it."""
    adown = name == "ADown"
    module, x = (ADown(8, 8), torch.rand(2, 8, 9, 7)) if adown else (build_detector(name, 2), torch.rand(2, 3, 64, 96))
    seen: dict[str, bool] = {}
    for name, conv in module.to(memory_format=torch.channels_last).named_modules():
        if isinstance(conv, nn.Conv2d):
            conv.register_forward_pre_hook(
                lambda _, x, name=name: seen.update({name: x[0].is_contiguous(memory_format=torch.channels_last)})
            )
    module(x.to(memory_format=torch.channels_last))
    assert len(seen) > 1
    assert [name for name, is_dense in seen.items() if not is_dense] == []


@pytest.mark.parametrize("name", NANO)
def test_an_empty_batch_gives_zero_gradients(nano: dict[str, Detector], name: str) -> None:
    detector = copy.deepcopy(nano[name]).train()
    before = {k: v.clone() for k, v in detector.named_buffers() if "running" in k}
    raw = detector(torch.zeros(0, 3, 64, 64))
    sum(x.sum() for x in raw).backward()
    assert all((p.grad == 0).all() for p in detector.parameters() if p.requires_grad)
    assert all(torch.equal(v, before[k]) for k, v in detector.named_buffers() if k in before)
    boxes, scores = detector.decode(raw)
    assert boxes.shape[0] == scores.shape[0] == 0
    assert boxes.shape[1] == scores.shape[1] > 0


@pytest.mark.parametrize("name", NANO)
def test_batch_of_images_equals_single_images(nano: dict[str, Detector], name: str) -> None:
    detector = nano[name].eval()
    images = torch.rand(3, 3, 64, 96)
    with torch.inference_mode():
        together = detector(images)
        apart = [torch.cat(level) for level in zip(*(detector(images[i : i + 1]) for i in range(3)))]
    for a, b in zip(together, apart):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("yolov5n", "yolo11n"))])
def test_the_whole_graph_compiles_in_one_piece(nano: dict[str, Detector], name: str) -> None:
    detector = (nano[name] if name else build_detector(TINY_MODEL, 2)).eval()
    images = torch.rand(1, 3, 64, 64)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return detector.decode(detector(x))

    with torch.no_grad():
        expected = run(images)
        boxes, scores = torch.compile(run, backend="eager", fullgraph=True)(images)
    torch.testing.assert_close(boxes, expected[0])
    torch.testing.assert_close(scores, expected[1])


def test_training_still_works_after_inference_mode(nano: dict[str, Detector]) -> None:
    detector = copy.deepcopy(nano["yolov8n"])
    images = torch.rand(1, 3, 96, 160)  # a new shape, so that its grid is created in inference mode
    with torch.inference_mode():
        detector.decode(detector(images))
    boxes, _ = detector.decode(detector(images.requires_grad_()))
    boxes.square().sum().backward()
    assert images.grad.isfinite().all()
    assert images.grad.any()


# Initialization


def test_initial_weights_depend_only_on_the_seed() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = build_detector("yolo11n", 3, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    torch.rand(5)
    again, other = (build_detector("yolo11n", 3, seed=s).state_dict() for s in (7, 8))
    assert all(torch.equal(v, again[k]) for k, v in first.items())
    key = "model.0.conv.weight"
    assert not torch.equal(first[key], other[key])
    assert 0.9 * 27**-0.5 < first[key].abs().max() <= 27**-0.5


def test_norms_dfl_and_head_biases_start_with_the_documented_values(nano: dict[str, Detector]) -> None:
    state = nano["yolov8n"].state_dict()
    assert (state["model.4.cv1.bn.running_mean"] == 0).all()
    assert (state["model.4.cv1.bn.running_var"] == 1).all()
    assert torch.equal(state["model.22.dfl.conv.weight"].flatten(), torch.arange(16.0))
    norms = [m for m in nano["yolov8n"].modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.03)}
    free = nano["yolo11n"].head
    anchor = nano["yolov5n"].head
    assert (free.cv2[0][-1].bias == 1).all()
    # 5 objects over 80x80 cells, divided evenly over 5 classes
    assert free.cv3[0][-1].bias.sigmoid().mean().item() == pytest.approx(5 / 5 / 6400, rel=1e-3)
    bias = anchor.m[2].bias.view(3, 10)
    assert (bias[:, :4] == 0).all()
    assert bias[:, 4].sigmoid().tolist() == pytest.approx([8 / 400 / (1 + 8 / 400)] * 3, rel=1e-4)


def test_the_spec_rebuilds_the_model(nano: dict[str, Detector]) -> None:
    for first in nano.values():
        assert yaml.safe_load(yaml.safe_dump(first.spec)) == first.spec
        again = build_detector(first.spec, 5, seed=1)
        assert again.spec == first.spec
        state = again.state_dict()
        assert all(torch.equal(v, state[k]) for k, v in first.state_dict().items())


# Geometry


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_anchor_decoding_equals_a_loop(nano: dict[str, Detector]) -> None:
    detector = nano["yolov5n"]
    raw = [torch.randn(1, 30, *hw) * 2 for hw in ((4, 2), (2, 1), (1, 1))]
    boxes, scores = detector.decode(raw)
    pixels = [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]]
    row = 0
    for level, stride, anchors in zip(raw, (8, 16, 32), pixels):
        for a in range(3):
            for gy in range(level.shape[2]):
                for gx in range(level.shape[3]):
                    v = [_sigmoid(t) for t in level[0, a * 10 : a * 10 + 10, gy, gx].double().tolist()]
                    cx, cy = (v[0] * 2 - 0.5 + gx) * stride, (v[1] * 2 - 0.5 + gy) * stride
                    w, h = (v[2] * 2) ** 2 * anchors[2 * a], (v[3] * 2) ** 2 * anchors[2 * a + 1]
                    expected = [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]
                    assert boxes[0, row].tolist() == pytest.approx(expected, abs=2e-3)
                    assert scores[0, row].tolist() == pytest.approx([v[4] * c for c in v[5:]], abs=1e-6)
                    row += 1
    assert row == boxes.shape[1]


@pytest.mark.parametrize("name", NANO)
def test_bfloat16_autocast_trains_and_decodes_in_float32(nano: dict[str, Detector], name: str) -> None:
    detector = copy.deepcopy(nano[name]).train()
    with torch.autocast("cpu", torch.bfloat16):
        raw = detector(torch.rand(1, 3, 64, 64).expand(2, -1, -1, -1))
        mixed = detector.decode(raw)
    assert all(x.dtype == torch.bfloat16 for x in raw)
    for a, b in zip(mixed, detector.decode([x.float() for x in raw])):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    sum(x.float().mean() for x in raw).backward()
    assert all(torch.isfinite(p.grad).all() for p in detector.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", NANO)
def test_fusing_does_not_change_the_outputs(nano: dict[str, Detector], name: str) -> None:
    detector = copy.deepcopy(nano[name]).train()
    randomize_batch_norms(detector)
    keys = list(detector.state_dict())
    fused = detector.fuse()
    images = torch.rand(1, 3, 64, 64)
    assert detector.training
    assert list(detector.state_dict()) == keys
    assert not fused.training
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    with torch.inference_mode():
        for a, b in zip(fused(images), detector.eval()(images)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        detector = detector.double()
        images = images.double()
        for a, b in zip(detector.fuse(one_to_one=None)(images), detector(images), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.10 imports it in any case")
def test_building_imports_no_compiler() -> None:
    """Python kernels of the meta device would import it, which takes more than a second."""
    code = """
import sys
from models.detector import build_detector
build_detector("yolov8n", 80)
assert not {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_attention_equals_the_papers_formula() -> None:
    """Compared with softmax(Q'K / sqrt d) in float64; channels are ordered by head, then q, k, v."""
    torch.manual_seed(0)
    attention = Attention(8, heads=2).double().eval()
    x = torch.randn(2, 8, 3, 5, dtype=torch.float64)
    parts = attention.qkv(x).reshape(2, 2, 2 + 2 + 4, 15)
    values = torch.zeros(2, 8, 15).double()
    mixed = torch.zeros(2, 8, 15).double()
    for image in range(2):
        for head in range(2):
            query, key, value = parts[image, head].split((2, 2, 4))
            weights = (query.T @ key / math.sqrt(2)).softmax(-1)  # (query cell, key cell)
            mixed[image, 4 * head : 4 * head + 4] = value @ weights.T
            values[image, 4 * head : 4 * head + 4] = value
    expected = attention.proj((mixed.view_as(x)) + attention.pe(values.view_as(x)))
    torch.testing.assert_close(attention(x), expected)


# Names and YAML


@pytest.mark.parametrize("model", ["yolox-nano", "yolox_nano", "yoloxnano.yaml", Path("yoloxnano.yaml")])
def test_built_in_models_have_the_expected_names(model: str | Path) -> None:
    assert load_spec(model).plain == load_spec("yoloxnano").plain


def test_unknown_models_and_wrong_numbers_of_classes_are_refused() -> None:
    for model, message in (
        (
            "yolv8n",
            "--model yolv8n: unknown model (did you mean 'yolov8n'?); known: yolo11n, yolo11s, yolo11m, "
            "yolo11l, yolo11x, yolo26n, yolo26s, yolo26m, yolo26l, yolo26x, yolov5n, yolov5s, yolov5m, "
            "yolov5l, yolov5x, yolov8n, yolov8s, yolov8m, yolov8l, yolov8x, yolov9c, yolov9m, yolov9s, "
            "yolov9t, yoloxtiny, yoloxs, yoloxm, yoloxl, yoloxx, yoloxnano, and YAML files",
        ),
        ("yolov8q", "--model yolov8q: unknown model (yolov8 has the sizes n, s, m, l, x); known: ..."),
        ("yolo1n", "--model yolo1n: unknown model; known: ..."),
        ("yolov12n", "--model yolov12n: unknown model; known: ..."),
        ("nowhere/my.yaml", "nowhere/my.yaml: no such file; built-in models have names like yolov8n"),
        ("yolov8n.pt", "--model yolov8n.pt: is a weights file; to start from it, use --weights yolov8n.pt"),
    ):
        with refused(message):
            build_detector(model, 3)
    for count, names, message in (
        (3, ["a", "b"], "2 class names for 3 classes"),
        (0, None, "a detector needs at least one class, got 0"),
    ):
        with refused(message):
            build_detector("yolov8n", count, names=names)


def test_a_built_in_model_is_found_in_another_programs_folder(capsys) -> None:
    configure_logging(True)
    assert load_spec("models/yolov5n.yaml").plain == load_spec("yolov5n").plain
    assert capsys.readouterr().out == "models/yolov5n.yaml: no such file; using the built-in model yolov5n\n"


def test_a_users_yaml_is_built(tiny) -> None:
    """`from` may be a number or a list of one, anchors a number or inline, and args lists."""
    detector = tiny()
    assert (detector.num_classes, detector.names, detector.stride) == (3, ("0", "1", "2"), 8)
    assert [x.shape[-1] for x in detector(torch.rand(2, 3, 32, 32))] == [8, 4]
    for old, new in (("[-1, 2, C2f", "[[-1], 2, C2f"), ("[[2, 3], 1, Detect", "[2, 1, Detect")):
        detector = tiny(old, new)
        assert len(detector(torch.rand(2, 3, 32, 32))) == len(detector.strides)
    counted = tiny("[nc]", "[nc, 2]")
    assert counted.head.anchors.shape == (2, 2, 2)
    assert torch.equal(counted.head.anchors[0], counted.head.anchors[1])  # in strides
    inline = tiny("[nc]", "[nc, [[8, 4], [16, 32]]]")
    assert inline.head.anchors.tolist() == [[[2.0, 1.0]], [[2.0, 4.0]]]
    assert [pool.kernel_size for pool in tiny("C2f, [16, True]", "SPP, [16, [3, 7]]").model[2][0].m] == [3, 7]
    detector = tiny("backbone:", "activation: nn.LeakyReLU(0.2)\nbackbone:")
    assert detector.model[0].act.negative_slope == detector.head.cv2[0][0].act.negative_slope == 0.2


def test_the_older_yaml_format_with_top_level_multiples_is_read() -> None:
    values = yaml.safe_load((MODEL_FOLDER / "yolov5.yaml").read_text())
    del values["scales"]
    values |= {"nc": 80, "depth_multiple": 0.33, "width_multiple": 0.5}
    detector = build_on_meta(load_spec(values), 80)
    assert sum(p.numel() for p in detector.parameters()) == COUNTS["yolov5s"]


def test_scale_comes_from_the_key_or_the_file_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "nc: 80\nscales:\n  n: [0.5, 0.5, 16]\n  s: [1.0, 2.0, 8]\n" + TINY
    widths = {}
    for name, extra in (("yolov9s", ""), ("mine", ""), ("other", "scale: s\n")):
        (tmp_path / f"{name}.yaml").write_text(extra + text)
        widths[name] = build_detector(tmp_path / f"{name}.yaml", 2).model[1].conv.out_channels
    assert widths == {"yolov9s": 16, "mine": 8, "other": 16}
    assert "mine.yaml: no scale chosen, building 'n'" in caplog.text
    (tmp_path / "bad.yaml").write_text("scale: q\n" + text)
    with refused("bad.yaml: scale: 'q' is not in scales (n, s)"):
        build_detector(tmp_path / "bad.yaml", 2)


MISTAKES = {
    "Conv, [8, 3, 2]": {
        "Cnov, [8, 3, 2]": ": backbone layer 0 (module): unknown module 'Cnov' (did you mean 'Conv'?); known: Conv, ..."
    },
    "[-1, 2, C2f": {
        "[5, 2, C2f": ": backbone layer 2 (from): 5 is not a layer before this one (0 to 1)",
        "[2, 2, C2f": ": backbone layer 2 (from): 2 is not a layer before this one (0 to 1)",
        "[-4, 2, C2f": ": backbone layer 2 (from): -4 is not a layer before this one (0 to 1)",
        "[x, 2, C2f": ": backbone layer 2 (from) (0): must be a whole number, got 'x'",
        "[[0, 1], 2, C2f": ": backbone layer 2 (from): C2f takes one layer, got 2",
        "[[], 2, C2f": ": backbone layer 2 (from): is empty; name at least one layer",
        "[-1, two, C2f": ": backbone layer 2 (repeats): must be a whole number, got 'two'",
    },
    "[16, True]": {
        "[16, True, 1, 0.5, 9]": ": backbone layer 2 (args): C2f takes shortcut, groups, expansion here: "
        "too many positional arguments",
        "[16, 3]": ": backbone layer 2 (args): C2f: shortcut: must be true or false, got 3",
        "[]": ": backbone layer 2 (args): output channels of C2f: must be a whole number, got None",
        "['16']": ": backbone layer 2 (args): output channels of C2f: must be a whole number, got '16'",
        "16": ": backbone layer 2 (args): must be a list, got 16",
        "[16, True, 5]": ": backbone layer 2 (args): C2f in_channels must be divisible by groups",
    },
    "[8, 3, 2]": {"[8, 0, 2]": ": backbone layer 0 (args): Conv: kernel: must be positive, got 0"},
    "[-1, 1, Conv, [16, 3, 2]]": {
        "just text": ": backbone layer 1: must be [from, repeats, module, args], got 'just text'",
        "[-1, 1, Conv]": ": backbone layer 1: must be [from, repeats, module, args], got [-1, 1, 'Conv']",
    },
    "C2f, [16, True]": {
        "C2PSA, [32]": ": backbone layer 2 (args): C2PSA needs equal input and output channels, got 16 and 32",
        "SPP, [16, [5, 0]]": ": backbone layer 2 (args): SPP does not fit its input: kernel size should be "
        "greater than zero, but got kH: 0 kW: 0",
    },
    "2, C2f, [16, True]": {
        "1, Detect, [nc]": ": backbone layer 2 (module): Detect must be the last layer, and the only head",
        "99999999999, Conv, [16, 3, 2]": ": backbone layer 2 (repeats): 99999999999 times depth 1 is more than 1000",
        "1, RepNCSPELAN4, [16, 16, 8, 9999]": ": has 10,003 layers, repeats included; at most 2,000 are possible",
        "1, Conv, [99999999999, 3, 2]": ": backbone layer 2 (args): output channels of Conv: would be more than 65536",
    },
    "[-1, 2, C2f, [16, True]]": {
        "[[0, 1], 1, Concat, [1]]": ": backbone layer 2 (from): Concat needs inputs of equal size, got "
        "layer 0: 8 channels, 1/2 size, layer 1: 16 channels, 1/4 size",
        "[[0, 1], 1, Add, []]": ": backbone layer 2 (from): Add needs inputs of equal shape, got layer 0: "
        "8 channels, 1/2 size, layer 1: 16 channels, 1/4 size",
        "[-1, 1, nn.Upsample, [None, 2, wavy]]": ": backbone layer 2 (args): nn.Upsample has no mode "
        "'wavy'; known: nearest, nearest-exact, bilinear, bicubic",
        "[-1, 1, nn.Upsample, []]": ": backbone layer 2 (args): nn.Upsample needs either size or scale; "
        "write None for the other",
        "[-1, 1, Conv, [16, 9999999999999999999, 2]]": ": the number does not fit in 64 bits",
    },
    "  - [[2, 3], 1, Detect, [nc]]\n": {"": ": head: the last layer must be a detection head, such as Detect"},
    "[[2, 3], 1, Detect": {"[[2, 3], 2, Detect": ": head layer 4 (repeats): Detect cannot be repeated, got 2"},
    "[nc]": {
        "[]": ": head layer 4 (args): Detect needs nc first, got []",
        "[nc, anchors]": ": head layer 4 (args): Detect needs anchors, but there is no top-level 'anchors'",
        "[nc, [[8, 4]]]": ": head layer 4 (args): 2 levels need 2 rows of anchors, got 1",
        "[nc, 'x']": ": head layer 4 (args): anchors: must be a whole number, got 'x'",
        "[nc, [[1, 2, 3], [1, 2]]]": ": head layer 4 (args): anchors: must be rows [w, h, w, h, ...] of "
        "equal length, got [[1, 2, 3], [1, 2]]",
        "[nc, [[a, b], [1, 2]]]": ": head layer 4 (args): anchors (0) (0): must be a number, got 'a'",
        "[nc, 0]": ": head layer 4 (args): anchors: must be at least 1, got 0",
        "[nc, true]": ": head layer 4 (args): anchors: must be a whole number, got True",
    },
    "Detect, [nc]": {
        "YOLOXDetect, []": ": head layer 4 (args): YOLOXDetect needs nc first, got []",
        "YOLOXDetect, [nc]": ": head layer 4 (args): YOLOXDetect takes width, separable here: missing a "
        "required argument: 'width'",
        "YOLOXDetect, [nc, wide]": ": head layer 4 (args): YOLOXDetect: width: must be a whole number, got 'wide'",
        "YOLOXDetect, [nc, 0]": ": head layer 4 (args): YOLOXDetect: width: must be positive, got 0",
        "YOLOXDetect, [nc, 16, 3]": ": head layer 4 (args): YOLOXDetect: separable: must be true or false, got 3",
    },
    "head:": {"head: {}\nnc:": ": head: must be a list, got {}"},
    "backbone:": {
        "backbones:": ": unknown key 'backbones' (did you mean 'backbone'?)",
        "backbone: [": ":3: expected the node content, but found '-'",
        "depth_multiple: deep\nbackbone:": ": depth_multiple: must be a number, got 'deep'",
        "depth_multiple: .inf\nbackbone:": ": depth_multiple: must be a finite number, got inf",
        "scales: [n]\nbackbone:": ": scales: must be 'key: value' lines or null, got ['n']",
        "scales: {n: [1]}\nbackbone:": ": scales: n: must be [depth, width, max_channels], got [1.0]",
        "anchors: [[1, 2, 3]]\nbackbone:": ": anchors: must be rows [w, h, w, h, ...] of equal length, got [[1, 2, 3]]",
        "activation: os.system('x')\nbackbone:": ": activation: unknown activation 'os.system('x')'; "
        "known: SiLU, ReLU, ReLU6, LeakyReLU, Hardswish, Mish, "
        "GELU, ELU, Identity",
        "ch: 0\nbackbone:": ": channels: must be at least 1, got 0",
        "end2end: 'yes'\nbackbone:": ": end2end: must be true or false, got 'yes'",
        "end2endd: true\nbackbone:": ": unknown key 'end2endd' (did you mean 'end2end'?)",
    },
}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [(old, new, message) for old, messages in MISTAKES.items() for new, message in messages.items()],
)
def test_mistakes_in_a_yaml_get_one_line(tiny, old: str, new: str, message: str) -> None:
    with refused(f"mymodel.yaml{message}"):
        tiny(old, new)


@pytest.mark.parametrize("size", [(3, 5), (1, 1)])
def test_nearest_upsampling_on_a_cpu_equals_torchs(size):
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    weight = torch.randn(2, 4, 2 * size[0], 2 * size[1])
    results = []
    for module in (Upsample(None, 2), torch.nn.Upsample(None, 2)):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        (out * weight).sum().backward()
        results.append((out.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_layers_without_parameters_are_nothing_to_train() -> None:
    config = TrainConfig(model="yolov8n", freeze=[layer for layer in range(23) if layer != 10])  # 10: Upsample
    with refused("--freeze 0 1 2 3 4 5 6 7 8 9 11 12 13 14 15 16 17 18 19 20 21 22: leaves no layer to train"):
        build_starting_model(DistributedContext.single(), config, ["a"], 3)
