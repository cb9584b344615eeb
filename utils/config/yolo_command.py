"""Arguments of the ``yolo`` command of Ultralytics, and hyper-parameter files of YOLOv5 and Ultralytics.

`command_line` says what to write here instead of ``yolo detect train data=a.yaml epochs=3``; `recipe` leaves out what
has no effect here. Whatever has an effect and no equivalent is named, with the reason if one is known.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from utils.config.settings import WEIGHTS_SUFFIXES
from utils.config.yaml_files import suggestion
from utils.config.yolo_flags import SYNONYMS, conversion, is_harmless, reason, translated
from utils.errors import UserError
from utils.program import COMMANDS

_MODES = {"train": "train", "val": "val", "predict": "detect", "export": "export", "tune": "search"}
_OTHER_TASKS = {
    "segment": "there are no masks, only boxes",
    "pose": "there are no keypoints, only boxes",
    "obb": "there are no oriented boxes, only upright ones",
    "classify": "images are not classified, only objects are detected",
}
_OTHER_MODES = {
    "track": "objects are not tracked; detect.py detects them in each frame",
    "benchmark": "export.py --format writes several formats, val.py --weights best.pt best.onnx compares AP and time",
}
_ENDINGS = {"seg": "segment", "pose": "pose", "obb": "obb", "cls": "classify"}  # yolov8n-seg.pt
_ANY = ".*"
_OF_OTHER_TASKS = (
    "angle", "auto_augment", "copy_paste_mode", "dropout", "erasing", "kobj", "mask_ratio", "overlap_mask", "pose",
    "rle",
)  # fmt: skip
# Values, as regular expressions (see `_plain`), and flags with the same effect; "": none is needed. "{}": the value.
_SETTINGS: dict[str, dict[tuple[str, str], str]] = {
    "train": {
        ("val", "false"): "--val-every 0",
        ("plots", "false"): "--noplots",
        ("amp", "false"): "--amp off",
        ("batch", r"0\.\d+"): "--batch-size -1",  # a fraction of the GPU's memory
        ("multi_scale", r"0\.\d+"): "--multi-scale {}",
        ("save_period", "-1"): "",
        **dict.fromkeys([(name, "0") for name in ("bgr", "cls_pw", "copy_paste", "cutmix", "multi_scale")], ""),
        **{("fraction", "1"): "", ("iou", r"0\.7"): "", ("max_det", "300"): "", ("split", "val"): ""},  # the defaults
        **dict.fromkeys([(name, _ANY) for name in _OF_OTHER_TASKS], ""),
        **dict.fromkeys([(name, _ANY) for name in ("augment", "format", "vid_stride", "workspace")], ""),  # modes
    },
    "val": {
        ("plots", "false"): "--noplots",
        ("amp", "false"): "",
        ("augment", "true"): "--tta",
        ("end2end", "false"): "--nms",
        ("nms", _ANY): "",  # of export; our --nms chooses a branch
    },
    "detect": {
        ("amp", "false"): "",
        ("save", "false"): "--nosave",
        ("show", "true"): "--view-img",
        ("show_labels", "false"): "--hide-labels",
        ("show_conf", "false"): "--hide-conf",
        ("end2end", "false"): "--nms",
        ("nms", _ANY): "",
    },
    "export": {("nms", "true"): "--layout end2end", ("end2end", "false"): "--nms"},
}
_SETTINGS = _SETTINGS | dict.fromkeys(("kfold", "search"), _SETTINGS["train"])
_ON = (  # with True; here, too
    "amp", "end2end", "plots", "pretrained", "save", "show_boxes", "show_conf", "show_labels", "simplify", "val",
    "verbose",
)  # fmt: skip
_OFF = (  # with False or None; here, too
    "agnostic_nms", "augment", "classes", "compile", "conf", "dnn", "dynamic", "embed", "end2end", "fraction",
    "half", "int8", "keras", "line_width", "nms", "opset", "optimize", "plots", "profile", "resume", "retina_masks",
    "save_conf", "save_crop", "save_frames", "save_json", "save_txt", "show", "source", "stream", "stream_buffer",
    "time", "verbose", "visualize", "workspace",
)  # fmt: skip
_OTHER_MEANING = {"cfg": "flags are not read from files", "tracker": "object tracking is not supported"}
_NOT_OF_THE_RUN = ("cfg", "mode", "save_dir", "task", "tracker")  # in args.yaml
_CHOSEN_BY_AUTO = ("lr0", "momentum", "warmup_bias_lr")  # not used there with optimizer: auto
_SIGNS_OF_YOLOV5 = {"fl_gamma", "iou_t", "obj_pw"}
# Hyper-parameters of YOLOv5 that do not exist or mean something else here: the value without effect, and the reason.
_NO_WEIGHTS = "the losses have no positive weights"
_OTHER_SCALE = "for YOLOv5's losses, which are divided differently"
_OF_YOLOV5 = {
    "box": (r"0\.05", _OTHER_SCALE),
    "cls": (r"0\.5", _OTHER_SCALE),
    "obj": ("1", _OTHER_SCALE),
    "cls_pw": ("1", _NO_WEIGHTS),
    "obj_pw": ("1", _NO_WEIGHTS),
    "fl_gamma": ("0", "there is no focal loss"),
    "iou_t": (_ANY, "YOLOv5 does not use it either"),
    "anchors": ("0", "the model's YAML says how many anchors there are"),
}
_MOST_NAMED = 12


class Program(NamedTuple):
    """A script's command line."""

    flags: Mapping[str, argparse.Action]  # by name, such as --epochs
    hyperparameters: Collection[str]  # that --set accepts
    # The settings that flags change from their defaults; raises UserError for mistakes.
    changes: Callable[[Sequence[str]], Mapping[str, Any]]


