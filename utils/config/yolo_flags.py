"""Flags of YOLOv5 and of the ``yolo`` command that have another name or no equivalent in this program.

None is silently ignored: a flag is either replaced by its equivalent (`translated`) or refused with one line that says
what to write instead (`advice`). The scripts are named "train", "val", "detect" and "export".
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

_HALF = {"--half": ("--amp", "fp16")}
_MEANINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "--noval": ("--val-every", "0"),
        "--notest": ("--val-every", "0"),
        "--adam": ("--optimizer", "Adam"),
        "--adamw": ("--optimizer", "AdamW"),
        "--linear-lr": ("--no-cos-lr",),
        "--cache-images": ("--cache", "ram"),
        "--nbs": ("--nominal-batch",),
        "--augment": ("--render-on",),  # its former name; YOLOv5's flag of this name belongs to val.py
    },
    "val": {**_HALF, "--split": ("--task",)},
    "detect": {**_HALF, "--line-width": ("--line-thickness",)},
    "export": {},
}

_UPLOAD = (
    "nothing is uploaded unless --tracker asks for it; results.csv and TensorBoard events are in the run's folder. "
    "Leave it out"
)
_BOXES_ONLY = "masks and keypoints are not supported, only boxes. Leave it out"
_NO_SUCH_AUGMENTATION = "there is no such augmentation; configs/hyp/scratch.yaml lists all, albumentations included"
_NO_SEARCH = "search hyper-parameters with python -m engine.search (--help lists its flags)"
_LABEL_FILES = "label files are written by detect.py (--save-txt, --save-conf); val.py writes predictions.json"
_ONE_VIEW = "detect.py has no test-time augmentation; val.py --tta evaluates a model with it. Leave it out"
_NO_SUCH_FORMAT = "belongs to a format that is not supported; --format takes onnx, openvino, torchscript and pt2"
_PLOTS = "plots are drawn unless --noplots is given"
_FILES_BESIDE_WEIGHTS = "exported files lie beside the weights. Leave it out"
_EVERYWHERE = {"--dnn": "only .pt, .pth and .safetensors weights are supported, and PyTorch runs them. Leave it out"}
_ONE_LOG = {"--verbose": "there is one level of detail. Leave it out"}
_NO_TRACKING = {"--tracker": "object tracking is not supported. Leave it out"}
_ADVICE: dict[str, dict[str, str]] = {
    "train": {
        **_EVERYWHERE,
        **_ONE_LOG,
        "--nosave": "last.pt is always written at the end of an epoch, so that the run can be resumed; within an "
        "epoch, --save-minutes (0: never) and --save-steps decide. Leave it out",
        **dict.fromkeys(("--evolve", "--evolve-population", "--resume-evolve"), _NO_SEARCH),
        **dict.fromkeys(("--bucket", "--entity", "--upload-dataset", "--bbox-interval", "--artifact-alias"), _UPLOAD),
        **dict.fromkeys(("--log-imgs", "--log-artifacts", "--ndjson-console", "--ndjson-file"), _UPLOAD),
        **dict.fromkeys(("--overlap-mask", "--mask-ratio", "--no-overlap", "--pose", "--kobj"), _BOXES_ONLY),
        **dict.fromkeys(("--copy-paste", "--copy-paste-mode", "--cutmix"), _NO_SUCH_AUGMENTATION),
        **dict.fromkeys(("--erasing", "--auto-augment", "--bgr", "--augmentations"), _NO_SUCH_AUGMENTATION),
        "--pretrained": "use --weights to name the weights to start from; without it a run starts from scratch",
        "--half": "use --amp bf16 or --amp fp16; --amp auto uses bf16 if the device supports it",
        "--fraction": "the data set's YAML lists the images to train on; 'train' may name a .txt list of them",
        "--classes": "a run trains on all classes of the data set's YAML",
        "--time": "use --epochs; a run stopped by SIGTERM or SIGUSR1 is continued with --resume",
        "--plots": _PLOTS,
        "--save": "checkpoints are always written. Leave it out",
        "--split": "'train' and 'val' of the data set's YAML are used; val.py --task chooses a split",
        "--val": "every epoch is validated; use --val-every N to validate less often, 0 to validate at the end only",
        "--dropout": "detectors have no dropout. Leave it out",
        "--profile": "benchmarks/ has scripts that measure speed. Leave it out",
    },
    "val": {
        **_EVERYWHERE,
        **_NO_TRACKING,
        **dict.fromkeys(("--save-txt", "--save-conf", "--save-hybrid"), _LABEL_FILES),
        "--plots": _PLOTS,
        "--classes": "all classes are scored, and classes.csv has a line for each. Leave it out",
        "--agnostic-nms": "detections are scored class by class; detect.py has this flag. Leave it out",
    },
    "detect": {
        **_EVERYWHERE,
        **_ONE_LOG,
        **_NO_TRACKING,
        "--data": "the checkpoint contains the class names. Leave it out",
        **dict.fromkeys(("--augment", "--tta"), _ONE_VIEW),
        "--visualize": "feature maps are not drawn. Leave it out",
        "--update": "checkpoints are not changed. Leave it out",
        "--save-csv": "use --save-txt or --save-json",
        **dict.fromkeys(("--batch-size", "--batch"), "images are processed one by one. Leave it out"),
        "--save": "results are saved unless --nosave is given",
        "--retina-masks": _BOXES_ONLY,
        "--show": "use --view-img",
        "--stream": "videos and streams are always read frame by frame. Leave it out",
    },
    "export": {
        **_ONE_LOG,
        "--simplify": "graphs are always simplified. Leave it out",
        "--end2end": "use --layout end2end",
        "--device": "models are exported on the CPU. Leave it out",
        "--grid": "decoding is always part of the graph. Leave it out",
        "--agnostic-nms": "NMS in the graph is by class. Leave it out",
        **dict.fromkeys(("--train", "--inplace", "--optimize"), "models are exported for inference. Leave it out"),
        **dict.fromkeys(("--project", "--name"), _FILES_BESIDE_WEIGHTS),
        **dict.fromkeys(("--conf-thres", "--conf"), "NMS in the graph keeps scores above 0.001. Leave it out"),
        "--max-det": "NMS in the graph keeps up to 300 detections. Leave it out",
        **dict.fromkeys(("--keras", "--workspace", "--topk-per-class", "--topk-all"), _NO_SUCH_FORMAT),
        **dict.fromkeys(("--per-tensor", "--mlmodel", "--cache"), _NO_SUCH_FORMAT),
    },
}
# Arguments of `yolo detect train val=False plots=False`; None: the default, no flag is needed.
_ASSIGNMENTS: dict[tuple[str, str], str | None] = {
    ("resume", "true"): None,
    ("resume", "false"): None,
    ("val", "false"): "--val-every 0",
    ("val", "true"): None,
    ("plots", "false"): "--noplots",
    ("plots", "true"): None,
    ("save", "true"): None,
    ("amp", "false"): "--amp off",
    ("amp", "true"): None,
    ("half", "true"): "--amp fp16",
    ("half", "false"): None,
    ("cache", "true"): "--cache",
    ("cache", "false"): None,
    ("augment", "true"): "--tta",
    ("pretrained", "true"): None,  # with model=x.pt; the default there
    ("show_labels", "true"): None,
    ("show_labels", "false"): "--hide-labels",
    ("show_conf", "true"): None,
    ("show_conf", "false"): "--hide-conf",
    ("show", "true"): "--view-img",
    ("show", "false"): None,
}
_EXPORT_ASSIGNMENTS: dict[tuple[str, str], str | None] = {
    ("half", "true"): "--half",
    ("half", "false"): None,
    ("nms", "true"): "--layout end2end",  # in the graph; our --nms chooses a branch
    ("nms", "false"): None,
    ("simplify", "true"): None,
}
_WEIGHTS_SUFFIXES = (".pt", ".pth", ".safetensors")


def translated(script: str, arguments: Sequence[str]) -> list[str]:
    """Returns ``arguments`` with flags of YOLOv5 replaced by this program's equivalents."""
    result: list[str] = []
    for argument in arguments:
        flag, separator, value = argument.partition("=")
        ours = _MEANINGS.get(script, {}).get(flag, (flag,))
        result += [*ours[:-1], ours[-1] + separator + value]
    return result


