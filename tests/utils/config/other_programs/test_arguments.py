"""What arguments of Ultralytics mean here."""

from __future__ import annotations

import itertools
import shlex

import pytest

from utils.config.flags import words_of_settings
from utils.config.other_programs.arguments import translate_argument


def flags_of_argument(command: str, name: str, value: str) -> list[str]:
    translation = translate_argument(command, name, value)
    assert translation is not None, "unknown"
    assert not translation.refusal, translation.refusal
    return words_of_settings(translation.settings)


def refusal_of(command: str, name: str, value: str) -> str:
    translation = translate_argument(command, name, value)
    assert translation is not None, "unknown"
    assert not translation.settings
    return translation.refusal


@pytest.mark.parametrize(
    ("command", "keywords", "flags"),
    [
        ("train", {"batch": 0.7}, "--batch-size -1"),
        ("train", {"lr0": 0.01, "lr": 0.1}, "--set lr0=0.01 --set lr0=0.1"),
        ("train", {"plots": False, "cos_lr": True, "cache": True}, "--noplots --cos-lr --cache ram"),
        ("train", {"val": False, "cache": "disk", "rect": False, "optimizer": "sgd"},
         "--val-every 0 --cache disk --optimizer SGD"),
        ("train", {"device": [0, 1], "freeze": [0, 1]}, "--device 0,1 --freeze 0 1"),
        ("train", {"freeze": [3], "imgsz": [640, 480]}, "--freeze 3 3 --imgsz 640"),
        ("train", {"freeze": 3, "nbs": 64, "device": None, "classes": []}, "--freeze 3 --nominal-batch 64"),
        ("train", {"classes": "0,2", "fraction": 0.5}, "--classes 0 2 --fraction 0.5"),
        ("train", {"copy_paste": 0, "erasing": 0.4, "iou": 0.7, "verbose": True}, ""),
        ("train", {"save_period": -1, "amp": True}, "--save-period 0 --amp auto"),
        ("val", {"split": "test", "half": True, "rect": False}, "--task test --amp fp16 --no-rect"),
        ("val", {"augment": True, "plots": True}, "--tta"),
        ("detect", {"show_labels": False, "line_width": 2, "classes": [0, 2], "save": False},
         "--hide-labels --line-thickness 2 --classes 0 2 --nosave"),
        ("detect", {"tracker": "botsort.yaml", "persist": True}, "--track botsort"),
        ("export", {"half": True, "device": "cpu", "simplify": True, "imgsz": (640, 480)}, "--half --imgsz 640 480"),
        ("export", {"end2end": False}, "--nms"),
    ],
)  # fmt: skip
def test_arguments_of_ultralytics_become_flags(command: str, keywords: dict[str, object], flags: str):
    found = [flags_of_argument(command, key, str(value)) for key, value in keywords.items()]
    assert shlex.join(itertools.chain(*found)) == flags


@pytest.mark.parametrize(
    ("command", "key", "value", "reason"),
    [
        ("train", "copy_paste", "0.1", "there is no such augmentation; configs/hyp/scratch.yaml lists all"),
        ("train", "tracker", "bytetrack.yaml", "objects are tracked by detect.py --track"),
        ("detect", "tracker", "mine.yaml", "objects are tracked by detect.py --track"),
        ("train", "split", "test", "'train' and 'val' of the data set's YAML are used"),
        ("train", "name", "a\nb", "its value is empty or has several lines"),
        ("detect", "data", "b", "the checkpoint contains the class names"),
        ("export", "format", "engine", "trtexec --onnx=best.onnx"),
    ],
)
def test_arguments_without_an_equivalent_are_refused_with_the_reason(command: str, key: str, value: str, reason: str):
    assert refusal_of(command, key, value).startswith(reason)


@pytest.mark.parametrize("name", ["epochs_", "weights_", "from_", "_epochs", "Epochs"])
def test_only_exact_names_are_arguments(name):
    """Only a name that Python reserves, such as ``from``, has an underscore for it."""
    assert translate_argument("train", name, "3") is None


@pytest.mark.parametrize("argument", ["noval=1", "noval=0", "adam=SGD", "cache_images=disk"])
def test_an_argument_that_stands_for_a_value_takes_no_other(argument):
    """``noval=1`` was ``--val-every 1``, the opposite."""
    assert refusal_of("train", *argument.split("=")) == "must be true or false"


@pytest.mark.parametrize(
    ("argument", "flags"),
    [
        ("erasing=0.4", ""),
        ("plots=False", "--noplots"),
        ("pretrained=True", ""),
        ("device=None", ""),
        ("lr=0.1", "--set lr0=0.1"),
        ("half=False", ""),
        ("verbose=True", ""),
        ("adam=True", "--optimizer Adam"),
        ("adam=False", ""),
        ("cache=True", "--cache ram"),
        ("cache=False", "--cache none"),
        ("cos_lr=True", "--cos-lr"),
        ("cos_lr=False", ""),
        ("batch=16", "--batch-size 16"),
    ],
)
def test_each_kind_of_argument_becomes_flags(argument, flags):
    assert shlex.join(flags_of_argument("train", *argument.split("="))) == flags


@pytest.mark.parametrize(
    ("command", "argument", "reason"),
    [
        ("train", "name=", "its value is empty or has several lines"),
        ("train", "half=True", "use --amp bf16 or --amp fp16; --amp auto uses bf16 if the device supports it"),
        ("train", "workers=True", "must not be true or false"),
        ("train", "cos_lr=2", "must be true or false"),
        ("val", "task=study", "validate with each --imgsz in turn"),
    ],
)
def test_each_kind_of_refusal_has_a_reason(command, argument, reason):
    assert refusal_of(command, *argument.split("=")) == reason
