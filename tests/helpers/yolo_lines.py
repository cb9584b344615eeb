"""Random command lines and hyper-parameters of YOLOv5 and Ultralytics for our scripts."""

from __future__ import annotations

import contextlib
import io
import random
import string
from typing import Any

from utils.config.parser import parse_config
from utils.config.search_settings import KfoldConfig, SearchConfig
from utils.config.settings import DetectConfig, ExportConfig, TrainConfig, ValConfig
from utils.errors import UserError, one_line

PROGRAMS = {
    "train.py": TrainConfig,
    "val.py": ValConfig,
    "detect.py": DetectConfig,
    "export.py": ExportConfig,
    "tools.search": SearchConfig,
    "tools.kfold": KfoldConfig,
}
WORDS = (
    "train", "val", "predict", "export", "tune", "detect", "yolo", "detct", "save_txt", "show", "epochs", "ü", "=", "-",
)  # fmt: skip
RARE_WORDS = (
    "track", "benchmark", "segment", "pose", "obb", "classify", "mode=val", "task=detect", "mode=x", "task=segment",
)  # fmt: skip
# Arguments of the command of Ultralytics, YOLOv5's names for some, and typing errors.
KEYS = (
    "agnostic_nms", "amp", "angle", "augment", "auto_augment", "batch", "batch-size", "bgr", "box", "cache", "cfg",
    "classes", "close_mosaic", "cls", "cls_pw", "compile", "conf", "copy_paste", "copy_paste_mode", "cos_lr",
    "cutmix", "data", "degrees", "deterministic", "device", "dfl", "dnn", "dropout", "dynamic", "embed", "end2end",
    "epochs", "erasing", "exist_ok", "fliplr", "flipud", "format", "fraction", "freeze", "half", "hsv_h", "imgsz",
    "img", "int8", "iou", "iterations", "keras", "kobj", "label_smoothing", "line_width", "lr", "lr0", "lrf",
    "mask_ratio", "max_det", "mixup", "model", "momentum", "mosaic", "multi_scale", "name", "nbs", "nms", "obj",
    "opset", "optimize", "optimizer", "overlap_mask", "patience", "perspective", "plots", "pose", "pretrained",
    "profile", "project", "rect", "resume", "retina_masks", "rle", "save", "save_conf", "save_crop", "save_frames",
    "save_hybrid", "save_json", "save_period", "save_txt", "scale", "seed", "set", "shear", "show", "show_boxes",
    "show_conf", "show_labels", "simplify", "single_cls", "source", "split", "stream_buffer", "task", "time",
    "tracker", "translate", "val", "verbose", "vid_stride", "visualize", "warmup_bias_lr", "warmup_epochs",
    "warmup_momentum", "weight_decay", "weights", "workers", "workspace", "help", "h", "epoch", "Epochs",
    "albumentations", "override", "noval", "nosave", "adam", "local_rank",
)  # fmt: skip
VALUES = (
    "True", "False", "true", "None", "null", "", "0", "1", "2", "-1", "-2", "0.7", ".5", "1.0", "0.01", "1e-3", "64",
    "640", "16.0", "nan", "inf", "1e400", "9" * 30, "9" * 5000, "1_0", "½", "٣", "[0, 1]", "[0,1]", "[3]", "(0,1)",
    "[640, 480]", "640,480", "[]", "[", "]", "[0", "['a', 'b']", "0,1", "0 1", "cpu", "mps", "ram", "disk", "auto",
    "sgd", "SGD", "RMSProp", "onnx", "engine", "coreml", "torchscript", "openvino,onnx", "best.pt", "yolov8n.pt",
    "yolo11n.yaml", "yolov8n", "yolov8n-seg.pt", "a.safetensors", "best.onnx", "d.yaml", "my data.yaml", "~/d.yaml",
    "é/ü.yaml", "$HOME", "`x`", "a;b", "'", '"', "'a'", '"a b"', "a\\b", "*.jpg", "-x", "--epochs", "--", "-", "=",
    "a=b", "a\nb", "a\tb", "  a  b ", "a\r", "\u2028", "\x1b[31m", "\udc80", "%s", "{}", "{0}", "{x: 1}",
    "[{name: Blur}]", "&a [*a]", "!!python/name:x", "@x", "botsort.yaml", "reduce-overhead", "test",
    "rtsp://x?a=b&c=d", "x" * 3000,
)  # fmt: skip
LIKELY = {  # values, and the arguments that have such
    ("True", "False"): "amp cache cos_lr deterministic dynamic exist_ok half int8 nms plots pretrained rect resume "
    "save save_txt show show_conf show_labels simplify single_cls val verbose multi_scale agnostic_nms augment end2end",
    ("0", "0.1", "0.5", "1.0"): "box cls cls_pw conf copy_paste dfl fliplr fraction hsv_h iou lr0 lrf mixup momentum "
    "mosaic multi_scale scale translate warmup_bias_lr",
    ("1", "3", "[0, 1]", "64", "-1", "0.7"): "batch classes close_mosaic device epochs freeze iterations line_width "
    "max_det nbs patience save_period seed vid_stride workers",
    ("640", "[640, 480]", "320"): "imgsz",
    ("a.pt", "yolov8n.pt", "b.safetensors", "yolo11n.yaml", "my model.pt"): "model pretrained resume weights",
    ("d.yaml", "~/d.yaml", "-d.yaml", "images/*.jpg"): "data name project source",
    ("SGD", "AdamW", "auto", "onnx", "engine", "val", "test", "ram"): "cache format optimizer split",
}  # fmt: skip
YOLOV5_HYPERPARAMETERS = {  # of hyp.scratch-low.yaml
    "lr0": 0.01, "lrf": 0.01, "momentum": 0.937, "weight_decay": 0.0005, "warmup_epochs": 3.0, "warmup_momentum": 0.8,
    "warmup_bias_lr": 0.1, "box": 0.05, "cls": 0.5, "cls_pw": 1.0, "obj": 1.0, "obj_pw": 1.0, "iou_t": 0.2,
    "anchor_t": 4.0, "fl_gamma": 0.0, "hsv_h": 0.015, "hsv_s": 0.7, "hsv_v": 0.4, "degrees": 0.0, "translate": 0.1,
    "scale": 0.5, "shear": 0.0, "perspective": 0.0, "flipud": 0.0, "fliplr": 0.5, "mosaic": 1.0, "mixup": 0.0,
    "copy_paste": 0.0,
}  # fmt: skip
FLAGS = (
    "--epochs", "--nosave", "--half", "--img", "--device", "--x", "--data", "--set", "--format", "--weights",
    "--name", "--batch", "--lr0", "--lr", "--augment", "--source", "--no-nms", "-x", "--evolve", "--cls_pw",
)  # fmt: skip


