"""Words of the yolo command are answered with the line to write."""

from __future__ import annotations

import shlex

import pytest

from tests.helpers.messages import refused
from tests.helpers.scripts import flag_error
from utils.config.commands import COMMANDS
from utils.config.parser import parse_config
from utils.config.search_settings import KfoldConfig
from utils.config.settings import DetectConfig, ExportConfig, TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig, ConvertConfig, ShardConfig
from utils.errors import UserError


@pytest.mark.parametrize(
    ("cls", "typed", "advice"),
    [
        (TrainConfig, "model=yolov8n.pt data=d.yaml epochs=3", "--weights yolov8n.pt --data d.yaml --epochs 3"),
        (TrainConfig, "detect train model=yolo11n.yaml lr0=0.1", "--model yolo11n.yaml --set lr0=0.1"),
        (TrainConfig, "plots=False pretrained=True device=[0,1]", "--noplots --device 0,1"),
        (TrainConfig, "--data d.yaml imgsz=320 --cos-lr batch=4", "--imgsz 320 --batch-size 4"),
        (TrainConfig, "--classes 0 2 --rect cos_lr=True", "--cos-lr"),
        (TrainConfig, "--quiet imgsz=64 --noval batch=4 --local-rank 0 seed=1", "--imgsz 64 --batch-size 4 --seed 1"),
        (TrainConfig, "--task detect epochs=3", "--epochs 3"),
        (TrainConfig, "--save-period -1 --amp True epochs=3 --mode train batch=4", "--epochs 3 --batch-size 4"),
        (TrainConfig, "model=last.pt resume=True", "--resume last.pt"),
        (TrainConfig, "detect train resume model=last.pt epochs=30", "--resume last.pt --epochs 30"),
        (TrainConfig, "train resume", "--resume"),
        (TrainConfig, "cache=False", "--cache none"),
        (TrainConfig, "cache cos_lr", "--cache ram --cos-lr"),
        (TrainConfig, "'data=a b.yaml'", "--data 'a b.yaml'"),
        (TrainConfig, "model=-a.pt", "--weights=-a.pt"),
        (TrainConfig, "model=a.pt 'name=[a] b'", "--weights a.pt --name '[a] b'"),
        (KfoldConfig, "model=yolov8n data=d.yaml", "--weights yolov8n --data d.yaml"),
        (ValConfig, "val model=best.pt half=True", "--weights best.pt --amp fp16"),
        (DetectConfig, "predict model=a.pt source=b.jpg conf=0.3", "--weights a.pt --source b.jpg --conf-thres 0.3"),
        (DetectConfig, "track model=a.pt source=b.mp4", "--track botsort --weights a.pt --source b.mp4"),
        (
            DetectConfig,
            "track model=a.pt source=b.mp4 tracker=bytetrack.yaml persist=True",
            "--track bytetrack --weights a.pt --source b.mp4",
        ),
        (
            DetectConfig,
            "tracker=bytetrack.yaml mode=track model=a.pt source=b",
            "--track bytetrack --weights a.pt --source b",
        ),  # in any order
        (ExportConfig, "export model=best.pt format=onnx half=True", "--weights best.pt --format onnx --half"),
        (ExportConfig, "model=best.pt format=onnx end2end=False", "--weights best.pt --format onnx --nms"),
    ],
)
def test_words_of_the_yolo_command_are_answered_with_flags_that_work(cls: type, typed: str, advice: str):
    message = flag_error(cls, shlex.split(typed))
    assert message.startswith("error: ")
    assert message.endswith(f": settings are flags here; write {advice}\n")
    parse_config(cls, shlex.split(advice))


def test_a_line_for_another_command_ends_with_the_flags_that_were_typed():
    typed = "detect train --data d.yaml --epochs 3"
    line = f"{COMMANDS['train'].typed} --data d.yaml --epochs 3"
    assert flag_error(DetectConfig, typed.split()) == f"error: detect train: settings are flags here; write {line}\n"


@pytest.mark.parametrize(
    ("typed", "other", "rest"),
    [
        ("val --weights a.pt --source b.jpg", "val", "--weights a.pt (it has no --source)"),
        (
            "val --weights a.pt --conf 0.3 --save-txt --quiet",
            "val",
            "--weights a.pt --conf 0.3 (it has no --save-txt, --quiet)",
        ),
        ("train --weights a.pt --noval", "train", "--weights a.pt --noval"),
        ("train --plots False --val False --epochs 3", "train", "--plots False --val False --epochs 3"),
        ("train --half False --save False --save", "train", "--half False (it has no --save, --save)"),
        ("val --weights a.pt --end2end False", "val", "--weights a.pt --end2end False"),
    ],
)
def test_a_line_for_another_command_names_the_flags_that_it_does_not_have(typed, other, rest):
    """The advice contained ``--source``, which val.py refuses."""
    line = f"{COMMANDS[other].typed} {rest}"
    assert flag_error(DetectConfig, typed.split()) == f"error: {other}: settings are flags here; write {line}\n"
    parse_config(COMMANDS[other].settings, rest.partition(" (")[0].split())


