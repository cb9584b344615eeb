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


MISTAKES = {  # by the place that the line names: pairs of what is replaced in the YAML, and by what
    "unknown key": [("backbone:", "backbones:")],
    "scales: ": [("backbone:", "scales: {n: [1]}\nbackbone:")],
    "anchors: ": [("backbone:", "anchors: [[1, 2, 3]]\nbackbone:")],
    "activation: ": [("backbone:", "activation: os.system('x')\nbackbone:")],
    "reg_max: ": [("backbone:", "reg_max: 257\nbackbone:")],
    "backbone layer 0 (module)": [("Conv, [8", "Cnov, [8")],
    "backbone layer 0 (args)": [("[8, 3, 2]", "[8, 0, 2]")],
    "backbone layer 1: ": [("[-1, 1, Conv, [16, 3, 2]]", "just text")],
    "backbone layer 2 (module)": [("2, C2f, [16, True]", "1, Detect, [nc]")],
    "backbone layer 2 (from)": [
        ("[-1, 2, C2f", "[2, 2, C2f"),
        ("[-1, 2, C2f", "[[0, 1], 2, C2f"),
        ("[-1, 2, C2f, [16, True]]", "[[0, 1], 1, Concat, [1]]"),
    ],
    "backbone layer 2 (repeats)": [("[-1, 2, C2f", "[-1, two, C2f")],
    "backbone layer 2 (args)": [
        ("[16, True]", "[16, True, 1, 0.5, 9]"),
        ("C2f, [16, True]", "SPP, [16, [5, 0]]"),
        ("[-1, 2, C2f, [16, True]]", "[-1, 1, nn.Upsample, [128]]"),
    ],
    "head: ": [("  - [[2, 3], 1, Detect, [nc]]\n", "")],
    "head layer 4 (repeats)": [("[[2, 3], 1, Detect", "[[2, 3], 2, Detect")],
    "head layer 4 (args)": [
        ("[nc]", "[nc, anchors]"),
        ("[nc]", "[nc, [[8, 4]]]"),
        ("Detect, [nc]", "YOLOXDetect, [nc, 16, 3]"),
    ],
}


@pytest.mark.parametrize(
    ("place", "old", "new"), [(place, *change) for place, changes in MISTAKES.items() for change in changes]
)
def test_mistakes_in_a_yaml_get_one_line(tiny, place: str, old: str, new: str) -> None:
    with refused(f"mymodel.yaml: {place}..."):
        tiny(old, new)
