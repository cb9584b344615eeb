"""What users of YOLOv5 and Ultralytics type every day, and what it is here.

A setting with another name there has it as an alias (`utils.config.settings.setting`). Here are the switches that set
another setting, what is left out because it has no effect, and what is refused with what to write instead. Anything
else is unknown, and the error names the nearest of ours. `settings_of` decides this for hidden flags, for keywords of
Python, and for the words of the yolo command.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from utils.config.commands import COMMANDS, command_of
from utils.config.flags import words_of_settings
from utils.config.settings import Hyperparameters, TrainConfig, field_by_alias
from utils.config.values import checked_setting, plain_value
from utils.errors import Mistakes, UserError
from utils.schema import hints_of, parse_hint, suggestion, type_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# What true and false of a setting, or its flag alone, set here, in each command that has the settings on the right.
_SWITCHES: dict[str, dict[bool, dict[str, Any]]] = {
    "adam": {True: {"optimizer": "Adam"}, False: {}},
    "amp": {True: {"amp": "auto"}, False: {"amp": "off"}},
    "cache_images": {True: {"cache": "ram"}, False: {}},
    "half": {True: {"amp": "fp16"}, False: {}},
    "linear_lr": {True: {"cos_lr": False}, False: {}},
    "noautoanchor": {True: {"autoanchor": False}, False: {}},
    "noplots": {True: {"plots": False}, False: {}},
    "noval": {True: {"val_every": 0}, False: {}},
    "pretrained": {False: {}},
    "resume": {False: {}},
    "save": {True: {}, False: {"nosave": True}},
    "val": {True: {}, False: {"val_every": 0}},
}
# Flags and settings that are left out with this reason, by command.
_LEFT_OUT: dict[str, dict[str, str]] = {
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
        "override": "hyper-parameters are keywords, such as lr0=0.01",
        "persist": "leave it out: a track lasts as long as its video, stream or folder",
        "pretrained": "--weights names the weights to start from; without it a run starts from scratch",
        "resume": 'lockstep.resume(RUN) continues a run; lockstep.train(..., resume="auto") starts or continues one',
        "save_csv": "use --save-txt or --save-json",
        "save_dir": "use --project and --name",
        "save_hybrid": "labels are not mixed into detections; detect.py --save-txt writes detections as label files",
        "stream": "videos and streams are always read frame by frame",
        "wandb": "train.py --tracker wandb records a training",
        "visualize": "feature maps are not drawn; report.html shows the worst images",
    },
    "train": {
        "devices": "--spawn starts several processes, and --device names their GPUs",
        "nosave": "last.pt is always written, so that the run can be resumed",
        "save": "last.pt is always written, so that the run can be resumed",
    },
    "val": {
        "save_conf": "detect.py --save-txt --save-conf writes label files",
        "save_txt": "detect.py --save-txt writes label files; predictions.json has all detections",
    },
    "detect": {"augment": "val.py --tta scores several views; detection uses one"},
    "export": {"conf_thres": "--layout end2end has NMS in the graph; whoever runs the file filters by confidence"},
}
# Modes of the yolo command, and the command that each is here.
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
        "persist": _INSTEAD[""]["persist"],
        "stream": "model.stream(source) yields the results one by one",
    },
}


def settings_of(
    cls: type[DataclassInstance], name: str, value: Any, *, location: str = "", is_keyword: bool = False
) -> dict[str, Any]:
    """Returns the settings and hyper-parameters that a name and a value set, by our names, converted and checked.

    Args:
        cls: the settings of a command.
        name: ours, an alias, or a name of another program.
        value: any value of Python, or text. None sets what can be null, and nothing else.
        location: the name in messages, if it is another one.
        is_keyword: only keywords are known (`utils.config.settings.setting`).

    Raises UserError that begins with the name for an unknown one and a wrong value.
    """
    location = location or name
    plain = plain_value(location, value)
    command = command_of(cls).name
    switch = _switches(cls).get(name)
    if switch is not None and isinstance(plain, bool) and plain in switch:
        return switch[plain]
    fields = {**_hyperparameters(cls), **field_by_alias(cls)}
    if is_keyword:
        fields = {known: field for known, field in fields.items() if field.metadata["is_keyword"]}
    field = fields.get(name)
    if field is not None:
        owner = cls if field.name in cls.__dataclass_fields__ else Hyperparameters
        if plain is None and not parse_hint(hints_of(owner)[field.name]).is_optional:
            return {}
        return {field.name: checked_setting(owner, field.name, plain, location)}
    reason = _LEFT_OUT.get(command, {}).get(name)
    if reason:
        from utils.logger import log_when_configured  # imports logging, which --help does not need

        log_when_configured(f"{location}: {reason}; left out")
        return {}
    instead = _instead_of(command).get(name)
    raise UserError(f"{location}: {instead or f'unknown{suggestion(name, fields, 0.75)}'}")


def foreign_flags(cls: type[DataclassInstance]) -> list[str]:
    """Returns the names of other programs for which `settings_of` has an answer, as flags of a command."""
    command = command_of(cls).name
    switches = [name for name, switch in _switches(cls).items() if switch.get(True)]
    others = [*_hyperparameters(cls), *_LEFT_OUT.get(command, {}), *_instead_of(command)]
    return list(dict.fromkeys([*switches, *others]))


def _switches(cls: type[DataclassInstance]) -> dict[str, dict[bool, dict[str, Any]]]:
    """Returns the rows of `_SWITCHES` whose settings ``cls`` has."""
    names = cls.__dataclass_fields__.keys()
    return {name: switch for name, switch in _SWITCHES.items() if set().union(*switch.values()) <= names}


def _hyperparameters(cls: type) -> dict[str, dataclasses.Field]:
    """Returns the hyper-parameters of a command that trains, by their names and aliases."""
    return field_by_alias(Hyperparameters) if issubclass(cls, TrainConfig) else {}


def _instead_of(command: str) -> dict[str, str]:
    return {**_INSTEAD[""], **_INSTEAD.get(command, {})}


def switch_value(text: str) -> Any:
    """Returns the value of a word that is true, false or none, and other words unchanged."""
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def yolo_answer(command: str, words: Sequence[str]) -> str:
    """Returns the answer to a line of the yolo command, such as ``train model=yolov8n.pt epochs=3`` or ``resume
    model=last.pt``: the command line to type, and the settings that it leaves out. Our own flags at its end stay as
    they are. Returns "" for other lines."""
    first = words[0] if words else ""
    is_answered = first in (*MODES, "detect", "resume") or re.match(r"[a-z][a-z0-9_]*=", first)
    if not is_answered or command not in MODES.values():
        return ""
    num_settings = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    settings = [word.removeprefix("mode=") for word in words[:num_settings]]
    mode = next((word for word in settings if word in MODES), "")
    target = COMMANDS[MODES[mode] if mode else command]
    fields = field_by_alias(target.settings)
    is_scratch = "pretrained=false" in map(str.lower, settings)
    values: dict[str, Any] = {}
    mistakes = Mistakes()
    for word in settings:
        if word in (*MODES, "detect", "task=detect"):
            continue
        name, separator, text = word.partition("=")
        if name == "model" and not is_scratch and not text.endswith((".yaml", ".yml")):
            name = "weights"
        # There, nms puts NMS into the graph; here it chooses a head that needs NMS.
        if name == "nms" and "layout" in fields and text.lower() == "true":
            name, text = "layout", "end2end"
        is_text = name in fields and type_of(fields[name], target.settings) is str
        value = switch_value(text) if separator else True
        if name in fields and (text.startswith(("[", "(")) or ("," in text and not is_text)):
            value = [part.strip(" '\"") for part in text.strip("[]()").split(",")]
        with mistakes.collecting():
            values |= settings_of(target.settings, name, value)
    if values.get("resume") == "":  # resume model=last.pt
        values["resume"] = values.pop("weights", "")
    if mode == "track":
        values.setdefault("track", "botsort")
    line = shlex.join([*words_of_settings(values), *words[num_settings:]])
    message = f"the mode is the program here, and settings are flags; write {target.typed} {line}"
    return f"{message} (without {'; '.join(mistakes.messages)})" if mistakes else message


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
