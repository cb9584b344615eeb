"""What users of YOLOv5 and Ultralytics type every day, and what it is here.

A flag of the same meaning is replaced (`our_flags`). A line of the yolo command, and names that Python programs use,
are refused with what to write instead. Anything else is unknown, and the error names the nearest of ours.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from utils.config.commands import COMMANDS, Command
from utils.config.flags import flag_actions, words_of_settings
from utils.config.settings import HYPERPARAMETERS, field_by_alias
from utils.errors import UserError
from utils.schema import type_of

_TRAIN_FLAGS = {
    "--noplots": "--no-plots",
    "--noautoanchor": "--no-autoanchor",
    "--noval": "--val-every 0",
    "--adam": "--optimizer Adam",
    "--linear-lr": "--no-cos-lr",
    "--cache-images": "--cache ram",
}
# Flags by command, and ours. `Setting.aliases` has those that differ in name only and belong to one setting.
_FLAGS: dict[str, dict[str, str]] = {
    "train": _TRAIN_FLAGS,
    "kfold": _TRAIN_FLAGS,
    "search": _TRAIN_FLAGS,
    "val": {"--half": "--amp fp16", "--noplots": "--no-plots"},
    "detect": {"--half": "--amp fp16"},
    "check": {"--noplots": "--no-plots"},
}
# Flags that are left out with this reason; those with a value end with "=".
_WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "train": {"--local-rank=": "launchers set LOCAL_RANK"},
    "val": {"--local-rank=": "launchers set LOCAL_RANK"},
    "detect": {"--data=": "the checkpoint contains the class names"},
    "export": {
        "--simplify": "graphs are always simplified",
        "--device=": "models are exported on the CPU",
        "--inplace": "models are exported for inference",
    },
}
_SIZES = ("--img", "--imgsz", "--img-size")  # of which YOLOv5 and YOLOv7 take two
# What to do instead of giving a flag, or a setting of the yolo command.
_INSTEAD = {
    "augment": "train.py augments as --hyp says; val.py --tta is test-time augmentation",
    "dnn": "ONNX files are run by ONNX Runtime",
    "evolve": "search hyper-parameters with python -m tools.search",
    "resume": 'lockstep.resume(RUN) continues a run; lockstep.train(..., resume="auto") starts or continues one',
    "override": "hyper-parameters are keywords, such as lr0=0.01",
    "nosave": "last.pt is always written, so that the run can be resumed",
    "persist": "a track lasts as long as its video, stream or folder",
    "pretrained": "--weights names the weights to start from; without it a run starts from scratch",
    "save_csv": "use --save-txt or --save-json",
    "save_dir": "use --project and --name",
    "save_hybrid": "detect.py writes label files",
    "stream": "videos and streams are always read frame by frame",
    "upload_dataset": "nothing is uploaded; --tracker names services",
    "visualize": "feature maps are not drawn; report.html shows the worst images",
}
# What makes a file of another format from one that export.py writes.
OTHER_FORMATS = {
    "engine": "export onnx, then trtexec --onnx=best.onnx --saveEngine=best.engine",
    "saved_model": "export onnx, then onnx2tf -i best.onnx",
    "tflite": "--format litert writes TFLite files",
    "coreml": "export pt2, then docs/export.md (Other formats)",
}
_MODES = {"train": "train", "val": "val", "predict": "detect", "track": "detect", "export": "export"}
_TASKS = {
    "seg": "there are no masks, only boxes",
    "pose": "there are no keypoints, only boxes",
    "obb": "there are no oriented boxes, only upright ones",
    "cls": "images are not classified, only objects are detected",
}
# What to write instead of a name of the package, an attribute of a model or of a result, or an argument of a call.
_LOAD = 'lockstep.load("best.pt") is the model; lockstep.train, lockstep.val and lockstep.export are functions'
_CALL = "call it, model(images); model.stream(source) yields the results of folders, videos and streams"
_PYTHON = {
    "package": {"YOLO": _LOAD, "DetectMultiBackend": _LOAD, "predict": _LOAD, "detect": _LOAD},
    "model": {
        "predict": _CALL,
        "forward": _CALL,
        "train": "write lockstep.train(DATA, weights=FILE)",
        "val": "write lockstep.val(FILE, DATA)",
        "export": 'write lockstep.export(FILE, format="onnx")',
        **dict.fromkeys(
            ("conf", "iou", "classes", "agnostic", "max_det"),
            "give settings with each call, model(images, conf=0.4), or once, lockstep.load(FILE, conf=0.4)",
        ),
        "half": 'write lockstep.load(FILE, amp="fp16")',
        **dict.fromkeys(("to", "cuda", "cpu"), 'write lockstep.load(FILE, device="0")'),
        **dict.fromkeys(("eval", "fuse", "warmup"), "it is ready for inference when it is opened"),
    },
    "result": {
        "pandas": "write result.to_df()",
        **dict.fromkeys(("xyxy", "xywh", "xyxyn", "xywhn", "conf", "cls"), "write result.boxes.xyxy, .conf or .cls"),
        "pred": "write result.boxes.data",
        "render": "write result.plot()",
        "tojson": "write result.to_json()",
    },
    "argument": {
        "augment": "val.py --tta scores several views; detection uses one",
        "half": 'write lockstep.load(FILE, amp="fp16")',
        "stream": "model.stream(source) yields the results one by one",
    },
}
# Keys of YOLOv5's files of hyper-parameters that do not exist here, or have another scale, with their usual values. A
# file with one of the first three is YOLOv5's.
_ONLY_YOLOV5 = ("fl_gamma", "iou_t", "obj_pw")
_YOLOV5_HYPERPARAMETERS: dict[str, float | None] = {
    "fl_gamma": 0,
    "iou_t": None,
    "obj_pw": 1,
    "cls_pw": 1,
    "box": 0.05,
    "cls": 0.5,
    "obj": 1,
    "anchors": None,
    "copy_paste": 0,
}


def our_flags(command: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a command line with flags of other programs replaced by ours, and a log line for each flag
    that is left out because it has no effect. Raises UserError with what to do instead of a flag."""
    known = flag_actions(COMMANDS[command].settings)
    flags = _FLAGS.get(command, {})
    dropped = _WITHOUT_EFFECT.get(command, {})
    replaced: list[str] = []
    log_lines: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        flag, separator, value = word.partition("=")
        if flag.startswith("--") and flag not in known and (reason := advice(flag)):
            raise UserError(f"{flag}: {reason}")
        if flag in dropped or f"{flag}=" in dropped:
            if f"{flag}=" in dropped and not separator and remaining:
                remaining.pop(0)
            log_lines.append(f"{flag}: {dropped.get(flag) or dropped[f'{flag}=']}; left out")
        elif word in _SIZES and command != "export" and len(sides := remaining[:2]) == 2 and sides[1].isdecimal():
            if sides[0] != sides[1]:
                rect = "; train.py --rect trains on rectangles" if command == "train" else ""
                raise UserError(f"{word} {' '.join(sides)}: give the longer side of the images alone{rect}")
            replaced += [word, sides[0]]
            del remaining[:2]
        elif flag in flags:
            *first, last = flags[flag].split()
            replaced += [*first, f"{last}{separator}{value}"]
        else:
            replaced.append(word)
    return replaced, log_lines


