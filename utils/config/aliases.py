"""What users of YOLOv5 and Ultralytics type every day, and what it is here.

A flag or setting of the same meaning is replaced, one without effect is left out, and others are refused with what to
write instead. Anything else is unknown, and the error names the nearest of ours. `utils.config.flags` makes hidden
flags of these tables, and `utils.config.parser` reads keywords by them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

# Settings and hyper-parameters with another name there, in each command that has the one on the right and not the one
# on the left. `setting` has the aliases that belong to one setting.
RENAMED = {"lr": "lr0", "model": "weights", "tracker": "track"}
# What a setting with this value, or a flag for True, sets here, in each command that has the settings on the right.
_SAME: dict[str, dict[str, Any]] = {
    "adam=True": {"optimizer": "Adam"},
    "amp=False": {"amp": "off"},
    "amp=True": {"amp": "auto"},
    "cache_images=True": {"cache": "ram"},
    "half=True": {"amp": "fp16"},
    "linear_lr=True": {"cos_lr": False},
    "noautoanchor=True": {"autoanchor": False},
    "noplots=True": {"plots": False},
    "noval=True": {"val_every": 0},
    "pretrained=False": {},
    "resume=False": {},
    "save=False": {"nosave": True},
    "val=False": {"val_every": 0},
}
# Flags and settings that are left out with this reason, by command.
LEFT_OUT: dict[str, dict[str, str]] = {
    "train": {"local_rank": "launchers set LOCAL_RANK"},
    "val": {"local_rank": "launchers set LOCAL_RANK", "verbose": "the scores of each class are always printed"},
    "detect": {"data": "the checkpoint contains the class names", "update": "checkpoints are read as they are"},
    "export": {
        "simplify": "graphs are always simplified",
        "device": "models are exported on the CPU",
        "inplace": "models are exported for inference",
    },
}
# What to do instead of giving a flag or a setting, in all commands ("") or in one.
_INSTEAD: dict[str, dict[str, str]] = {
    "": {
        "augment": "train.py augments as --hyp says; val.py --tta is test-time augmentation",
        "dnn": "ONNX files are run by ONNX Runtime",
        "evolve": "search hyper-parameters with python -m tools.search",
        "nosave": "last.pt is always written, so that the run can be resumed",
        "override": "hyper-parameters are keywords, such as lr0=0.01",
        "persist": "a track lasts as long as its video, stream or folder",
        "pretrained": "--weights names the weights to start from; without it a run starts from scratch",
        "resume": 'lockstep.resume(RUN) continues a run; lockstep.train(..., resume="auto") starts or continues one',
        "save": "last.pt is always written, so that the run can be resumed",
        "save_csv": "use --save-txt or --save-json",
        "save_dir": "use --project and --name",
        "save_hybrid": "labels are not mixed into detections; detect.py --save-txt writes detections as label files",
        "stream": "videos and streams are always read frame by frame",
        "visualize": "feature maps are not drawn; report.html shows the worst images",
    },
    "train": {"devices": "--spawn starts several processes, and --device names their GPUs"},
    "val": {
        "save_conf": "detect.py --save-txt --save-conf writes label files",
        "save_txt": "detect.py --save-txt writes label files; predictions.json has all detections",
    },
    "detect": {"augment": "val.py --tta scores several views; detection uses one"},
    "export": {"conf_thres": "--layout end2end has NMS in the graph; whoever runs the file filters by confidence"},
}
# Modes of the yolo command.
MODES = {"train": "train", "val": "val", "predict": "detect", "track": "detect", "export": "export"}
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
        "augment": _INSTEAD["detect"]["augment"],
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


def our_name(name: str, known: Collection[str]) -> str:
    """Returns our name of a setting or hyper-parameter that has another one in other programs, if it is ``known`` and
    the other is not."""
    ours = RENAMED.get(name, name)
    return ours if name not in known and ours in known else name


def same_settings(name: str, value: Any, known: Collection[str]) -> dict[str, Any] | None:
    """Returns our settings for a setting of another program with a value; None if there are none. A switch in the other
    position sets nothing. ``known``: the names of the command's settings."""
    same = _SAME.get(f"{name}={value}")
    if same is not None and same.keys() <= set(known):
        return same
    other = _SAME.get(f"{name}={not value}") if isinstance(value, bool) and name not in known else None
    return {} if other and other.keys() <= set(known) else None


def switches(known: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the flags of other programs, by the names of their settings, that set ours to values, and these.
    ``known``: the names of the command's settings."""
    for name in dict.fromkeys(key.partition("=")[0] for key in _SAME):
        same = same_settings(name, True, known)
        if same is not None:
            yield name, same


def instead_of(command: str) -> dict[str, str]:
    """Returns what to do instead of giving a flag or a setting in ``command``, by its name."""
    return {**_INSTEAD[""], **_INSTEAD.get(command, {})}


def mode_command(word: str) -> str:
    """Returns the command for a mode of the yolo command, or ""."""
    return MODES.get(word, "")


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
