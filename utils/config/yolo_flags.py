"""Flags of YOLOv5 and of the ``yolo`` command that are written in another way here: what they mean, or what to do.

Nothing is accepted and ignored: a flag gets its meaning (`translated`), or one line that says what to write (`advice`).
The scripts are named "train", "val" and "detect".
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
        "--linear-lr": ("--no-cos-lr",),
        "--cache-images": ("--cache", "ram"),
        "--nbs": ("--nominal-batch",),
        "--augment": ("--render-on",),  # its former name; the peers' flag of that name is val.py's
    },
    "val": {**_HALF, "--split": ("--task",)},
    "detect": _HALF,
}

_UPLOAD = "nothing is sent anywhere; results.csv and TensorBoard events are in the run's folder. Leave it out"
_BOXES_ONLY = "is for masks or keypoints; only boxes are trained here. Leave it out"
_NO_SUCH_AUGMENTATION = (
    "there is no such augmentation; configs/hyp/scratch.yaml lists those there are, albumentations too"
)
_ONNX = "weights here are .pt, .pth and .safetensors files, which PyTorch runs. Leave it out"
_LABEL_FILES = "label files are written by detect.py (--save-txt, --save-conf); val.py writes predictions.json"
_EVERYWHERE = {"--dnn": _ONNX, "--tracker": "objects are not tracked here. Leave it out"}
_ADVICE: dict[str, dict[str, str]] = {
    "train": {
        **_EVERYWHERE,
        "--nosave": "last.pt is always written at an epoch's end, so that a run can go on; inside an epoch only by "
        "--save-minutes (0: never) and --save-steps. Leave it out",
        "--evolve": "hyper-parameters are not searched for here; configs/hyp has measured ones, and --set KEY=VALUE "
        "changes one",
        "--evolve-population": "hyper-parameters are not searched for here. Leave it out",
        "--resume-evolve": "hyper-parameters are not searched for here. Leave it out",
        **dict.fromkeys(("--bucket", "--entity", "--upload-dataset", "--bbox-interval", "--artifact-alias"), _UPLOAD),
        **dict.fromkeys(("--log-imgs", "--log-artifacts", "--ndjson-console", "--ndjson-file"), _UPLOAD),
        **dict.fromkeys(("--overlap-mask", "--mask-ratio", "--no-overlap", "--pose", "--kobj"), _BOXES_ONLY),
        **dict.fromkeys(("--copy-paste", "--cutmix", "--erasing", "--auto-augment"), _NO_SUCH_AUGMENTATION),
        "--pretrained": "weights to start from are named by --weights; without it a run starts from scratch",
        "--half": "the autocast type of a training is --amp bf16 or --amp fp16; --amp auto takes what the device has",
        "--fraction": "images to train on are listed by the data set's YAML; 'train' may name a .txt list of them",
        "--classes": "the classes of a training are those of the data set's YAML",
        "--time": "the length of a training is --epochs; after SIGTERM or SIGUSR1, --resume goes on",
        "--plots": "plots are drawn unless --noplots is given",
        "--save": "checkpoints are always written. Leave it out",
        "--val": "every epoch is validated; --val-every N does so less often, 0 at the end only",
        "--dropout": "detectors have no dropout. Leave it out",
        "--profile": "benchmarks/ has what measures speed. Leave it out",
    },
    "val": {
        **_EVERYWHERE,
        **dict.fromkeys(("--save-txt", "--save-conf", "--save-hybrid"), _LABEL_FILES),
        "--plots": "plots are drawn unless --noplots is given",
    },
    "detect": {
        **_EVERYWHERE,
        "--data": "the checkpoint knows the names of its classes. Leave it out",
        "--augment": "pictures are looked at once; val.py --tta scores a model that looks thrice. Leave it out",
        "--tta": "pictures are looked at once; val.py --tta scores a model that looks thrice. Leave it out",
        "--visualize": "feature maps are not drawn. Leave it out",
        "--update": "checkpoints are not changed. Leave it out",
        "--save-csv": "detections are written by --save-txt or --save-json",
        "--save-format": "label files of --save-txt are YOLO's: class, then cx cy w h as shares of the picture",
        "--batch-size": "pictures are looked at one by one. Leave it out",
        "--show": "a window is opened by --view-img",
        "--stream": "videos and streams are read frame by frame anyway. Leave it out",
    },
}
# Of `yolo detect train val=False plots=False`; None: what happens anyway.
_ASSIGNMENTS: dict[tuple[str, str], str | None] = {
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
}
_WEIGHTS_SUFFIXES = (".pt", ".pth", ".safetensors")


def translated(script: str, arguments: Sequence[str]) -> list[str]:
    """``arguments`` with flags of the peers' replaced by ours of the same meaning."""
    result: list[str] = []
    for argument in arguments:
        flag, separator, value = argument.partition("=")
        ours = _MEANINGS[script].get(flag, (flag,))
        result += [*ours[:-1], ours[-1] + separator + value]
    return result


def advice(
    script: str, arguments: Sequence[str], flags: Collection[str], hyperparameters: Collection[str]
) -> str | None:
    """What to write in place of the first flag that this program does not have but its users may know; or None.

    Args:
        arguments: the command line, translated.
        flags: what the script takes, ``--epochs`` and so on.
        hyperparameters: names that ``--set`` takes.
    """
    settings = list(itertools.takewhile(lambda a: not a.startswith("-"), arguments))
    if any("=" in s for s in settings):
        line = _as_flags(script, settings, flags, hyperparameters)
        return f"{' '.join(settings)}: settings are flags here; write {line}"
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
        if flag in arguments:
            values = arguments[arguments.index(flag) + 1 :][:2]
            if len(values) == 2 and all(v.isdigit() for v in values):
                longer = max(values, key=int)
                return f"{flag} {' '.join(values)}: is one number, the longer side in pixels; write {flag} {longer}"
    return None


def _as_flags(script: str, arguments: Sequence[str], flags: Collection[str], hyperparameters: Collection[str]) -> str:
    """``yolo``'s ``model=yolov8n.pt epochs=3`` as a command line of ours."""
    words = [f"{script}.py"]
    for argument in arguments:
        key, separator, value = argument.partition("=")
        flag = "--" + key.replace("_", "-")
        if not separator or key in ("task", "mode"):
            continue
        if (key, value.lower()) in _ASSIGNMENTS and not (key == "val" and script != "train"):
            words += filter(None, [_ASSIGNMENTS[key, value.lower()]])
        elif key == "model" and (script != "train" or value.endswith(_WEIGHTS_SUFFIXES)):
            words.append(f"--weights {value}")
        elif value.lower() in ("true", "false") and f"--no-{flag[2:]}" in flags:
            words.append(flag if value.lower() == "true" else f"--no-{flag[2:]}")
        elif script == "train" and key in hyperparameters:
            words.append(f"--set {key}={value}")
        else:
            words += [*translated(script, [flag]), value]
    return " ".join(words)