def advice(name: str) -> str:
    """Returns what to do instead of giving the flag or setting ``name``, or "" if the table lacks it."""
    return _INSTEAD.get(name.removeprefix("--").replace("-", "_"), "")


def is_yolo_line(command: str, words: Sequence[str]) -> bool:
    """Returns whether a command line begins like one of the yolo command: ``train model=yolov8n.pt epochs=3``."""
    return command in _MODES.values() and bool(words) and (words[0] in (*_MODES, "detect") or _is_setting(words[0]))


def _is_setting(word: str) -> bool:
    return re.match(r"[a-z][a-z0-9_]*=", word) is not None


def line_to_type(command: str, words: Sequence[str]) -> str:
    """Returns a message with the command line for a line of the yolo command, and the settings that it leaves out."""
    mode = next((word for word in words if word in _MODES), command)
    target = COMMANDS[_MODES.get(mode, mode)]
    settings: dict[str, Any] = {}
    left_out: list[str] = []
    for word in words:
        key, separator, value = word.partition("=")
        if not separator:
            if word not in (*_MODES, "detect"):
                left_out.append(word)
        elif not _add_setting(target, settings, key, value):
            left_out.append(f"{word}: {advice(key)}" if advice(key) else word)
    if mode == "track":
        settings.setdefault("track", "botsort")
    message = f"settings are flags here; write {target.typed} {shlex.join(words_of_settings(settings))}"
    return f"{message} (without {', '.join(left_out)})" if left_out else message


