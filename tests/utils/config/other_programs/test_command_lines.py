"""Command lines of YOLOv5 and Ultralytics, and docs/migration.md, which lists them."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from tests.helpers.scripts import flag_error
from utils.config.flags import words_of_settings
from utils.config.other_programs.arguments import translate_argument
from utils.config.other_programs.table import reason_for_refusal
from utils.config.parser import parse_config
from utils.config.settings import DetectConfig, ExportConfig, TrainConfig, ValConfig


def test_a_mode_does_not_replace_the_tracker_that_flags_name():
    typed = "--weights a.pt --source b.mp4 --track sort --mode track"
    reason = "use --track to track objects; train, val and export are commands of their own; see docs/migration.md"
    assert flag_error(DetectConfig, typed.split()) == f"error: --mode: {reason}\n"


PROGRAMS = {"train.py": TrainConfig, "val.py": ValConfig, "detect.py": DetectConfig, "export.py": ExportConfig}


REQUIRED = {"val.py": ["--weights=b"], "detect.py": ["--weights=b", "--source=c"], "export.py": ["--weights=b"]}


def rows_of_the_documentation() -> list[tuple[str, str, str]]:
    """Returns the script, what is typed, and what docs/migration.md says of it."""
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").split("\n## Flags\n")[1].split("\n## ")[0]
    found = []
    for part in text.split("\n### ")[1:]:
        script, *lines = part.splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
        found += [(script, typed.strip("`"), here) for *cells, here in rows for typed in cells if typed]
    return found


@pytest.mark.parametrize(("script", "typed", "here"), rows_of_the_documentation())
def test_the_documentation_says_what_a_flag_becomes(script: str, typed: str, here: str):
    cls = PROGRAMS[script]
    required = REQUIRED.get(script, [])
    command = script.removesuffix(".py")
    is_flag = typed.startswith("--")
    text = ""
    become = typed.split()
    if is_flag:
        text = flag_error(cls, [*required, *become])
    elif typed.startswith(("model=", "pretrained=", "resume=")):  # which mean different flags by their values
        return
    else:
        translations = [translate_argument(command, *word.split("=", 1)) for word in typed.split()]
        text = "".join(translation.refusal for translation in translations)
        become = [word for translation in translations for word in words_of_settings(translation.settings)]
    if here.startswith("`"):
        ours = re.match("`(.*?)`", here)[1].split()
        assert text == ""
        assert parse_config(cls, [*required, *become]) == parse_config(cls, [*required, *ours])
    elif text:
        assert here in text
    elif is_flag:
        assert reason_for_refusal(command, become[0]).startswith(here.removeprefix("no effect: "))
    else:
        assert become == []


def test_the_documentation_names_many_flags_of_both_programs():
    typed = [typed for _, typed, _ in rows_of_the_documentation()]
    assert min(sum(t.startswith("--") for t in typed), sum("=" in t and t[0] != "-" for t in typed)) > 30


@pytest.mark.parametrize(
    ("script", "typed", "line"),
    [
        ("train.py", "--img 640 --batch 16 --epochs 3 --data coco128.yaml --weights yolov5s.pt", ""),
        ("train.py", "--data coco.yaml --epochs 300 --weights '' --cfg yolov5n.yaml --batch-size 128", ""),
        ("train.py", "--data coco128.yaml --weights yolov5s.pt --img 640 --freeze 10", ""),
        ("train.py", "--img 640 --rect --cache disk --noval --nosave", "--nosave: last.pt is always written"),
        ("train.py", "--batch 64 --data coco.yaml --weights yolov5s.pt --device 0,1 --sync-bn --exist-ok", ""),
        ("train.py", "--hyp hyp.scratch-low.yaml --multi-scale --image-weights --quad --label-smoothing 0.1", ""),
        ("train.py", "--epochs 10 --data coco128.yaml --cache --evolve", "--evolve: search hyper-parameters"),
        ("train.py", "--resume runs/train/exp/weights/last.pt", ""),
        ("val.py", "--weights yolov5x.pt --data coco.yaml --img 640 --half", ""),
        ("val.py", "--weights yolov5x.pt --data coco.yaml --img 832 --augment --half --iou 0.65 --verbose", ""),
        ("val.py", "--task speed --data coco.yaml --weights yolov5s.pt --batch 1", "--task speed: every validation"),
        ("detect.py", "--weights yolov5s.pt --source 0 --conf 0.25 --classes 0 2 --nosave --view-img", ""),
        ("export.py", "--weights yolov5s.pt --include torchscript onnx --imgsz 640 640 --dynamic", ""),
        ("export.py", "--weights a.pt --include onnx coreml --simplify", "--include coreml: docs/export.md"),
        ("export.py", "--weights a.pt --format tensorrt", "--format tensorrt: trtexec --onnx=best.onnx"),
        ("export.py", "--weights a.pt --format onnx,ENGINE", "--format ENGINE: trtexec --onnx=best.onnx"),
        ("export.py", "--weights yolov5s.pt --include onnx --simplify --device 0", ""),
    ],
)
def test_command_lines_of_yolov5_are_accepted_or_told_what_to_write(script: str, typed: str, line: str):
    assert re.fullmatch(f"error: {line}.*\n" if line else "", flag_error(PROGRAMS[script], shlex.split(typed)))


def test_a_word_after_a_translated_value_is_not_dropped():
    required = REQUIRED["detect.py"]
    assert parse_config(DetectConfig, [*required, "--tracker", "bytetrack.yaml"]).track == "bytetrack"
    assert "unrecognized arguments: extra (after --tracker bytetrack.yaml)" in flag_error(
        DetectConfig, [*required, "--tracker", "bytetrack.yaml", "extra"]
    )


@pytest.mark.parametrize(
    ("cls", "typed", "message"),
    [
        (DetectConfig, "--half --batch 4 8", "unrecognized arguments: 8 (after --batch 4)"),
        (DetectConfig, "--classes 0 --batch 4 8", "unrecognized arguments: 8 (after --batch 4)"),
        (ExportConfig, "--data coco.yaml --device 0 1", "unrecognized arguments: 1 (after --device 0)"),
        (TrainConfig, "--freeze 0 1 --quiet 2", "unrecognized arguments: 2 (after --quiet)"),
    ],
)
def test_words_after_a_dropped_flag_belong_to_no_other_flag(cls, typed, message):
    """The flag before was blamed for them, or took them: ``--classes 0 --batch 4 8`` also detected class 8."""
    required = next(REQUIRED.get(script, []) for script, config in PROGRAMS.items() if config is cls)
    with refused(message):
        parse_config(cls, [*required, *typed.split()])


@pytest.mark.parametrize(
    ("cls", "typed", "ours"),
    [
        (TrainConfig, "--save-period -1 --plots False --val False", "--save-period 0 --noplots --val-every 0"),
        (TrainConfig, "--batch 0.7 --amp False --half False --profile=False", "--batch-size -1 --amp off"),
        (TrainConfig, "--workspace None --auto_augment None --quiet False", ""),
        (ExportConfig, "--end2end True", ""),
        (ValConfig, "--half True --augment --split val", "--amp fp16 --tta --task val"),
        (ValConfig, "--half False --end2end False --amp True", "--nms --amp auto"),
        (DetectConfig, "--show True --save False --show-conf False --embed None", "--view-img --nosave --hide-conf"),
        (ExportConfig, "--simplify True --workspace None --verbose False --iou 0.5", "--iou-thres 0.5"),
    ],
)
def test_flags_with_the_values_of_arguments_are_these_arguments(cls, typed, ours):
    required = next(REQUIRED.get(script, []) for script, config in PROGRAMS.items() if config is cls)
    assert parse_config(cls, [*required, *typed.split()]) == parse_config(cls, [*required, *ours.split()])


@pytest.mark.parametrize(
    ("cls", "typed", "message"),
    [
        (TrainConfig, "--save False", "--save False: checkpoints are always written"),
        (ExportConfig, "--simplify=False", "--simplify False: graphs are always simplified"),
        (TrainConfig, "--format onnx", "unrecognized arguments: --format onnx"),
        (TrainConfig, "--angle 3", "unrecognized arguments: --angle 3"),
        (TrainConfig, "--erasing 0.4", "--erasing: there is no such augmentation; ..."),
        (TrainConfig, "--auto_augment randaugment", "--auto-augment: there is no such augmentation; ..."),
        (TrainConfig, "--pretrained False", "--pretrained: use --weights to name the weights to start from; ..."),
    ],
)
def test_flags_that_ask_for_something_else_are_refused_with_the_reason(cls, typed, message):
    required = next(REQUIRED.get(script, []) for script, config in PROGRAMS.items() if config is cls)
    with refused(message):
        parse_config(cls, [*required, *typed.split()])


@pytest.mark.parametrize(
    ("typed", "name", "value", "line"),
    [
        ("--freeze [3]", "freeze", [3, 3], "--freeze [3]: freezes layer 3 only, not the layers before it"),
        ("--freeze=[3]", "freeze", [3, 3], "--freeze [3]: freezes layer 3 only, not the layers before it"),
        ("--freeze=[0,1]", "freeze", [0, 1], ""),
        ("--freeze 0,1", "freeze", [0, 1], ""),
        ("--imgsz 640,1280", "imgsz", 1280, "--imgsz 640,1280: used as 1280, the larger side"),
        ("--export onnx,PT2", "export", ["onnx", "pt2"], ""),
        ("--export onnx PT2", "export", ["onnx", "pt2"], ""),
        ("--optimizer sgd", "optimizer", "SGD", ""),
        ("--classes cat,dog --quiet", "classes", ["cat,dog"], "--quiet: there is one level of detail"),
    ],
)
def test_a_list_in_one_word_is_the_words_of_our_flag(typed, name, value, line, monkeypatch):
    """``--freeze 0,1`` was refused, although the keyword ``freeze="0,1"`` was not."""
    lines: list[str] = []
    monkeypatch.setattr("utils.logger.log_when_configured", lambda *logged: lines.extend(logged))
    assert getattr(parse_config(TrainConfig, typed.split()), name) == value
    assert lines == ([line] if line else [])


def test_a_list_is_the_height_and_width_of_an_export():
    assert parse_config(ExportConfig, ["--weights=b", "--imgsz", "[640,480]"]).imgsz == [640, 480]
