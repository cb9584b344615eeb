"""The settings of train.py, val.py, detect.py and export.py, as dataclasses; those of the tools are in
tool_settings.py. The metadata of a field holds its help text, bounds and choices.

Flags and help (flags.py), checks (parser.py) and the stored settings follow from these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from utils.config.export_formats import EXPORT_FORMATS, formats_with, refuse_other_formats, titles_of_programs
from utils.config.words import joined_devices, named_layers, one_side, tracker_name
from utils.schema import UNBOUNDED, Bounds

REQUIRED = MISSING  # default of a setting that must be given
AUTO = "auto"  # the value of --resume that means the folder --project/--name, whether a run is there or not
FIND_BATCH_SIZE = -1  # the value of --batch-size that finds the largest that fits
ALL_RANKS = -1  # the value of --sync-bn that means the whole run
MAX_DETECTIONS = 300  # per image, unless --max-det sets another number
MAX_CANDIDATES = 30_000  # per image: NMS examines those with the highest scores
_MAX_THREADS = 4096
_MAX_MOMENTUM = 0.9999  # with 1, SGD adds up all gradients, Muon's average never changes, and Adam refuses it
AMP_TYPES = ("auto", "off", "bf16", "fp16")
OBJECT_TRACKERS = ("bytetrack", "botsort", "cbiou", "ocsort", "sort")
DATA_HELP = "data set YAML, folder of an export, name in configs/data, or demo"
TRUST_HELP = f"open {titles_of_programs()} files; they can run code"

# Flags of training commands that `--help` shows; `--help-all` shows all.
FIRST_SETTINGS = (
    "data val_fraction classes single_cls cache model weights imgsz epochs batch_size resume hyp override patience "
    "device workers spawn project name exist_ok seed folds trials"
)
TOPICS = {  # the sections of --help: the settings of all commands
    "data": "data split fraction val_fraction task source classes single_cls max_bad cache cache_dir stage "
    "groups folds near_duplicates vid_stride max_frames",
    "model and weights": "model weights teacher keep_old trust offline freeze autoanchor format layout imgsz "
    "batch dynamic half int8 opset",
    "images": "rect multi_scale quad tile overlap tile_full_image image_weights repeat_factor",
    "training": "epochs time batch_size resume hyp override optimizer cos_lr nominal_batch label_smoothing "
    "cls_pw skip_zero_grads seed deterministic",
    "validation": "fitness patience val_every check",
    "search": "trials pruner prune_after",
    "detections": "conf_thres iou_thres box_voting nms agnostic_nms tta max_det track",
    "device and precision": "device amp compile threads workers",
    "processes": "spawn eval_ranks sync_bn zero virtual_ranks pipeline",
    "output": "out json megabytes project name exist_ok export save_period save_minutes callbacks tracker "
    "plots save_json nosave quiet save_txt save_conf save_crop view_img "
    "line_thickness hide_labels hide_conf",
}


def _by_rule(names: Mapping[str, str]) -> dict[str, frozenset[str]]:
    return {rule: frozenset(text.split()) for rule, text in names.items()}


# Settings of commands that train by what they affect; all others affect the results of a run.
# machine: how a process does its part; it may differ even between the ranks of a run.
# run: everything else in a run, such as its files and when it saves, and sources of hyper-parameters, which are
#     compared by value; equal on all ranks, but it may change when a search continues.
SCOPES = _by_rule(
    {
        "machine": "cache_dir device offline spawn stage workers",
        "run": "cache eval_ranks exist_ok export hyp name override plots project quiet resume save_minutes save_period "
        "tracker trials",
    }
)
# Which value a resumed run uses; of all other settings its own, and another one is refused.
# machine, extends: its own, unless the command line gives another, on each machine or for the whole run.
# command: that of the command line, given or not.
# again: like command, because the setting names code, a service or a folder of the machine, or starts a compiler, and
#     reading a checkpoint must not run, send or write anything that the command does not ask for.
ON_RESUME = _by_rule(
    {
        "machine": "cache data offline pipeline teacher threads workers zero",
        "extends": "batch_size epochs export patience plots save_minutes save_period time",
        "command": "device eval_ranks exist_ok name project quiet resume spawn",
        "again": "cache_dir callbacks compile stage tracker",
    }
)
# Settings that may name files that must not change before a run continues; they are stored as absolute paths, and the
# files may move.
PATHS = ("data", "model", "teacher", "weights")


class Usage(NamedTuple):
    """How users give a setting.

    Args:
        const: the value of a flag given without one, as in argparse; None: the flag requires a value.
        convert: a function that is given what the user has written, and its name for a UserError, and returns what is
            meant: one word of a command line, or several as a list, or a `plain_value`.
        positional: the name in --help of an argument without a flag; "": the setting is a flag.
        is_keyword: whether it is one of the ``**settings`` of a function of the package lockstep. Others are its own
            parameters, or have no use there.
        options: arguments for argparse that do not follow from the others.
    """

    const: Any = None
    convert: Callable[[Any, str], Any] | None = None
    positional: str = ""
    is_keyword: bool = True
    options: Mapping[str, Any] = MappingProxyType({})


_FLAG = Usage()


def setting(default: Any, help: str, bounds: Bounds = UNBOUNDED, *, usage: Usage = _FLAG) -> Any:
    """Creates a dataclass field with the metadata that its flag or YAML key needs. Words of other programs for it are
    in words.py.

    Args:
        default: `REQUIRED`: the setting is text that is not blank. A list is copied.
        bounds: the allowed values. Strings that are logged in one line must have ``is_line``.
    """
    if default is REQUIRED:
        bounds = bounds._replace(is_filled=True)  # --weights="$W" of a script without W
    metadata = {"help": help, "bounds": bounds, "usage": usage}
    if isinstance(default, list):
        return dataclasses.field(default_factory=partial(list, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# YOLOv5 and YOLOv7 take --img 640 640.
SIDES = Usage(convert=one_side, options={"nargs": "+"})
RUNS_HELP = "folder of runs"
RUNS = Bounds(is_line=True, is_output=True)


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default of a setting; `REQUIRED` if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def changed_settings(config: Any) -> dict[str, Any]:
    """Returns the settings that are not at their defaults, by name."""
    values = {field: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {field.name: value for field, value in values.items() if value != default_of(field)}


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The keys of a hyper-parameter YAML (``configs/hyp``). Names are YOLOv5's where the meaning is the same."""

    lr0: float | None = setting(None, "initial learning rate; null: the default of the optimizer", Bounds(0))
    lr_factor: float = setting(1.0, "factor on the learning rate, however it was chosen", Bounds(0))
    lr_mult: float | None = setting(
        1.0, "learning rate factor of loaded weights; null: chosen by how well they detect", Bounds(0)
    )
    lrf: float = setting(0.01, "final learning rate as a fraction of lr0", Bounds(0, 1))
    momentum: float = setting(0.937, "momentum of SGD and Muon, beta1 of Adam", Bounds(0, _MAX_MOMENTUM))
    weight_decay: float = setting(0.0005, "weight decay; biases and norms are not decayed", Bounds(0))
    warmup_epochs: float = setting(3.0, "length of the warm-up in epochs, at most a quarter of the run", Bounds(0))
    warmup_momentum: float = setting(0.8, "momentum at step 0", Bounds(0, _MAX_MOMENTUM))
    warmup_bias_lr: float = setting(0.0, "learning rate of biases at step 0", Bounds(0))
    bn_momentum: float = setting(0.03, "weight of a batch in the running statistics of batch norm", Bounds(1e-4, 1))
    ema_tau: float = setting(2000.0, "EMA ramp in steps: 0.9999 * (1 - exp(-step / tau))", Bounds(1e-9))
    box: float = setting(7.5, "box loss gain", Bounds(0))
    cls: float = setting(0.5, "class loss gain", Bounds(0))
    dfl: float = setting(1.5, "distance loss gain (anchor-free heads): DFL, or L1 if reg_max is 1", Bounds(0))
    obj: float = setting(1.0, "objectness loss gain (anchor heads, YOLOX)", Bounds(0))
    distill: float = setting(1.0, "gain of the distillation loss (--teacher, --keep-old)", Bounds(0))
    anchor_t: float = setting(4.0, "maximum width or height ratio between an anchor and its target", Bounds(1))
    tal_topk: int = setting(10, "candidates per target in task-aligned assignment", Bounds(1))
    hsv_h: float = setting(0.015, "hue jitter, +- fraction of the color circle", Bounds(0, 0.5))
    hsv_s: float = setting(0.7, "saturation jitter, +- fraction", Bounds(0, 1))
    hsv_v: float = setting(0.4, "value jitter, +- fraction", Bounds(0, 1))
    degrees: float = setting(0.0, "rotation, +- degrees", Bounds(0, 180))
    translate: float = setting(0.1, "translation, +- fraction of the canvas", Bounds(0, 1))
    scale: float = setting(0.5, "scale jitter, +- fraction", Bounds(0, 1))
    shear: float = setting(0.0, "shear, +- degrees", Bounds(0, 45))
    perspective: float = setting(0.0, "perspective coefficients, +-", Bounds(0, 0.01))
    flipud: float = setting(0.0, "probability of a vertical flip", Bounds(0, 1))
    fliplr: float = setting(
        0.5, "probability of a horizontal flip; off by default if flips exchange classes", Bounds(0, 1)
    )
    mosaic: float = setting(1.0, "probability of a four-image mosaic", Bounds(0, 1))
    mosaic_block: int = setting(
        16, "draw mosaic and mixup partners from blocks of n samples; 0: from all images", Bounds(0)
    )
    mixup: float = setting(0.0, "probability of blending two samples", Bounds(0, 1))
    close_mosaic: int | None = setting(
        None, "disable mosaic and mixup in the last n epochs; null: 10, at most half of the run", Bounds(0)
    )
    close_scale: int | None = setting(
        None, "shrink the scale jitter over the last n epochs; null: 10, at most half of the run", Bounds(0)
    )
    tile_visibility: float = setting(0.3, "ignore objects of which a tile shows a smaller fraction", Bounds(0, 1))
    tile_backgrounds: float = setting(
        0.5, "tiles without objects per epoch, at most this multiple of those with objects", Bounds(0)
    )
    albumentations: list[dict] = setting(
        [], "pixel- or box-level transforms, e.g. [{name: Blur, p: 0.1}, {name: CLAHE}]"
    )