def is_yolo_command(arguments: Sequence[str]) -> bool:
    """Whether a command line begins with arguments of the ``yolo`` command."""
    words = {"yolo", "detect", *_MODES, *_OTHER_TASKS, *_OTHER_MODES}
    return any("=" in argument or argument in words for argument in _leading(arguments))


def _leading(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments before the first flag. Negative numbers are not flags."""
    return arguments[: next((i for i, a in enumerate(arguments) if re.match(r"-[^\d.]", a)), len(arguments))]


def command_line(script: str, arguments: Sequence[str], programs: Callable[[str], Program]) -> str:
    """What to write instead of ``script`` with arguments of the ``yolo`` command.

    Args:
        script: "train", "val", "detect", "export", "kfold" or "search"; the mode may name another.
        programs: by such a name.
    """
    words = _leading(arguments)
    return _translation(script, _assignments(words), arguments[len(words) :], programs)


def recipe(values: dict[Any, Any], where: str, programs: Callable[[str], Program]) -> tuple[dict[Any, Any], list[str]]:
    """The hyper-parameters among ``values`` of a YAML file, and the other lines, which have no effect here.

    Raises UserError beginning with ``where`` that names all lines that would have an effect, with the reason; or, for
    the args.yaml of a run of Ultralytics, the command line that has the same effect.
    """
    texts = {key: str(value) for key, value in values.items()}
    if {"mode", "model"} <= values.keys():
        left_out = {*_NOT_OF_THE_RUN, *(_CHOSEN_BY_AUTO if texts.get("optimizer") == "auto" else ())}
        given = {str(key): text for key, text in texts.items() if key not in left_out}
        told = _translation("train", given, (), programs, defaults=False)
        raise UserError(f"{where}: contains all arguments of a run of Ultralytics; {told}")
    program, of_yolov5 = programs("train"), _OF_YOLOV5 if _SIGNS_OF_YOLOV5 & values.keys() else {}
    kept: dict[Any, Any] = {}
    unused: dict[str, list[str]] = {}  # by reason
    mistakes: list[str] = []
    for key, text in texts.items():
        off, why = of_yolov5.get(key, (None, ""))
        if off and re.fullmatch(off, _plain(text)):
            unused.setdefault(why, []).append(f"{key} {text[:40]}")
        elif not off and key in program.hyperparameters:
            kept[key] = values[key]
        elif off or _has_effect(str(key), text, program):
            mistakes.append(f"'{key}': {why}; remove it" if off else unknown_hyperparameter(str(key), program))
        else:
            unused.setdefault("", []).append(f"{key} {text[:40]}")
    if mistakes:
        more = [f"and {len(mistakes) - _MOST_NAMED} more"] if len(mistakes) > _MOST_NAMED else []
        raise UserError(f"{where}: {'; '.join([*mistakes[:_MOST_NAMED], *more])}")
    return kept, [", ".join(items) + f" ({why})" * bool(why) for why, items in unused.items()]


def _has_effect(key: str, text: str, program: Program) -> bool:
    try:
        return bool(program.changes(foreign_flags("train", key, text, program)))
    except UserError:
        return True


def unknown_hyperparameter(key: str, train: Program) -> str:
    """Says what ``key`` is instead of a hyper-parameter. ``train`` is train.py."""
    flag, why = "--" + key.replace("_", "-"), _OF_YOLOV5.get(key, ("", ""))[1]
    ours = translated("train", [flag])[0]
    if key in SYNONYMS:
        return f"unknown key '{key}' (did you mean '{SYNONYMS[key]}'?)"
    if ours in train.flags:
        return f"'{key}': is a flag, not a hyper-parameter; give it as {ours}"
    why = why or reason("train", flag)
    return f"'{key}': {why}; remove it" if why else f"unknown key '{key}'{suggestion(key, train.hyperparameters)}"


def other_task(weights: str) -> str:
    """Says that weights such as ``yolov8n-seg.pt`` are not of a detector; "" for other names."""
    match = re.fullmatch(r"(yolo\w+)-(seg|pose|obb|cls)(\.pt|\.ya?ml)?", weights)
    return f"{weights}: {_OTHER_TASKS[_ENDINGS[match[2]]]}; use {match[1]}{match[3] or ''}" if match else ""


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """Values by key, with or without blanks around ``=`` and in lists. A word without a value is true."""
    text = re.sub(r"\0?=(\0(?=[^\0=]+(\0|$)))?", "=", "\0".join(words))
    text = re.sub(r"=[\[(][^\])]*", lambda match: match[0].replace("\0", " "), text)
    given: dict[str, str] = {}
    for word in text.split("\0"):
        key, separator, value = word.partition("=")
        if separator:
            given[key.strip()] = value.strip()
        elif word in {"detect", *_OTHER_TASKS}:
            given["task"] = word
        elif word in {*_MODES, *_OTHER_MODES}:
            given["mode"] = word
        elif word != "yolo":
            given[word] = "true"
    return given


def _translation(
    script: str,
    given: Mapping[str, str],
    rest: Sequence[str],
    programs: Callable[[str], Program],
    *,
    defaults: bool = True,
) -> str:
    """As `command_line`, for values by key, followed by ``rest``, which are flags already.

    Args:
        defaults: also write flags that set the default.
    """
    mode, task = given.get("mode", ""), given.get("task", "")
    for name, why in (_OTHER_TASKS | _OTHER_MODES).items():
        if name in (mode, task):
            return f"{name}: {why}"
    if text := other_task(given.get("model", "")):
        return text
    if mode in _MODES and not (mode == "train" and script in ("kfold", "search")):
        script = _MODES[mode]
    program = programs(script)
    line, without = [], []
    for key, value in [*_with_our_keys(given, program).items(), (None, "")]:
        try:
            flags = list(rest) if key is None else foreign_flags(script, key, value, program)
            if program.changes(flags) or defaults:
                line += flags
        except UserError as error:
            name = shlex.join(rest) if key is None else key or f"={value}"
            without.append(f"{name} ({error})".removesuffix(" ()"))
    for name, action in program.flags.items():
        if action.required and not any(word.partition("=")[0] == name for word in line):
            line += [name, action.dest.upper()]
    ending = f". Without an equivalent: {', '.join(without)}" if without else ""
    return f"settings are flags here; write {COMMANDS[script].typed} {shlex.join(line)}".rstrip() + ending


def _with_our_keys(given: Mapping[str, str], program: Program) -> dict[str, str]:
    """``given`` with the model to start from, or the checkpoint to resume, under the name of our flag."""
    given = {key: value for key, value in given.items() if key != "mode" or value not in _MODES}
    if given.get("task") == "detect":
        del given["task"]
    no = ("", "false", "none")
    model, resume, pretrained = (given.get(key, "") for key in ("model", "resume", "pretrained"))
    has_weights = model.endswith(WEIGHTS_SUFFIXES) or "--model" not in program.flags
    if "--resume" in program.flags and resume.lower() not in no:  # with True, model= names the checkpoint
        given |= {"resume": model} if resume.lower() == "true" and has_weights and model else {}
        given.pop("model", None)
    elif has_weights:
        given = {"weights" if key == "model" else key: value for key, value in given.items()}
    elif pretrained.lower() in no:
        given.pop("pretrained", None)
    elif pretrained.lower() != "true":
        given = {"weights" if key == "pretrained" else key: value for key, value in given.items()}
    return given


def foreign_flags(script: str, key: str, value: str, program: Program) -> list[str]:
    """Flags with the effect of ``key=value``; empty if none is needed. Raises UserError with the reason if there are
    none."""
    plain, flag, hyperparameter = _plain(value), "--" + key.replace("_", "-"), SYNONYMS.get(key, key)
    for (name, pattern), flags in _SETTINGS[script].items():
        if name == key and re.fullmatch(pattern, plain):
            return flags.replace("{}", value).split()
    name, *fixed = translated(script, [flag])
    action = None if key in _OTHER_MEANING else program.flags.get(name)
    is_set = "--set" in program.flags and hyperparameter in program.hyperparameters
    if (plain == "none" and (is_set or action)) or (plain == "true" and key in _ON):
        return []
    if len(value.splitlines()) != 1:
        raise UserError("its value is empty or has several lines")
    if is_set:
        return ["--set", f"{hyperparameter}={value}"]
    if action is None:
        if (plain in ("false", "none") and key in _OFF) or (plain == "true" and is_harmless(script, flag)):
            return []
        raise UserError(_OTHER_MEANING.get(key) or reason(script, flag))
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    if (fixed or action.nargs == "?" or is_switch) and plain in ("true", "false"):
        off = [f"--no-{name[2:]}"] if is_switch and action.default is not False else []
        return [name, *fixed] if plain == "true" else off
    if name == "--format" and conversion(plain):
        raise UserError(conversion(plain))
    parts = _parts(value, action)
    if name == "--freeze" and len(parts) == 1 and parts[0] != value:
        parts *= 2  # [3] is one layer, but a number alone means all layers before it
    if parts[0].startswith("-"):
        return [f"{name}={parts[0]}", *parts[1:]]
    return [name, *parts]


def _parts(value: str, action: argparse.Action) -> list[str]:
    """A value, or those of a list such as ``[0, 1]``, as words after a flag: one word unless the flag takes several."""
    is_list = value[:1] in ("[", "(")
    is_list |= action.nargs == "+" and (action.type is int or (action.dest == "classes" and "," in value))
    if not is_list:
        return [next((choice for choice in action.choices or () if choice.lower() == value.lower()), value)]
    parts = [part.strip("'\"") for part in re.split(r"[,\s]+", value.strip("[]() "))]
    if action.nargs == "+":
        return parts
    return [max(parts, key=lambda part: (len(part), part))] if action.dest == "imgsz" else [",".join(parts)]


def _plain(value: str) -> str:
    """In lower case, numbers in one way of writing, empty lists as none."""
    try:
        return str(float(value)).removesuffix(".0")
    except ValueError:
        return "none" if value in ("[]", "()") else value.lower()