def advice(
    script: str, arguments: Sequence[str], flags: Collection[str], hyperparameters: Collection[str]
) -> str | None:
    """Returns what to write instead of the first known flag that the script does not have; None if there is none.

    Args:
        arguments: the command line, after `translated`.
        flags: the script's flags, such as ``--epochs``.
        hyperparameters: the names that ``--set`` accepts.
    """
    if script not in _ADVICE:  # the other programs have no such command
        return None
    settings = list(itertools.takewhile(lambda a: not a.startswith("-"), arguments))
    if any("=" in s for s in settings):
        line, without = _as_flags(script, settings, flags, hyperparameters)
        rest = f". Without an equivalent: {', '.join(without)}" if without else ""
        return f"{' '.join(settings)}: settings are flags here; write {line}{rest}"
    for number, argument in enumerate(arguments):
        flag, separator, value = argument.partition("=")
        if not flag.startswith("--") or flag in flags:
            continue
        if flag in _ADVICE[script]:
            return f"{flag}: {_ADVICE[script][flag]}"
        key = flag.removeprefix("--").replace("-", "_")
        if script == "train" and key in hyperparameters:
            following = arguments[number + 1] if number + 1 < len(arguments) else "--"
            value = value if separator else "VALUE" if following.startswith("--") else following
            return f"{flag}: is a hyper-parameter; write --set {key}={value}"
    for flag in ("--imgsz", "--img", "--img-size"):
        if flag in arguments and script != "export":
            values = arguments[arguments.index(flag) + 1 :][:2]
            if len(values) == 2 and all(v.isdigit() for v in values):
                longer = max(values, key=int)
                return f"{flag} {' '.join(values)}: takes one number, the longer side in pixels; write {flag} {longer}"
    return None


