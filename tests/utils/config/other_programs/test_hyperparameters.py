"""Hyper-parameter files of YOLOv5 and Ultralytics."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helpers.messages import refused
from utils.config.recipes import read_recipe, with_overrides
from utils.config.settings import Hyperparameters
from utils.errors import UserError

YOLOV5_HYPERPARAMETERS = {  # of hyp.scratch-low.yaml
    "lr0": 0.01, "lrf": 0.01, "momentum": 0.937, "weight_decay": 0.0005, "warmup_epochs": 3.0, "warmup_momentum": 0.8,
    "warmup_bias_lr": 0.1, "box": 0.05, "cls": 0.5, "cls_pw": 1.0, "obj": 1.0, "obj_pw": 1.0, "iou_t": 0.2,
    "anchor_t": 4.0, "fl_gamma": 0.0, "hsv_h": 0.015, "hsv_s": 0.7, "hsv_v": 0.4, "degrees": 0.0, "translate": 0.1,
    "scale": 0.5, "shear": 0.0, "perspective": 0.0, "flipud": 0.0, "fliplr": 0.5, "mosaic": 1.0, "mixup": 0.0,
    "copy_paste": 0.0,
}  # fmt: skip


def write(path: Path, values: dict) -> str:
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(path)


def mistakes_of(path: str) -> tuple[str, ...]:
    """Returns the mistakes in a recipe, without its path."""
    with pytest.raises(UserError) as caught:
        read_recipe(path, pretrained=False)
    return tuple(part.removeprefix(f"{path}: ") for part in caught.value.parts)


def test_a_recipe_of_yolov5_is_used_and_what_has_no_effect_is_named(tmp_path: Path):
    lines: list[str] = []
    hyp = read_recipe(write(tmp_path / "low.yaml", YOLOV5_HYPERPARAMETERS), pretrained=False, lines=lines)
    assert hyp == Hyperparameters(lr0=0.01, warmup_bias_lr=0.1)
    scale = "for YOLOv5's losses, which are divided differently"
    weights = "the losses have no positive weights"
    assert lines == [
        f"{tmp_path}/low.yaml: without effect here: box 0.05 ({scale}), cls 0.5 ({scale}), cls_pw 1.0 ({weights}), "
        f"obj 1.0 ({scale}), obj_pw 1.0 ({weights}), iou_t 0.2 (YOLOv5 does not use it either), "
        "fl_gamma 0.0 (there is no focal loss), copy_paste 0.0"
    ]


def test_a_recipe_names_all_lines_without_an_equivalent_at_once(tmp_path: Path):
    changed = {"cls": 0.3, "cls_pw": 0.5, "fl_gamma": 1.5, "copy_paste": 0.1, "anchors": 3, "lr": 0.1, "mosaik": None}
    flags = {"epochs": 100, "label_smoothing": 0.1, "nbs": 64}
    path = write(tmp_path / "high.yaml", YOLOV5_HYPERPARAMETERS | changed | flags | {7: 8})
    assert mistakes_of(path) == (
        "'cls': for YOLOv5's losses, which are divided differently; remove it",
        "'cls_pw': the losses have no positive weights; remove it",
        "'fl_gamma': there is no focal loss; remove it",
        "'copy_paste': there is no such augmentation; configs/hyp/scratch.yaml lists all, albumentations included; "
        "remove it",
        "'anchors': the model's YAML says how many anchors there are; remove it",
        "unknown key 'lr' (did you mean 'lr0'?)",
        "unknown key 'mosaik' (did you mean 'mosaic'?)",
        "'label_smoothing': is a flag, not a hyper-parameter; give it as --label-smoothing",
        "'nbs': is a flag, not a hyper-parameter; give it as --nominal-batch",
        "unknown key '7'",
    )


def test_unknown_keys_and_wrong_values_are_named_at_once(tmp_path: Path):
    path = write(tmp_path / "both.yaml", {"lr0": "x", "mozaic": 3})
    assert mistakes_of(path) == (
        "unknown key 'mozaic' (did you mean 'mosaic'?)",
        "lr0: must be a number or null, got 'x'",
    )
    with refused("(3) --set: mosaic: must be at most 1, got 2"):
        read_recipe(path, ["mosaic=2"], pretrained=False)
    many = write(tmp_path / "many.yaml", {f"x{number}": 1 for number in range(100)})
    with refused("...many.yaml: unknown key 'x9'...") as caught:
        read_recipe(many, pretrained=False)
    assert str(caught.value).startswith("the first 10 mistakes: ")


def test_arguments_that_ultralytics_writes_into_each_file_are_no_mistakes(tmp_path: Path):
    """Its args.yaml has them all."""
    lines: list[str] = []
    defaults = {"task": "detect", "mode": "train", "cfg": None, "resume": False, "tracker": "botsort.yaml"}
    hyp = read_recipe(write(tmp_path / "args.yaml", defaults | {"mosaic": 0.5}), pretrained=False, lines=lines)
    assert hyp == Hyperparameters(mosaic=0.5)
    shown = "task detect, mode train, cfg None, resume False, tracker botsort.yaml"
    assert lines == [f"{tmp_path}/args.yaml: without effect here: {shown}"]
    changed = {"cfg": "a.yaml", "tracker": "mine.yaml", "save_dir": "runs"}
    assert mistakes_of(write(tmp_path / "args.yaml", changed)) == (
        "'cfg': flags are not read from files; remove it",
        "'tracker': objects are tracked by detect.py --track, which takes bytetrack, botsort, cbiou, ocsort and sort, "
        "with their own settings; remove it",
        "'save_dir': use --project and --name; remove it",
    )


def test_gains_count_unless_the_recipe_is_yolov5s(tmp_path: Path):
    hyp = read_recipe(write(tmp_path / "own.yaml", {"box": 0.05, "cls": 0.3, "obj": 0.7}), pretrained=False)
    assert (hyp.box, hyp.cls, hyp.obj) == (0.05, 0.3, 0.7)
    with refused("tuned.yaml: 'cls_pw': is a flag, not a hyper-parameter; give it as --cls-pw"):
        read_recipe(write(tmp_path / "tuned.yaml", {"box": 7.1, "cls_pw": 1.0}), pretrained=False)
    assert read_recipe(write(tmp_path / "tuned.yaml", {"box": 7.1, "cls_pw": 0.0}), pretrained=False).box == 7.1


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("lr=0.1", "--set: unknown key 'lr' (did you mean 'lr0'?)"),
        ("cls_pw=1", "--set: 'cls_pw': is a flag, not a hyper-parameter; give it as --cls-pw"),
        ("obj_pw=1", "--set: 'obj_pw': the losses have no positive weights; remove it"),
        ("epochs=3", "--set: 'epochs': is a flag, not a hyper-parameter; give it as --epochs"),
        ("lr0=\udc80", "--set lr0=\\udc80: malformed YAML"),
    ],
)
def test_hyperparameters_that_do_not_exist(item: str, message: str):
    with refused(message):
        with_overrides(Hyperparameters(), [item])