HYPERPARAMETERS = tuple(field.name for field in dataclasses.fields(Hyperparameters))


@dataclass(frozen=True, kw_only=True)
class LossLimit:
    """Flag of the commands that read labels."""

    max_bad: float = setting(
        0.1, "stop if more than this fraction of the images or labels cannot be used", Bounds(0, 1)
    )


@dataclass(frozen=True, kw_only=True)
class Downloads:
    """Flag of the commands that may download weights."""

    offline: bool = setting(False, "never download weights")


@dataclass(frozen=True, kw_only=True)
class _RunConfig(Downloads):
    """Flags of the commands that write a run folder."""

    name: str = setting("exp", "name of this run", Bounds(is_line=True, is_folder=True))
    exist_ok: bool = setting(False, "write into an existing run folder, and overwrite its files")
    quiet: bool = setting(False, "print only results, warnings and errors")


@dataclass(frozen=True, kw_only=True)
class _DetectionsConfig(_RunConfig):
    """Flags of val.py and detect.py."""

    imgsz: int = setting(0, "longer image side, pixels; 0: the checkpoint's", Bounds(0), usage=SIDES)
    trust: bool = setting(False, TRUST_HELP)
    box_voting: bool = setting(True, "let boxes suppressed by NMS refine the kept box and raise its score")
    nms: bool = setting(False, "use the one-to-many head of NMS-free models, with NMS")
    max_det: int = setting(
        MAX_DETECTIONS, "maximum number of detections per image or, with tiles, per tile", Bounds(1, MAX_CANDIDATES)
    )
    amp: str = setting("off", "autocast type", Bounds(choices=AMP_TYPES))
    tile: int | None = setting(
        None, "cut images into overlapping tiles of n x n pixels; 0: off; default: as in training", Bounds(0)
    )
    overlap: float | None = setting(
        None, "overlap of neighboring tiles as a fraction of their size; default: 0.2", Bounds(0.05, 0.9)
    )
    tile_full_image: bool = setting(True, "also use the whole image, scaled to --imgsz")