def _as_flags(
    script: str, arguments: Sequence[str], flags: Collection[str], hyperparameters: Collection[str]
) -> tuple[str, list[str]]:
    """Translates arguments of the ``yolo`` command, such as ``model=yolov8n.pt epochs=3``, to flags of ``script``.

    Also returns those that it does not have, each with the reason if one is known.
    """
    known = _ASSIGNMENTS | (_EXPORT_ASSIGNMENTS if script == "export" else {})
    # In the peer's command resume=True continues the checkpoint that model= names.
    resumes = script == "train" and "resume=true" in map(str.lower, arguments)
    words, without = [f"{script}.py", *(["--resume"] if resumes else [])], []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        flag = "--" + key.replace("_", "-")
        if not separator or key in ("task", "mode"):
            continue
        assigned = known.get((key, value.lower()), "") if key != "val" or script == "train" else ""
        if assigned is None:
            continue
        ours = assigned.split() or translated(script, [flag])
        if key == "model" and resumes:
            words.append(value)
        elif key == "model" and (script != "train" or value.endswith(_WEIGHTS_SUFFIXES)):
            words.append(f"--weights {value}")
        elif script == "train" and key in hyperparameters:
            words.append(f"--set {key}={value}")
        elif ours[0] not in flags:
            reason = _ADVICE[script].get(flag, "").removesuffix(". Leave it out")
            without.append(f"{key} ({reason})" if reason else key)
        elif assigned:
            words.append(assigned)
        elif value.lower() in ("true", "false") and f"--no-{flag[2:]}" in flags:
            words.append(flag if value.lower() == "true" else f"--no-{flag[2:]}")
        else:
            listed = [part.strip() for part in value.strip("[]()").split(",")] if value[:1] in ("[", "(") else [value]
            words += [*ours, ",".join(listed) if key == "device" else " ".join(listed)]
    return " ".join(words), without
