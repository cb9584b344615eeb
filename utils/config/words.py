"""Words of YOLOv5 and Ultralytics: what each sets here, or what to write instead.

Any other word is unknown, and the error names the nearest of ours. docs/migration.md shows both programs side by side.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from utils.errors import UserError


class Sets(NamedTuple):
    """The setting of ours that a word without a value sets, and to which value."""

    name: str
    value: Any


LEFT_OUT = "left out: "  # begins the answer to a flag that has no effect and is not refused
_LOAD = 'lockstep.load("best.pt") is the model; lockstep.train, lockstep.val and lockstep.export are functions'
_CALL = "call it, model(images); model.stream(source) yields the results of folders, videos and streams"
_FLOAT16 = 'write lockstep.load(FILE, amp="fp16")'
_TRACKS = "leave it out: a track lasts as long as its video, stream or folder"
_ONE_VIEW = "val.py --tta scores several views; detection uses one"

# Other names of settings and hyper-parameters, in all commands ("flag") and in one. If a command has a setting of this
# name, that is meant.
ALIASES: dict[str, dict[str, str]] = {
    "flag": {
        "augment": "tta",
        "batch": "batch_size",
        "batch_size": "batch",
        "cfg": "model",
        "conf": "conf_thres",
        "img": "imgsz",
        "img_size": "imgsz",
        "include": "format",
        "iou": "iou_thres",
        "kfold": "folds",
        "line_width": "line_thickness",
        "lr": "lr0",
        "nbs": "nominal_batch",
        "set": "override",
        "show": "view_img",
        "split": "task",
        "tracker": "track",
    },
    "val": {"model": "weights"},
    "detect": {"model": "weights"},
    "export": {"model": "weights"},
}
# Other flags and keywords. "save=False" is one that is given as false; only such a word may be a setting's name, too.
ANSWERS: dict[str, dict[str, Sets | str]] = {
    "flag": {
        "adam": Sets("optimizer", "Adam"),
        "amp=True": Sets("amp", "auto"),
        "amp=False": Sets("amp", "off"),
        "augment": "train.py augments as --hyp says; val.py --tta is test-time augmentation",
        "cache_images": Sets("cache", "ram"),
        "dnn": "ONNX files are run by ONNX Runtime",
        "evolve": "search hyper-parameters with python -m tools.search",
        "half": Sets("amp", "fp16"),
        "linear_lr": Sets("cos_lr", False),
        "noautoanchor": Sets("autoanchor", False),
        "noplots": Sets("plots", False),
        "noval": Sets("val_every", 0),
        "override": "hyper-parameters are keywords, such as lr0=0.01",
        "persist": _TRACKS,
        "pretrained": "--weights names the weights to start from; without it a run starts from scratch",
        "resume": 'lockstep.resume(RUN) continues a run; lockstep.train(..., resume="auto") starts or continues one',
        "save_csv": "use --save-txt or --save-json",
        "save_dir": "use --project and --name",
        "save_hybrid": "labels are not mixed into detections; detect.py --save-txt writes detections as label files",
        "stream": "videos and streams are always read frame by frame",
        "val=False": Sets("val_every", 0),
        "visualize": "feature maps are not drawn; report.html shows the worst images",
        "wandb": "train.py --tracker wandb records a training",
    },
    "train": {
        "devices": "--spawn starts several processes, and --device names their GPUs",
        "local_rank": LEFT_OUT + "launchers set LOCAL_RANK",
        "nosave": "last.pt is always written, so that the run can be resumed",
        "save=False": "last.pt is always written, so that the run can be resumed",
    },
    "val": {
        "local_rank": LEFT_OUT + "launchers set LOCAL_RANK",
        "save_conf": "detect.py --save-txt --save-conf writes label files",
        "save_txt": "detect.py --save-txt writes label files; predictions.json has all detections",
        "verbose": LEFT_OUT + "the scores of each class are always printed",
    },
    "detect": {
        "augment": _ONE_VIEW,
        "data": LEFT_OUT + "the checkpoint contains the class names",
        "save=False": Sets("nosave", True),
        "update": LEFT_OUT + "checkpoints are read as they are",
    },
    "export": {
        "conf_thres": "--layout end2end has NMS in the graph; whoever runs the file filters by confidence",
        "device": LEFT_OUT + "models are exported on the CPU",
        "inplace": LEFT_OUT + "models are exported for inference",
        "simplify": LEFT_OUT + "graphs are always simplified",
    },
}
# Answers to the task in the name of a model, an export format, a name of the package, an attribute of a model or a
# result, and an argument of a call.
WORDS: dict[str, dict[str, str]] = {
    "task": {
        "seg": "there are no masks, only boxes",
        "pose": "there are no keypoints, only boxes",
        "obb": "there are no oriented boxes, only upright ones",
        "cls": "images are not classified, only objects are detected",
    },
    "format": {
        "engine": "export onnx, then trtexec --onnx=best.onnx --saveEngine=best.engine",
        "saved_model": "export onnx, then onnx2tf -i best.onnx",
        "tflite": "--format litert writes TFLite files",
        "coreml": "export pt2, then docs/export.md (Other formats)",
    },
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
        "half": _FLOAT16,
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
    "run": {
        **dict.fromkeys(("box", "results_dict"), 'write run.metrics, such as run.metrics["AP"]'),
        **dict.fromkeys(("maps", "summary"), "write run.class_metrics or run.to_df()"),
        "save_dir": "write run.folder",
        **dict.fromkeys(("predict", "names"), "run.load() is the model"),
        "val": "write lockstep.val(run.best, DATA)",
        "export": 'write lockstep.export(run.best, format="onnx")',
    },
    "argument": {
        "augment": _ONE_VIEW,
        "half": _FLOAT16,
        "persist": _TRACKS,
        "stream": "model.stream(source) yields the results one by one",
    },
}
# Keys of YOLOv5's files of hyper-parameters that do not exist here, or have another scale, with their usual values, or
# None for any value. A file with one of the first three is YOLOv5's.
ONLY_YOLOV5 = ("fl_gamma", "iou_t", "obj_pw")
YOLOV5_RECIPE: dict[str, float | None] = {
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
# Modes of the yolo command, and the command that each is here.
MODES = {"train": "train", "val": "val", "predict": "detect", "track": "detect", "export": "export"}


def one_side(value: Any, location: str) -> Any:
    """Returns the side of an image that is given by one number, or two. Raises UserError if these differ."""
    sides = value.split(",") if isinstance(value, str) else value
    if not isinstance(sides, list) or len(sides) != 2:
        return value
    if sides[0] != sides[1]:
        sizes = f"{sides[0]} {sides[1]}"
        raise UserError(f"{location} {sizes}: give the longer side alone; train.py --rect trains on rectangles")
    return sides[0]


def joined_devices(value: Any, _location: str) -> Any:
    """Returns a list of devices, ``[0, 1]``, as text."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def named_layers(value: Any, _location: str) -> Any:
    """Returns the setting ``freeze``: a number alone means all layers before it, so the list ``[3]``, which names one
    layer, becomes ``--freeze 3 3``."""
    return [value[0], value[0]] if isinstance(value, list) and len(value) == 1 else value


def tracker_name(value: Any, _location: str) -> Any:
    """Returns the name of an object tracker, which Ultralytics names by a file, ``botsort.yaml``."""
    return value.removesuffix(".yaml") if isinstance(value, str) else value


def attribute_error(kind: str, owner: str, name: str) -> AttributeError:
    """Returns the error for a missing attribute of ``owner``, such as "a model". ``kind``: of `WORDS`."""
    hint = WORDS[kind].get(name)
    return AttributeError(f"{owner} has no attribute {name!r}{f': {hint}' if hint else ''}", name=name)


def other_task(weights: str) -> str:
    """Returns a message that weights such as ``yolov8n-seg.pt`` are not a detector's, or "" for other names."""
    match = re.fullmatch(rf"(yolo\w+)-({'|'.join(WORDS['task'])})(\.pt|\.ya?ml)?", weights)
    return f"{weights}: {WORDS['task'][match[2]]}; use {match[1]}{match[3] or ''}" if match else ""
