from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.helpers.messages import refused
from tests.helpers.scripts import flag_error
from utils.config.commands import COMMANDS
from utils.config.flags import flag_actions, flag_name, given_values, words_of_settings
from utils.config.other_programs import table as table_module
from utils.config.other_programs.arguments import translate_argument
from utils.config.other_programs.table import reason_for_refusal
from utils.config.parser import parse_config
from utils.config.recipes import read_recipe, with_overrides
from utils.config.search_settings import KfoldConfig
from utils.config.settings import HYPERPARAMETERS, DetectConfig, ExportConfig, Hyperparameters, TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig, ConvertConfig, ShardConfig
from utils.errors import Mistakes, UserError

ROOT = Path(__file__).parents[3]
YOLOV5_HYPERPARAMETERS = {  # of hyp.scratch-low.yaml
    "lr0": 0.01, "lrf": 0.01, "momentum": 0.937, "weight_decay": 0.0005, "warmup_epochs": 3.0, "warmup_momentum": 0.8,
    "warmup_bias_lr": 0.1, "box": 0.05, "cls": 0.5, "cls_pw": 1.0, "obj": 1.0, "obj_pw": 1.0, "iou_t": 0.2,
    "anchor_t": 4.0, "fl_gamma": 0.0, "hsv_h": 0.015, "hsv_s": 0.7, "hsv_v": 0.4, "degrees": 0.0, "translate": 0.1,
    "scale": 0.5, "shear": 0.0, "perspective": 0.0, "flipud": 0.0, "fliplr": 0.5, "mosaic": 1.0, "mixup": 0.0,
    "copy_paste": 0.0,
}  # fmt: skip


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


def test_the_table_names_only_flags_and_hyperparameters_that_exist():
    table = table_module.table()
    assert {*table.synonyms.values()} <= {*HYPERPARAMETERS}
    for command, translations in table.commands.items():
        own_flags = table_module.actions_of(command)
        replacements = [*translations.same_flags.values()]
        for flags_by_value in translations.arguments_to_flags.values():
            replacements += flags_by_value.values()
        assert {text.split()[0] for text in replacements} <= own_flags.keys(), command
        assert translations.refused_values.keys() <= own_flags.keys(), command
        assert not own_flags.keys() & {*translations.refused, *translations.without_effect, *translations.same_flags}


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


@pytest.mark.parametrize("command", ["train", "kfold", "search", "val", "detect", "export"])
def test_no_value_that_our_flag_takes_has_another_meaning_in_the_table(command):
    """Otherwise, the meaning would depend on whether another word of the line is in the table."""
    translations = table_module.table_of(command)
    cls = COMMANDS[command].settings
    listed = [*translations.default_arguments.items()]
    listed += [(name, value) for name, by_value in translations.arguments_to_flags.items() for value in by_value]
    for name, pattern in listed:
        action = flag_actions(cls).get(flag_name(name))
        if action is not None:
            assert action.nargs != 0, f"{name}: true and false are ours"
            value = pattern.replace(r"\d+", "7").replace("\\", "")
            mistakes = Mistakes()
            given_values(cls, [f"{flag_name(name)}={value}"], mistakes)
            assert any(flag_name(name) in message and value in message for message in mistakes.messages), name
    assert not any(flag_name(name) in flag_actions(cls) for name in translations.ignored_arguments)


@pytest.mark.parametrize("name", ["epochs_", "weights_", "from_", "_epochs", "Epochs"])
def test_only_exact_names_are_arguments(name):
    """``weights_`` used to mean ``weights``: only a name that Python reserves, such as ``from``, has an underscore for
    it."""
    assert translate_argument("train", name, "3") is None


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


def test_a_mode_does_not_replace_the_tracker_that_flags_name():
    typed = "--weights a.pt --source b.mp4 --track sort --mode track"
    reason = "use --track to track objects; the other modes are commands of their own"
    assert flag_error(DetectConfig, typed.split()) == f"error: --mode: {reason}\n"


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


@pytest.mark.parametrize("argument", ["noval=1", "noval=0", "adam=SGD", "cache_images=disk"])
def test_an_argument_that_stands_for_a_value_takes_no_other(argument):
    """``noval=1`` was ``--val-every 1``, the opposite."""
    assert refusal_of("train", *argument.split("=")) == "must be true or false"


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


PROGRAMS = {"train.py": TrainConfig, "val.py": ValConfig, "detect.py": DetectConfig, "export.py": ExportConfig}
REQUIRED = {"val.py": ["--weights=b"], "detect.py": ["--weights=b", "--source=c"], "export.py": ["--weights=b"]}