def draw_arguments(chance: random.Random) -> list[str]:
    """A command line that mostly begins with arguments of the ``yolo`` command."""
    words: list[str] = []
    for _ in range(chance.choice((0, 0, 1, 2, 2, 3))):
        words.append(chance.choice(RARE_WORDS if chance.random() < 0.1 else WORDS))
    for _ in range(chance.choice((0, 1, 2, 3, 5, 12))):
        key, value = chance.choice(KEYS), chance.choice(VALUES)
        if chance.random() < 0.7:
            values, keys = chance.choice(list(LIKELY.items()))
            key, value = chance.choice(keys.split()), chance.choice(values)
        if chance.random() < 0.05:
            key = "".join(chance.choices(string.printable + "é\u2028", k=chance.randrange(5))).lstrip("-")
        spaced = [f"{key}={value}"] * 6 + [
            f"{key} = {value}",
            [key, "=", value],
            [f"{key}=", value],
            [key, f"={value}"],
        ]
        drawn = chance.choice([*spaced, f"{key}={value}".split(" ")])
        words += [drawn] if isinstance(drawn, str) else drawn
    for _ in range(chance.choice((0, 0, 0, 1, 3))):
        words += [chance.choice(FLAGS), *chance.choices(VALUES, k=chance.choice((0, 1, 1, 2)))]
    return words


def draw_hyperparameters(chance: random.Random) -> dict[str, Any]:
    """Lines of a hyper-parameter file of YOLOv5 or of the args.yaml of a run of Ultralytics, some with other values."""
    drawn: dict[str, Any] = {}
    others = chance.sample(KEYS, chance.choice((0, 0, 1, 2, 40)))
    for key in [*chance.sample(list(YOLOV5_HYPERPARAMETERS), chance.randrange(28)), *others]:
        value = YOLOV5_HYPERPARAMETERS.get(
            key, chance.choice((None, True, False, 0, 0.0, 1, 0.5, 10, "auto", [0, 1], "x"))
        )
        drawn[key] = value if chance.random() < 0.97 else chance.choice((None, 0.0, 1.0, -1, "x", [1], True, 1e300))
    return drawn


def said(config: type, arguments: list[str]) -> str:
    """What a script says of a command line: "" if it accepts it, else its line. Other exceptions are bugs."""
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):  # after --help
        try:
            parse_config(config, arguments, "")
        except UserError as error:
            return f"error: {' '.join(one_line(str(error)).split())}\n"  # as utils.entrypoint prints it
    return ""
