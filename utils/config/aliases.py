"""What users of YOLOv5 and Ultralytics type every day, and what it is here.

A flag of the same meaning is replaced (`our_flags`). A line of the yolo command, and names that Python programs use,
are refused with what to write instead. Anything else is unknown, and the error names the nearest of ours.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from utils.config.commands import COMMANDS
from utils.config.flags import flag_actions
from utils.config.settings import HYPERPARAMETERS
from utils.errors import UserError

# Flags, and words of the yolo command; they are replaced in each command that has the flag on the right and not the
# one on the left. `setting` has the aliases that differ in name only and belong to one setting.
_OURS = {
    "--noplots": "--no-plots",
    "--noautoanchor": "--no-autoanchor",
    "--noval": "--val-every 0",
    "--adam": "--optimizer Adam",
    "--linear-lr": "--no-cos-lr",
    "--cache-images": "--cache ram",
    "--half": "--amp fp16",
    "--tracker": "--track",
    "val=False": "--val-every 0",
    "amp=False": "--amp off",
    "amp=True": "--amp auto",
    "save=False": "--nosave",
    "nms=True": "--layout end2end",
}
# Flags that are left out with this reason; those with a value end with "=".
_LEFT_OUT: dict[str, dict[str, str]] = {
    "train": {"--local-rank=": "launchers set LOCAL_RANK"},
    "val": {"--local-rank=": "launchers set LOCAL_RANK"},
    "detect": {"--data=": "the checkpoint contains the class names"},
    "export": {
        "--simplify": "graphs are always simplified",
        "--device=": "models are exported on the CPU",
        "--inplace": "models are exported for inference",
    },
}
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
    "stream": "videos and streams are always read frame by frame",
    "visualize": "feature maps are not drawn; report.html shows the worst images",
}
# What makes a file of another format from one that export.py writes.
_FORMATS = {
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
    left_out = _LEFT_OUT.get(command, {})
    replaced: list[str] = []
    log_lines: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        flag, separator, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        ours = _OURS.get(flag, "").split()
        name = value if flag in ("--format", "--include") else word  # --format=engine, and further words of --format
        if command == "export" and name in _FORMATS:
            raise UserError(f"--format {name}: {_FORMATS[name]}")
        action = known.get(flag) or known.get(ours[0] if ours else "")
        if action is not None and action.dest == "track":  # botsort.yaml
            value = _tracker_name(value)
            remaining[:1] = map(_tracker_name, remaining[:1])
        if flag in known or not flag.startswith("--"):
            replaced.append(f"{flag}{separator}{value}")
            if flag in known and known[flag].dest == "imgsz" and known[flag].nargs is None:
                _merge_sides(flag, remaining)
        elif ours and ours[0] in known:
            replaced += [*ours[:-1], f"{ours[-1]}{separator}{value}"]
        elif flag in left_out or f"{flag}=" in left_out:
            if flag not in left_out and not separator:
                del remaining[:1]
            log_lines.append(f"{flag}: {left_out.get(flag) or left_out[f'{flag}=']}; left out")
        elif advice(flag):
            raise UserError(f"{flag}: {advice(flag)}")
        else:
            replaced.append(f"{flag}{separator}{value}")
    return replaced, log_lines


def _tracker_name(value: str) -> str:
    """Returns our name of a tracker, which Ultralytics calls by a file, ``botsort.yaml``."""
    return value.removesuffix(".yaml")


def _merge_sides(flag: str, words: list[str]) -> None:
    """Makes two equal numbers at the beginning of ``words`` one: YOLOv7 takes ``--img 640 640``."""
    if len(words) > 1 and words[1].isdecimal():
        if words[0] != words[1]:
            sides = " ".join(words[:2])
            raise UserError(f"{flag} {sides}: give the longer side alone; train.py --rect trains on rectangles")
        del words[0]


def advice(name: str) -> str:
    """Returns what to do instead of giving the flag or setting ``name``, or "" if the table lacks it."""
    return _INSTEAD.get(name.removeprefix("--").replace("-", "_"), "")


def is_yolo_line(command: str, words: Sequence[str]) -> bool:
    """Returns whether a command line begins like one of the yolo command: ``train model=yolov8n.pt epochs=3``."""
    is_first = words[:1] and (words[0] in (*_MODES, "detect") or re.match(r"[a-z][a-z0-9_]*=", words[0]))
    return bool(is_first) and command in _MODES.values()


def line_to_type(command: str, words: Sequence[str]) -> str:
    """Returns a message with the command line for a line of the yolo command, and the settings that it leaves out."""
    mode = next((word for word in words if word in _MODES), command)
    target = COMMANDS[_MODES.get(mode, mode)]
    flags: list[str] = []
    left_out: list[str] = []
    for word in words:
        key, separator, value = word.partition("=")
        if word in (*_MODES, "detect") or (key in ("mode", "task") and value in (*_MODES, "detect")):
            continue
        translated = _flag_of_setting(target.name, key, value) if separator else []
        flags += translated
        if not translated:
            left_out.append(f"{word}: {advice(key)}" if advice(key) else word)
    if mode == "track" and "--track" not in flags:
        flags += ["--track", "botsort"]
    message = f"settings are flags here; write {target.typed} {shlex.join(flags)}"
    return f"{message} (without {', '.join(left_out)})" if left_out else message


def _flag_of_setting(command: str, key: str, value: str) -> list[str]:
    """Returns the flag for a setting of the yolo command; [] if there is none with this meaning."""
    known = flag_actions(COMMANDS[command].settings)
    if key in HYPERPARAMETERS and "--set" in known:
        return ["--set", f"{key}={value}"]
    if key == "model" and not ("--model" in known and value.endswith((".yaml", ".yml"))):
        key = "weights"
    value = value.capitalize() if value.lower() in ("true", "false") else value
    flag = f"--no-{key}" if value == "False" else f"--{key}"
    flag = flag.replace("_", "-")
    words = _OURS.get(f"{key}={value}", "").split()
    if not words or words[0] not in known:
        words = [flag] if flag in known else _OURS.get(flag, flag).split()
    action = known.get(words[0])
    if action is None:
        return []
    if value in ("True", "False"):
        return words
    if action.dest == "track":
        return [*words, _tracker_name(value)]
    values = re.findall(r"[^\s,\[\]()]+", value) if action.nargs == "+" else [value.strip("[]()")]
    if action.dest == "freeze" and value.startswith("["):
        values = values * 2 if len(values) == 1 else values  # one number alone freezes all layers before it
    return [*words, *values]


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