def rows_of_the_documentation() -> list[tuple[str, str, str]]:
    """The script, what is typed, and what docs/migration.md says of it."""
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
        ("export.py", "--weights yolov5s.pt --include onnx --simplify --device 0", ""),
    ],
)
def test_command_lines_of_yolov5_are_accepted_or_told_what_to_write(script: str, typed: str, line: str):
    assert re.fullmatch(f"error: {line}.*\n" if line else "", flag_error(PROGRAMS[script], shlex.split(typed)))


def test_command_lines_and_recipes_of_ours_do_not_read_the_table(monkeypatch: pytest.MonkeyPatch):
    table_module.table.cache_clear()
    monkeypatch.setattr(table_module, "CONFIGS", None)
    parse_config(TrainConfig, ["--img", "64", "--no-cos-lr", "--set", "lr0=0.1", "--freeze", "0", "1"])
    read_recipe("finetune", pretrained=True)


def test_a_word_after_a_translated_value_is_not_dropped():
    """``extra`` used to be dropped silently."""
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
    ("typed", "message"),
    [
        ("optimizer=RMSProp", "optimizer=RMSProp: must be one of auto, SGD, Adam, AdamW, Muon, got 'RMSProp'"),
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
    """Some used to be dropped silently, as in a file of Ultralytics, or were "unrecognized arguments: False"."""
    required = next(REQUIRED.get(script, []) for script, config in PROGRAMS.items() if config is cls)
    with refused(message):
        parse_config(cls, [*required, *typed.split()])


@pytest.mark.parametrize("typed", ["--freeze [3]", "--freeze=[3]"])
def test_a_list_of_ultralytics_is_the_words_of_our_flag(typed):
    assert parse_config(TrainConfig, typed.split()).freeze == [3, 3]
    assert parse_config(TrainConfig, ["--freeze=[0,1]"]).freeze == [0, 1]
    assert parse_config(ExportConfig, ["--weights=b", "--imgsz", "[640,480]"]).imgsz == [640, 480]


def write(path: Path, values: dict) -> str:
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(path)


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
    with refused(
        "high.yaml: 'cls': for YOLOv5's losses, which are divided differently; remove it; 'cls_pw': the "
        "losses have no positive weights; remove it; 'fl_gamma': there is no focal loss; remove it; "
        "'copy_paste': there is no such augmentation; configs/hyp/scratch.yaml lists all, albumentations "
        "included; remove it; 'anchors': the model's YAML says how many anchors there are; remove it; "
        "unknown key 'lr' (did you mean 'lr0'?); unknown key 'mosaik' (did you mean 'mosaic'?); "
        "'label_smoothing': is a flag, not a hyper-parameter; give it as --label-smoothing; 'nbs': is a "
        "flag, not a hyper-parameter; give it as --nominal-batch; unknown key '7'"
    ):
        read_recipe(path, pretrained=False)
    many = write(tmp_path / "many.yaml", {f"x{number}": 1 for number in range(100)})
    with pytest.raises(UserError, match=r"many\.yaml: unknown key 'x0'; .* \.\.\. .*unknown key 'x99'"):
        read_recipe(many, pretrained=False)


def test_arguments_that_ultralytics_writes_into_each_file_are_no_mistakes(tmp_path: Path):
    """Its args.yaml has them all; the advice used to be --cfg, and a --tracker that refuses botsort.yaml."""
    lines: list[str] = []
    defaults = {"task": "detect", "mode": "train", "cfg": None, "resume": False, "tracker": "botsort.yaml"}
    hyp = read_recipe(write(tmp_path / "args.yaml", defaults | {"mosaic": 0.5}), pretrained=False, lines=lines)
    assert hyp == Hyperparameters(mosaic=0.5)
    shown = "task detect, mode train, cfg None, resume False, tracker botsort.yaml"
    assert lines == [f"{tmp_path}/args.yaml: without effect here: {shown}"]
    changed = {"cfg": "a.yaml", "tracker": "mine.yaml", "save_dir": "runs"}
    with refused(
        "args.yaml: 'cfg': flags are not read from files; remove it; 'tracker': objects are tracked by detect.py "
        "--track, which takes bytetrack, botsort, cbiou, ocsort and sort, with their own settings; remove it; "
        "'save_dir': use --project and --name; remove it"
    ):
        read_recipe(write(tmp_path / "args.yaml", changed), pretrained=False)


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
