"""Flags of YOLOv5 and its successors that have another name or no equivalent in this program.

None is silently ignored: a flag is replaced by its equivalent (`translated`), left out with a line in the log if that
changes nothing (`without_harmless`), or refused with one line that says what to write instead (`advice`). Scripts are
named as their settings are: "train" for `settings.TrainConfig`.
"""

from __future__ import annotations

import itertools
import shlex
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
_NO_SEARCH = "search hyper-parameters with python -m tools.search (--help lists its flags)"
_LABEL_FILES = "label files are written by detect.py (--save-txt, --save-conf); val.py writes predictions.json"
_ONE_VIEW = "detect.py has no test-time augmentation; val.py --tta evaluates a model with it. Leave it out"
_NO_SUCH_FORMAT = "belongs to a format that is not supported; --format takes onnx, openvino, torchscript and pt2"
_NOT_COMPILED = "only train.py compiles; export.py writes faster files"
_OWN_BATCHES = "a GPU takes up to 16 images at once, a CPU one"
_PLOTS = "plots are drawn unless --noplots is given"
_FILES_NEXT_TO_WEIGHTS = "exported files lie next to the weights. Leave it out"
_EVERYWHERE = {"--dnn": "only .pt, .pth and .safetensors weights are supported, and PyTorch runs them. Leave it out"}
_ONE_LOG = dict.fromkeys(("--verbose", "--quiet"), "there is one level of detail")
_NO_TRACKING = {"--tracker": "object tracking is not supported. Leave it out"}
# Flags that ask for what is so already, or for nothing that changes results.
_HARMLESS: dict[str, dict[str, str]] = {
    "train": {
        **_ONE_LOG,
        "--augment": "training images are always augmented, as --hyp says; val.py --tta is test-time augmentation",
        "--dropout": "detectors have no dropout",
        "--plots": _PLOTS,
        "--save": "checkpoints are always written",
        "--val": "every epoch is validated, or every --val-every",
    },
    "val": {
        "--compile": _NOT_COMPILED,
        "--plots": _PLOTS,
        "--quiet": "--no-verbose leaves out the table of classes",
    },
    "detect": {
        **_ONE_LOG,
        "--batch": _OWN_BATCHES,
        "--batch-size": _OWN_BATCHES,
        "--compile": _NOT_COMPILED,
        "--data": "the checkpoint contains the class names",
        "--rect": "each image is padded to whole strides only",
        "--retina-masks": "there are no masks, only boxes",
        "--save": "results are saved unless --nosave is given",
        "--show-boxes": "detections are drawn with their boxes",
        "--stream": "videos and streams are always read frame by frame",
    },
    "export": {
        **_ONE_LOG,
        "--device": "models are exported on the CPU",
        "--grid": "decoding is always part of the graph",
        "--inplace": "models are exported for inference",
        "--simplify": "graphs are always simplified",
    },
}
_WITH_VALUE = {"--batch", "--batch-size", "--data", "--device", "--dropout"}  # of the harmless ones
_ADVICE: dict[str, dict[str, str]] = {
    "train": {
        **_EVERYWHERE,
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
        "--split": "'train' and 'val' of the data set's YAML are used; val.py --task chooses a split",
        "--profile": "benchmarks/ has scripts that measure speed. Leave it out",
    },
    "val": {
        **_EVERYWHERE,
        **_NO_TRACKING,
        **dict.fromkeys(("--save-txt", "--save-conf", "--save-hybrid"), _LABEL_FILES),
        "--agnostic-nms": "detections are scored class by class; detect.py has this flag. Leave it out",
        "--visualize": "feature maps are not drawn; report.html shows the worst images. Leave it out",
    },
    "detect": {
        **_EVERYWHERE,
        **_NO_TRACKING,
        **dict.fromkeys(("--augment", "--tta"), _ONE_VIEW),
        "--visualize": "feature maps are not drawn. Leave it out",
        "--embed": "there are no embeddings, only detections. Leave it out",
        "--stream-buffer": "of a stream, the newest frame is taken. Leave it out",
        "--save-frames": "an annotated video is written as a video. Leave it out",
        "--update": "checkpoints are not changed. Leave it out",
        "--save-csv": "use --save-txt or --save-json",
        "--show": "use --view-img",
    },
    "export": {
        "--fraction": "use --calibration-images to calibrate --int8 with fewer images",
        "--end2end": "use --layout end2end",
        "--agnostic-nms": "NMS in the graph is by class. Leave it out",
        **dict.fromkeys(("--train", "--optimize"), "models are exported for inference. Leave it out"),
        **dict.fromkeys(("--project", "--name"), _FILES_NEXT_TO_WEIGHTS),
        **dict.fromkeys(("--conf-thres", "--conf"), "NMS in the graph keeps scores above 0.001. Leave it out"),
        "--max-det": "NMS in the graph keeps up to 300 detections. Leave it out",
        **dict.fromkeys(("--keras", "--workspace", "--topk-per-class", "--topk-all"), _NO_SUCH_FORMAT),
        **dict.fromkeys(("--per-tensor", "--mlmodel", "--cache"), _NO_SUCH_FORMAT),
    },
}
# What --format does not write, and what makes it from a file that --format does write.
_TENSORFLOW = "onnx2tf -i best.onnx makes a SavedModel and TFLite files from the ONNX file"
_CONVERSIONS = {
    "engine": "trtexec --onnx=best.onnx --saveEngine=best.engine makes it from the ONNX file",
    **dict.fromkeys(("saved_model", "pb", "tflite"), _TENSORFLOW),
    "edgetpu": f"{_TENSORFLOW}, with -oiqt for integers; edgetpu_compiler takes that",
    "tfjs": f"{_TENSORFLOW}; tensorflowjs_converter takes the SavedModel",
    "ncnn": "pnnx best.onnx inputshape=[1,3,640,640] makes it from the ONNX file",
    "mnn": "MNNConvert -f ONNX --modelFile best.onnx --MNNModel best.mnn --bizCode x makes it from the ONNX file",
    "rknn": "rknn-toolkit2 makes it from the ONNX file",
    "coreml": "coremltools has not read ONNX files since version 6; coremltools.convert takes the TorchScript file "
    "(--format torchscript)",
    "paddle": "x2paddle --framework=onnx --model=best.onnx --save_dir=best_paddle makes it from the ONNX file, if "
    "X2Paddle knows its operators (opset 18)",
}
_IN_PIXELS = "labels are fractions of the image, as YOLO reads them; --save-json writes boxes in pixels"
_SPEED = "every validation prints the milliseconds an image takes. Leave it out"
# What a flag of the same name here does not take.
_VALUES = {
    "val": {"--task": {"speed": _SPEED, "study": "validate with each --imgsz in turn"}},
    "detect": {"--save-format": {"0": f"{_IN_PIXELS}. Leave it out", "1": _IN_PIXELS}},
    "export": dict.fromkeys(("--format", "--include"), _CONVERSIONS),
}
# The other programs that train have the flags of train.py.
_HARMLESS = _HARMLESS | dict.fromkeys(("kfold", "search"), _HARMLESS["train"])
_ADVICE = _ADVICE | dict.fromkeys(("kfold", "search"), _ADVICE["train"])
_MEANINGS = _MEANINGS | {"kfold": _MEANINGS["train"], "search": {**_MEANINGS["train"], "--iterations": ("--trials",)}}
SYNONYMS = {"lr": "lr0", "learning_rate": "lr0", "wd": "weight_decay"}  # of hyper-parameters


