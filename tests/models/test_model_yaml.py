"""The YAML of a model, its names and scales, and one line for each mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from models.detector import Detector, build_detector, build_on_meta
from models.spec import MODEL_FOLDER, load_spec
from tests.helpers.messages import refused
from utils.logger import configure_logging

TINY = """
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 2, C2f, [16, True]]
head:
  - [-1, 1, Conv, [16, 3, 2]]
  - [[2, 3], 1, Detect, [nc]]
"""


@pytest.fixture
def tiny(tmp_path: Path):
    """Writes a YAML of TINY with one change and builds it."""

    def build(old: str = "", new: str = "", num_classes: int = 3) -> Detector:
        assert old in TINY
        path = tmp_path / "mymodel.yaml"
        path.write_text(TINY.replace(old, new, 1))
        return build_detector(path, num_classes)

    return build


@pytest.mark.parametrize("model", ["yolox-nano", "yolox_nano", "yoloxnano.yaml", Path("yoloxnano.yaml")])
def test_built_in_models_have_the_expected_names(model: str | Path) -> None:
    assert load_spec(model).plain == load_spec("yoloxnano").plain


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
    assert sum(p.numel() for p in detector.parameters()) == 7_235_389


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
        "[x, 2, C2f": ": backbone layer 2 (from): element 1: must be a whole number, got 'x'",
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
        "[-1, 1, nn.Upsample, []]": ": backbone layer 2 (args): nn.Upsample needs a scale; write [None, 2]",
        "[-1, 1, nn.Upsample, [128]]": ": backbone layer 2 (args): nn.Upsample takes no size, which fits images of "
        "one size only; write [None, 2], not [128, None]",
        "[-1, 1, Conv, [16, 9999999999999999999, 2]]": "...the number does not fit in 64 bits",
    },
    "  - [[2, 3], 1, Detect, [nc]]\n": {"": ": head: the last layer must be a detection head, such as Detect"},
    "[[2, 3], 1, Detect": {"[[2, 3], 2, Detect": ": head layer 4 (repeats): Detect cannot be repeated, got 2"},
    "[nc]": {
        "[]": ": head layer 4 (args): Detect needs nc first, got []",
        "[true]": ": head layer 4 (args): Detect needs nc first, got [True]",
        "[nc, anchors]": ": head layer 4 (args): Detect needs anchors, but there is no top-level 'anchors'",
        "[nc, [[8, 4]]]": ": head layer 4 (args): 2 levels need 2 rows of anchors, got 1",
        "[nc, 'x']": ": head layer 4 (args): anchors: must be a whole number, got 'x'",
        "[nc, [[1, 2, 3], [1, 2]]]": ": head layer 4 (args): anchors: must be rows [w, h, w, h, ...] of "
        "equal length, got [[1, 2, 3], [1, 2]]",
        "[nc, [[a, b], [1, 2]]]": ": head layer 4 (args): anchors: element 1: element 1: must be a number, got 'a'",
        "[nc, 0]": ": head layer 4 (args): anchors: must be at least 1, got 0",
        "[nc, true]": ": head layer 4 (args): anchors: must be a whole number, got True",
    },
    "Detect, [nc]": {
        "YOLOXDetect, []": ": head layer 4 (args): YOLOXDetect needs nc first, got []",
        "YOLOXDetect, [nc]": ": head layer 4 (args): YOLOXDetect takes width, separable here: missing a "
        "required argument: 'width'",
        "YOLOXDetect, [nc, wide]": ": head layer 4 (args): YOLOXDetect: width: must be a whole number, got 'wide'",
        "YOLOXDetect, [nc, 0]": ": head layer 4 (args): YOLOXDetect: width: must be positive, got 0",
        "YOLOXDetect, [nc, 99999999999]": ": head layer 4 (args): YOLOXDetect: width: would be more than 65536",
        "YOLOXDetect, [nc, 16, 3]": ": head layer 4 (args): YOLOXDetect: separable: must be true or false, got 3",
    },
    "head:": {"head: {}\nnc:": ": head: must be a list, got {}"},
    "backbone:": {
        "backbones:": ": unknown key 'backbones' (did you mean 'backbone'?)",
        "backbone: [": ":3: did not find expected node content",
        "depth_multiple: deep\nbackbone:": ": depth_multiple: must be a number, got 'deep'",
        "depth_multiple: .inf\nbackbone:": ": depth_multiple: must be a finite number, got inf",
        "scales: [n]\nbackbone:": ": scales: must be 'key: value' lines or null, got ['n']",
        "scales: {n: [1]}\nbackbone:": ": scales: n: must be [depth, width, max_channels], got [1.0]",
        "anchors: [[1, 2, 3]]\nbackbone:": ": anchors: must be rows [w, h, w, h, ...] of equal length, got [[1, 2, 3]]",
        "activation: os.system('x')\nbackbone:": ": activation: unknown activation 'os.system('x')'; "
        "known: SiLU, ReLU, ReLU6, LeakyReLU, Hardswish, Mish, "
        "GELU, ELU, Identity",
        "ch: 0\nbackbone:": ": channels: must be at least 1, got 0",
        "reg_max: 257\nbackbone:": ": reg_max: must be at most 256, got 257",
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