@pytest.mark.parametrize(
    ("cls", "typed", "advice"),
    [
        (CheckConfig, "demo imgsz=320", "--imgsz 320"),
        (CheckConfig, "--imgsz 64 demo imgsz=320", "--imgsz 320"),
        (ShardConfig, "--megabytes 1 demo out split=val workers=2", "--split val --workers 2"),
        (ConvertConfig, "export out.json from=kitti", "--from kitti"),
    ],
)
def test_words_of_the_yolo_command_after_positional_arguments_are_answered(cls, typed, advice):
    """They were unrecognized arguments."""
    assert flag_error(cls, typed.split()).endswith(f": settings are flags here; write {advice}\n")


@pytest.mark.parametrize(
    ("cls", "typed", "other", "flags"),
    [
        (DetectConfig, "detect train data=d.yaml model=yolov8n.pt", "train", "--data d.yaml --weights yolov8n.pt"),
        (DetectConfig, "mode=val model=a.pt", "val", "--weights a.pt"),
        (TrainConfig, "predict model=a.pt source=b.jpg", "detect", "--weights a.pt --source b.jpg"),
        (TrainConfig, "track model=a.pt source=b.mp4", "detect", "--track botsort --weights a.pt --source b.mp4"),
        (ValConfig, "detect export model=a.pt format=onnx", "export", "--weights a.pt --format onnx"),
        (ExportConfig, "train", "train", ""),
    ],
)
def test_a_line_of_another_command_is_answered_with_that_command(cls, typed, other, flags):
    """``lockstep detect train ...``, which begins like Ultralytics' ``yolo detect train``, asked for a --source."""
    line = f"{COMMANDS[other].typed} {flags}".strip()
    assert flag_error(cls, typed.split()) == f"error: {typed}: settings are flags here; write {line}\n"
    parse_config(COMMANDS[other].settings, flags.split())


def test_the_checkpoint_of_the_advice_to_resume_is_the_run_that_resumes():
    """``--weights last.pt --resume`` was refused: a resumed run does not take other weights."""
    advice = flag_error(TrainConfig, ["model=runs/a/last.pt", "resume=True"]).split("write ")[1]
    config = parse_config(TrainConfig, advice.split())
    assert (config.resume, config.weights) == ("runs/a/last.pt", "")


@pytest.mark.parametrize(
    ("cls", "typed", "messages"),
    [
        (TrainConfig, "detect train", ["detect train: not needed here; leave this out"]),
        (TrainConfig, "a=1 y=2 c=3", ["a=1 y=2 c=3: settings are flags here; see docs/migration.md"]),
        (TrainConfig, "cfg=default.yaml", ["cfg=default.yaml: flags are not read from files"]),
        (TrainConfig, "model=yolov8n-seg.pt", ["model=yolov8n-seg.pt: there are no masks, only boxes; use yolov8n.pt"]),
        (
            ValConfig,
            "model=x.yaml",
            [
                "model=x.yaml: is not trained; --weights takes a checkpoint",
                "the following arguments are required: --weights",
            ],
        ),
        (
            TrainConfig,
            "epocs=3",
            ["epocs=3: settings are flags here (did you mean '--epochs'?); see docs/migration.md"],
        ),
        (
            DetectConfig,
            "mode=benchmark model=a.pt source=b",
            [
                "model=a.pt source=b: settings are flags here; write --weights a.pt --source b",
                "mode=benchmark: use --track to track objects; train, val and export are commands of their own; ...",
            ],
        ),
        (TrainConfig, "imgsz=", ["imgsz=: its value is empty or has several lines"]),
        (TrainConfig, "mode= agnostic_nms=", ["mode= agnostic_nms=: its value is empty or has several lines"]),
        (TrainConfig, "cfg=", ["cfg=: flags are not read from files"]),
        (
            TrainConfig,
            "epochs=many foo=1 bar=2 copy_paste=0.1",
            [
                "epochs=many: must be a whole number, got 'many'",
                "foo=1 bar=2: settings are flags here; see docs/migration.md",
                "copy_paste=0.1: there is no such augmentation; ...",
            ],
        ),
        (
            DetectConfig,
            "a.jpg b.jpg",
            [
                "a.jpg b.jpg: is not expected here; settings are flags (--help lists them)",
                "the following arguments are required: --weights, --source",
            ],
        ),
    ],
)
def test_words_of_the_yolo_command_without_an_equivalent_are_refused(cls: type, typed: str, messages: list[str]):
    with pytest.raises(UserError) as refusal:
        parse_config(cls, shlex.split(typed))
    parts = refusal.value.parts or (str(refusal.value),)
    assert len(parts) == len(messages)
    for part, message in zip(parts, messages):
        assert part == message or (message.endswith("...") and part.startswith(message[:-3]))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("optimizer=RMSProp", "optimizer=RMSProp: must be one of auto, SGD, ..., got 'RMSProp'"),
        ("imgsz=640,480", "imgsz=640,480: settings are flags here; write --imgsz 640"),
        ("a.pt", "a.pt: is not expected here; --weights takes checkpoints"),
        ("-5", "-5: is not expected here; settings are flags (--help lists them)"),
        ("epochs 3", "2 mistakes: (1) epochs: is not expected here (did you mean '--epochs'?); ..."),
        ("\N{EN DASH}epochs=3", "\N{EN DASH}epochs=3: begins with another dash; write --epochs=3"),
    ],
)
def test_the_advice_of_a_mistaken_word_is_what_the_parser_takes(typed, message):
    with refused(message):
        parse_config(TrainConfig, typed.split())