def translated(script: str, arguments: Sequence[str]) -> list[str]:
    """Returns ``arguments`` with flags of YOLOv5 replaced by this program's equivalents."""
    result: list[str] = []
    for argument in arguments:
        flag, separator, value = argument.partition("=")
        ours = _MEANINGS.get(script, {}).get(flag, (flag,))
        result += [*ours[:-1], ours[-1] + separator + value]
    return result


def without_harmless(script: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """``arguments``, after `translated`, without flags that change nothing, and a line for the log about each."""
    kept: list[str] = []
    lines: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, separator, _ = word.partition("=")
        if why := _HARMLESS.get(script, {}).get(flag):
            lines.append(f"{flag}: {why}")
            if flag in _WITH_VALUE and not separator:
                next(words, None)
        else:
            kept.append(word)
    return kept, lines


def is_harmless(script: str, flag: str) -> bool:
    """Whether ``flag``, given without a value, changes nothing."""
    return flag in _HARMLESS.get(script, {})


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
    for number, argument in enumerate(arguments):
        flag, separator, value = argument.partition("=")
        if not flag.startswith("--") or flag in flags:
            continue
        if flag in _ADVICE[script]:
            return f"{flag}: {_ADVICE[script][flag]}"
        key = flag.removeprefix("--").replace("-", "_")
        key = SYNONYMS.get(key, key)
        if "--set" in flags and key in hyperparameters:
            following = arguments[number + 1] if number + 1 < len(arguments) else "--"
            value = value if separator else "VALUE" if following.startswith("--") else following
            return f"{flag}: is a hyper-parameter; write --set {shlex.quote(f'{key}={value}')}"
    for flag, reasons in _VALUES.get(script, {}).items():
        names = itertools.chain(*_values(arguments, flag))
        if found := [f"{name}: {reasons[name]}" for name in names if name in reasons]:
            return f"{flag} {'; '.join(found)}"
    for flag in ("--imgsz", "--img", "--img-size") if script != "export" else ():
        for values in _values(arguments, flag):
            if len(values) == 2 and all(v.isdigit() for v in values):
                longer = max(values, key=int)
                return f"{flag} {' '.join(values)}: takes one number, the longer side in pixels; write {flag} {longer}"
    return None


def conversion(export_format: str) -> str:
    """How to make a file of a format that export.py does not write; "" if that is not known."""
    return _CONVERSIONS.get(export_format, "")


def reason(script: str, flag: str) -> str:
    """Why ``script`` has no ``flag``; "" if that is not known."""
    return (_ADVICE[script] | _HARMLESS[script]).get(flag, "").removesuffix(". Leave it out")


def _values(arguments: Sequence[str], flag: str) -> list[list[str]]:
    """What follows each ``flag``, up to the next one."""
    found: list[list[str]] = []
    is_flag = False
    for argument in arguments:
        if argument.startswith("-"):
            name, *value = argument.split("=", 1)
            is_flag = name == flag
            found += [value] if is_flag else []
        elif is_flag:
            found[-1].append(argument)
    return found