def _add_setting(command: Command, settings: dict[str, Any], key: str, value: str) -> bool:
    """Adds a setting of the yolo command to ours. Returns False if there is none with this meaning."""
    fields = field_by_alias(command.settings)
    text = value.lower()
    translated: dict[str, Any] = {}
    if key in ("mode", "task") and value in (*_MODES, "detect"):
        return True
    if key == "model":
        translated = {"model" if value.endswith((".yaml", ".yml")) else "weights": value}
    elif key == "tracker":
        translated = {"track": value.removesuffix(".yaml")}
    elif key == "half" and "amp" in fields:
        translated = {"amp": "fp16"} if text == "true" else {}
    elif key == "amp":
        translated = {"amp": "auto" if text == "true" else "off"}
    elif key == "val" and text == "false":
        translated = {"val_every": 0}
    elif key == "save" and text == "false":
        translated = {"nosave": True}
    elif key == "nms" and command.name == "export":
        translated = {"layout": "end2end"} if text == "true" else {}
    elif key in HYPERPARAMETERS and "override" in fields:
        settings[key] = value
        return True
    else:
        if key not in fields:
            return False
        translated = {fields[key].name: _as_typed(fields[key], command.settings, value)}
    settings |= translated
    return translated.keys() <= fields.keys()


def _as_typed(field: dataclasses.Field, owner: type, value: str) -> Any:
    """Returns the value of a setting as `words_of_settings` takes it."""
    text = value.lower()
    if type_of(field, owner) is bool:
        return text == "true"
    if text == "true" and field.metadata["const"] is not None:
        return field.metadata["const"]
    parts = re.findall(r"[^\s,\[\]()]+", value)
    if field.name == "device":
        return ",".join(parts)
    is_list = len(parts) > 1 and str(type_of(field, owner)).startswith("list")
    return parts if is_list else value


def mode_command(word: str) -> str:
    """Returns the command for a mode of the yolo command, or ""."""
    return _MODES.get(word, "")


def python_hint(kind: str, name: str) -> str:
    """Returns what to write instead of ``name`` from the API of YOLOv5 or Ultralytics, or "" if the table lacks it.
    ``kind``: "package", "model", "result" or "argument"."""
    return _PYTHON[kind].get(name, "")


def attribute_error(kind: str, owner: str, name: str) -> AttributeError:
    """Returns the error for a missing attribute of ``owner``, such as "a model". ``kind``: see `python_hint`."""
    hint = python_hint(kind, name)
    return AttributeError(f"{owner} has no attribute {name!r}{': ' if hint else ''}{hint}", name=name)


def other_task(weights: str) -> str:
    """Returns a message that weights such as ``yolov8n-seg.pt`` are not a detector's, or "" for other names."""
    match = re.fullmatch(rf"(yolo\w+)-({'|'.join(_TASKS)})(\.pt|\.ya?ml)?", weights)
    return f"{weights}: {_TASKS[match[2]]}; use {match[1]}{match[3] or ''}" if match else ""


def split_recipe(values: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str], list[str]]:
    """Splits a file of hyper-parameters. Returns what exists here; the keys of YOLOv5 that are left out, because they
    do not exist or have another scale here, and have their usual values; and those that have other values."""
    if not any(key in values for key in _ONLY_YOLOV5):
        return dict(values), [], []
    other = [key for key in _YOLOV5_HYPERPARAMETERS if key in values]
    left_out = [key for key in other if _YOLOV5_HYPERPARAMETERS[key] in (None, values[key])]
    kept = {key: value for key, value in values.items() if key not in other}
    return kept, left_out, [key for key in other if key not in left_out]