@dataclass(frozen=True, kw_only=True)
class DataFlags(LossLimit, _RunConfig):
    """Flags of the commands that train, and of val.py."""

    classes: list[str] = setting([], "use only these classes of the data set, by number or name")
    single_cls: bool = setting(False, "treat all classes as one")
    cache_dir: str = setting("", "folder of index and disk caches; empty: ~/.cache/lockstep")
    device: str = setting(
        "", "cpu, mps, 0 or 0,1; empty: the best available device", usage=Usage(convert=joined_devices)
    )
    workers: int = setting(
        -1, "loader workers per rank; -1: its share of the cores, at most 8, or 16 with GPUs", Bounds(-1, 1024)
    )
    plots: bool = setting(True, "write plots and report.html")
    stage: str = setting("", "copy the data to this folder on each node's local disk first; may contain {node_rank}")
    spawn: int = setting(0, "start this many processes on this machine without torchrun", Bounds(0))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataFlags):
    """The flags of train.py. Names are YOLOv5's where the meaning is the same."""

    data: str = setting("", f"{DATA_HELP}; needed without --resume", usage=Usage(is_keyword=False))
    fraction: float = setting(1.0, "random fraction of the training images to train on", Bounds(1e-6, 1))
    val_fraction: float = setting(
        0.0, "without 'val': hold out this fraction of the training images", Bounds(0.05, 0.5, sentinel=0.0)
    )
    model: str = setting("", "model name or YAML; empty: the model of --weights, or yolov8n")
    weights: str = setting("", "checkpoint to start from, or a public name such as yolov8n; empty: from scratch")
    teacher: str = setting("", "trained, usually larger model whose outputs are additional targets")
    keep_old: bool = setting(False, "learn new classes without losing those of --weights")
    hyp: str = setting("auto", "recipe in configs/hyp or YAML; auto: by --keep-old and --weights")
    override: list[str] = setting(
        [],
        "hyper-parameters that override --hyp",
        usage=Usage(is_keyword=False, options={"action": "extend", "metavar": "KEY=VALUE"}),
    )
    epochs: int = setting(100, "number of epochs", Bounds(1))
    time: float = setting(0.0, "train for as many epochs as fit into this many hours; 0: --epochs", Bounds(0))
    batch_size: int = setting(16, "images per global batch; -1: as many as fit", Bounds(1, sentinel=FIND_BATCH_SIZE))
    imgsz: int = setting(640, "size of square training images, pixels", Bounds(64), usage=SIDES)
    rect: bool = setting(False, "shuffled rectangular batches of images with similar aspect ratios")
    resume: str | None = setting(
        None,
        "checkpoint or run; alone: that of --name, else the newest; auto: start or resume --project/--name",
        usage=Usage(const="", is_keyword=False),
    )
    cache: str = setting(
        "none",
        "keep decoded images, one copy per node",
        Bounds(choices=("none", "ram", "disk")),
        usage=Usage(const="ram"),
    )
    image_weights: bool = setting(False, "sample images of classes with low AP more often")
    repeat_factor: float = setting(
        0.0, "repeat images of classes that occur in less than this fraction of the images; 0: off", Bounds(0, 1)
    )
    cls_pw: float = setting(0.0, "weight classes in the loss by 1 / frequency to this power", Bounds(0, 4))
    multi_scale: float = setting(
        0.0,
        "vary the image size between steps by up to +- this fraction of --imgsz",
        Bounds(0, 0.9),
        usage=Usage(const=0.5),
    )
    quad: bool = setting(False, "merge some groups of four images into one image of twice the side")
    optimizer: str = setting("auto", "optimizer", Bounds(choices=("auto", "SGD", "Adam", "AdamW", "Muon")))
    cos_lr: bool = setting(False, "decay the learning rate by a cosine instead of linearly")
    nominal_batch: int = setting(0, "images over which a step accumulates gradients; 0: one batch", Bounds(0))
    amp: str = setting("auto", "autocast type; auto: bf16 if supported, fp16 on older GPUs", Bounds(choices=AMP_TYPES))
    compile: bool = setting(False, "torch.compile the model, with CUDA graphs on a GPU if sizes are fixed")
    sync_bn: int = setting(
        0,
        "synchronize batch norm over all processes or groups of n; 0: off",
        Bounds(0, sentinel=ALL_RANKS),
        usage=Usage(const=ALL_RANKS),
    )
    zero: bool = setting(False, "shard the optimizer state over the processes (ZeRO stage 1)")
    virtual_ranks: int = setting(
        0, "cut each batch into n shards; bitwise equal on 1, 2, 4, ... n processes; 0: one per process", Bounds(0)
    )
    pipeline: int = setting(1, "2: split the model's layers between two processes", Bounds(1, 2))
    threads: int = setting(
        0,
        "CPU threads per process; 0: OMP_NUM_THREADS, else the cores but one; 1 with virtual ranks on CPUs",
        Bounds(0, _MAX_THREADS),
    )
    skip_zero_grads: bool = setting(False, "skip weight updates where the gradient is exactly zero")
    freeze: list[int] = setting(
        [],
        "layers to freeze: one number n freezes 0..n-1, several (or a Python list) name layers",
        usage=Usage(convert=named_layers),
    )
    label_smoothing: float = setting(0.0, "label smoothing of the classes", Bounds(0, 0.5))
    fitness: str = setting(
        "AP", "metric for best.pt and --patience: AP, AP50, AP75, F1, precision or recall; of one class: AP:NAME"
    )
    patience: int = setting(0, "stop after this many epochs without a better --fitness; 0: never", Bounds(0))
    save_period: int = setting(0, "keep a checkpoint every n epochs; 0: never", Bounds(0))
    save_minutes: float = setting(10.0, "also save within an epoch every n minutes; 0: never", Bounds(0))
    eval_ranks: int = setting(0, "the last n processes only validate, while the others train", Bounds(0))
    val_every: int = setting(1, "validate every n epochs and at the end; 0: at the end only", Bounds(0))
    autoanchor: bool = setting(True, "refit anchors that fit the boxes badly")
    export: list[str] = setting(
        [],
        "export best.pt to these formats at the end; tested before the first epoch",
        Bounds(choices=tuple(EXPORT_FORMATS)),
        usage=Usage(convert=refuse_other_formats),
    )
    seed: int = setting(0, "seed of all random numbers", Bounds(0))
    deterministic: bool = setting(False, "use deterministic kernels")
    callbacks: str = setting(
        "", "MODULE:OBJECT with your callbacks: on_start, on_step, on_epoch, on_end", usage=Usage(is_keyword=False)
    )
    tracker: list[str] = setting(
        [], "services that also receive settings, results and reports", Bounds(choices=("mlflow", "wandb"))
    )
    project: str = setting("runs/train", RUNS_HELP, RUNS)

    @property
    def folder(self) -> Path:
        """The folder ``--project/--name``. A new run is in another one (exp2, ...) if it exists, unless ``--exist-ok``
        or ``--resume auto`` is given."""
        return Path(self.project, self.name)


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run."""

    config: TrainConfig  # paths are absolute (`engine.run.plan.resolve`)
    hyp: Hyperparameters

    @property
    def overridden(self) -> set[str]:
        """Names of the hyper-parameters that ``--set`` gives."""
        return {item.partition("=")[0].strip() for item in self.config.override}

    def by_name(self) -> dict[str, Any]:
        """Returns all flags and hyper-parameters by name."""
        return {**dataclasses.asdict(self.config), **dataclasses.asdict(self.hyp)}


@dataclass(frozen=True, kw_only=True)
class ValConfig(_DetectionsConfig, DataFlags):
    """The flags of val.py."""

    weights: str = setting(REQUIRED, "checkpoint or exported file to evaluate", usage=Usage(is_keyword=False))
    data: str = setting("", "data set YAML; empty: the checkpoint's", usage=Usage(is_keyword=False))
    task: str = setting("val", "split to evaluate", Bounds(choices=("train", "val", "test")))
    batch_size: int = setting(16, "images per batch and process", Bounds(1))
    rect: bool | None = setting(None, "rectangles; --no-rect: squares; default: by head (YOLOX: squares)")
    conf_thres: float = setting(
        0.001,
        "count only detections above it; other values than the default also set the threshold of P, R and F1",
        Bounds(0, 1),
    )
    iou_thres: float | None = setting(
        None, "NMS IoU threshold; default: by head for AP, detect.py's for P, R and F1", Bounds(0, 1)
    )
    tta: bool = setting(False, "test-time augmentation: add a flipped view and a flipped, enlarged one")
    save_json: bool = setting(True, "write predictions.json in COCO format")
    project: str = setting("runs/val", RUNS_HELP, RUNS)

    @property
    def chosen_confidence(self) -> float | None:
        """The confidence of precision, recall and F1 that ``--conf-thres`` gives; None: the one that F1 chooses."""
        return None if self.conf_thres == ValConfig.conf_thres else self.conf_thres


@dataclass(frozen=True, kw_only=True)
class DetectConfig(_DetectionsConfig):
    """The flags of detect.py."""

    weights: str = setting(REQUIRED, "checkpoint, exported file, or a public name such as yolov8n")
    source: str = setting(
        REQUIRED, "image, folder, glob, video, .txt list, webcam number, or the URL of an image or stream"
    )
    conf_thres: float | None = setting(
        None, "confidence threshold; default: the one chosen by F1, or 0.25", Bounds(0, 1)
    )
    iou_thres: float | None = setting(
        None, "NMS IoU threshold; default: 0.45; NMS-free models: none, unless --agnostic-nms", Bounds(0, 1)
    )
    classes: list[str] = setting([], "keep only these classes, by number or name")
    agnostic_nms: bool = setting(False, "class-agnostic NMS")
    track: str | None = setting(
        None,
        "give ids to objects in videos and ordered images; without a value: bytetrack",
        Bounds(choices=OBJECT_TRACKERS),
        usage=Usage(const="bytetrack", convert=tracker_name),
    )
    device: str = setting("", "cpu, mps or 0; empty: the best available device")
    save_txt: bool = setting(False, "write labels in YOLO txt format; with --track, tracks in MOT Challenge format")
    save_conf: bool = setting(False, "append the confidence to each row of the txt labels")
    save_json: bool = setting(False, "write predictions.json")
    save_crop: bool = setting(False, "write a crop of each detection, with a margin")
    nosave: bool = setting(False, "do not write annotated images and videos")
    view_img: bool = setting(False, "show results in a window")
    line_thickness: int = setting(0, "line width of boxes, pixels; 0: from the image size", Bounds(0))
    hide_labels: bool = setting(False, "draw boxes without labels")
    hide_conf: bool = setting(False, "draw labels without confidences")
    vid_stride: int = setting(1, "process every n-th frame of a video", Bounds(1))
    max_frames: int = setting(0, "stop a video or stream after n frames; 0: never", Bounds(0))
    project: str = setting("runs/detect", RUNS_HELP, RUNS)


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Downloads):
    """The flags of export.py."""

    weights: str = setting(REQUIRED, "checkpoint, or a public name such as yolov8n", usage=Usage(is_keyword=False))
    format: list[str] = setting(
        ["onnx"],
        "one or more file formats",
        Bounds(choices=tuple(EXPORT_FORMATS), is_filled=True),
        usage=Usage(convert=refuse_other_formats),
    )
    imgsz: list[int] = setting([], "image size, or height and width, pixels; default: the checkpoint's")
    batch: int = setting(1, "batch size of the exported model", Bounds(1))
    dynamic: bool = setting(False, "any batch, and any sides that are multiples of the stride")
    half: bool = setting(False, "float16 weights and convolutions")
    int8: bool = setting(
        False, f"8-bit convolutions, calibrated on 300 training images ({', '.join(formats_with('--int8'))})"
    )
    layout: str = setting(
        "raw", "output: all boxes and scores, or at most 300 detections after NMS", Bounds(choices=("raw", "end2end"))
    )
    nms: bool = setting(False, "export the one-to-many head of NMS-free models, which needs NMS")
    iou_thres: float | None = setting(
        None, "NMS IoU threshold; default: 0.45 in end2end files, by head for the AP of raw ones", Bounds(0, 1)
    )
    opset: int = setting(18, "ONNX opset; torch's exporter writes no valid files below 18")
    data: str = setting("", "data set YAML to check and calibrate with; empty: the checkpoint's")
    check: bool = setting(True, "compare the exported model with the checkpoint on 64 validation images")
    cache_dir: str = setting("", "folder of index caches; empty: ~/.cache/lockstep")
