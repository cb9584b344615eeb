"""What users of YOLOv5 and Ultralytics type: it works, or is answered with what to write."""

from __future__ import annotations

import pytest

from utils.config.commands import COMMANDS
from utils.config.parser import parse_command, parse_config
from utils.config.settings import HYPERPARAMETERS, DetectConfig, ExportConfig, TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig
from utils.config.words import ALIASES, ANSWERS
from utils.errors import UserError


@pytest.mark.parametrize(
    ("cls", "line", "expected"),
    [
        (
            TrainConfig,
            "--img 640 --batch 16 --epochs 100 --data a.yaml --weights yolov5s.pt --device 0,1 --noval --adam --cache",
            TrainConfig(
                imgsz=640, batch_size=16, data="a.yaml", weights="yolov5s.pt", device="0,1", val_every=0,
                optimizer="Adam", cache="ram",
            ),
        ),
        (TrainConfig, "--cfg yolov5s.yaml --local_rank=0", TrainConfig(model="yolov5s.yaml")),
        (TrainConfig, "--img 640 640 --epochs 3", TrainConfig(imgsz=640, epochs=3)),  # colabtools#3464
        (
            ValConfig,
            "--model best.pt --data a.yaml --img 640 --half --task test --verbose",
            ValConfig(weights="best.pt", data="a.yaml", imgsz=640, amp="fp16", task="test"),
        ),
        (
            DetectConfig,
            "--weights best.pt --source b --data a.yaml --conf-thres 0.4 --save-txt --line-width=2",
            DetectConfig(weights="best.pt", source="b", conf_thres=0.4, save_txt=True, line_thickness=2),
        ),
        (
            DetectConfig,
            "--weights best.pt --source a.mp4 --tracker botsort.yaml",
            DetectConfig(weights="best.pt", source="a.mp4", track="botsort"),
        ),
        (
            ExportConfig,
            "--weights best.pt --include onnx openvino --simplify --device 0",
            ExportConfig(weights="best.pt", format=["onnx", "openvino"]),
        ),
        (CheckConfig, "--noplots a.yaml", CheckConfig(data="a.yaml", plots=False)),
        # A script whose variable is empty, --device $DEVICE --half, exported float32.
        (ExportConfig, "--weights best.pt --device --half", ExportConfig(weights="best.pt", half=True)),
    ],
)  # fmt: skip
def test_command_lines_of_yolov5_work(cls, line, expected):
    assert parse_config(cls, line.split()) == expected


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("train --data a.yaml", "train.py --data a.yaml"),
        ("resume model=path/last.pt", "train.py --resume= --weights path/last.pt"),
        ("data=a.yaml lr0=0.1 rect=True", "train.py --data a.yaml --set lr0=0.1 --rect"),
        ("val model=a.pt half=True plots=False", "val.py --weights a.pt --amp fp16 --no-plots"),
    ],
)
def test_a_line_of_the_yolo_command_is_answered_with_ours(line, ours):
    with pytest.raises(UserError) as error:
        parse_config(TrainConfig, line.split())
    assert str(error.value) == f"settings are flags: python {ours}; see docs/migration.md"


@pytest.mark.parametrize(
    ("cls", "line", "reason"),
    [
        (TrainConfig, "--evolve 300", "tools.search"),
        (TrainConfig, "--epohcs 3", "--epochs"),
        (TrainConfig, "--lr 0.001", "write --set lr0=0.001"),  # yolov5#12399
        (TrainConfig, "--export onnx engine", "trtexec"),
        (ValConfig, "--weights a --save-txt", "^--save-txt: detect.py --save-txt"),
        (DetectConfig, "--weights a --source b --augment", "^--augment: val.py --tta scores several views; detection"),
        (TrainConfig, "--imgsz 1280 640", "--rect"),  # ultralytics#13857
        (ExportConfig, "--weights a.pt --format engine", "trtexec"),
        (TrainConfig, "--save False", "^--save: last.pt is always written"),
    ],
)
def test_other_flags_say_what_to_do_instead(cls, line, reason):
    with pytest.raises(UserError, match=reason):
        parse_command(cls, line.split())


def test_every_word_of_the_tables_means_a_setting():
    """A word whose setting does not exist would be unknown."""
    fields = {name: set(command.settings.__dataclass_fields__) for name, command in COMMANDS.items()}
    fields["flag"] = set().union(*fields.values(), HYPERPARAMETERS)
    for command, words in ANSWERS.items():
        assert {answer.name for answer in words.values() if not isinstance(answer, str)} <= fields[command]
    for command, words in ALIASES.items():
        assert {*words.values()} <= fields[command]
