"""The settings of train.py, val.py, detect.py and export.py, as dataclasses; those of the tools are in
tool_settings.py. The metadata of a field holds its help text, bounds and choices.

Flags and help (flags.py), checks (parser.py) and the stored settings follow from these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from utils.config.export_formats import EXPORT_FORMATS, formats_with, refuse_other_formats, titles_of_programs
from utils.errors import UserError
from utils.schema import UNBOUNDED, Bounds

AUTO = "auto"  # the value of --resume that means the folder --project/--name, whether a run is there or not
FIND_BATCH_SIZE = -1  # the value of --batch-size that finds the largest that fits
ALL_RANKS = -1  # the value of --sync-bn that means the whole run
MAX_DETECTIONS = 300  # per image, unless --max-det sets another number
MAX_CANDIDATES = 30_000  # per image: NMS examines those with the highest scores
_MAX_THREADS = 4096
_MAX_MOMENTUM = 0.9999  # with 1, SGD adds up all gradients, Muon's average never changes, and Adam refuses it
IMGSZ_ALIASES = ("--img", "--img-size")
AMP_TYPES = ("auto", "off", "bf16", "fp16")
OBJECT_TRACKERS = ("bytetrack", "botsort", "cbiou", "ocsort", "sort")
# What a setting of a command that trains affects, and therefore when it may change:
# "result": the results of a run.
# "run": everything else in a run, such as its files and when it saves, and sources of hyper-parameters, which are
#        compared by value; equal on all ranks, but it may change when a search or a cross-validation continues.
# "machine": how a process does its part; it may differ even between the ranks of a run.
Scope = Literal["result", "run", "machine"]
# Which value a resumed run uses: "fixed": its own, and another is refused; "machine", "extends": its own, unless the
# command line gives another, on each machine or for the whole run; "command": that of the command line, given or not;
# "again": likewise, because it names code, a service or a folder of the machine, and reading a checkpoint must not run,
# send or write anything that the command does not ask for.
OnResume = Literal["fixed", "machine", "extends", "command", "again"]
DATA_HELP = "data set YAML, folder of an export, name in configs/data, or demo"
TRUST_HELP = f"open {titles_of_programs()} files; they can run code"


# Flags of training commands that `--help` shows; `--help-all` shows all.
FIRST_SETTINGS = (
    "data val_fraction classes single_cls cache model weights imgsz epochs batch_size resume hyp override patience "
    "device workers spawn project name exist_ok seed folds trials"
)
TOPICS = {  # the sections of --help: the settings of all commands
    "data": "data split from_ fraction val_fraction task source classes single_cls max_bad cache cache_dir stage "
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


def setting(
    default: Any = MISSING,
    bounds: Bounds = UNBOUNDED,
    *,
    help: str,
    factory: Callable[[], Any] | Any = MISSING,
    aliases: tuple[str, ...] = (),
    words: Mapping[str, Any] | None = None,
    const: Any = None,
    flag: Mapping[str, Any] | None = None,
    convert: Callable[[Any, str], Any] | None = None,
    scope: Scope = "result",
    on_resume: OnResume = "fixed",
    is_path: bool = False,
    positional: str = "",
    is_keyword: bool = True,
) -> Any:
    """Creates a dataclass field with the metadata that its flag or YAML key needs.

    Args:
        default, factory: as in ``dataclasses.field``; with neither, the setting is required: text that is not blank.
        bounds: the allowed values. Strings that are logged in one line must have ``is_line``.
        aliases: other names of the flag.
        words: switches of other programs, and the value that each sets: {"noval": 0}; or as given, {"val=False": 0}.
        const: the value of a flag given without one, as in argparse; None: the flag requires a value.
        flag: arguments for argparse that do not follow from the others.
        convert: a function that is given what the user has written, and its name for a UserError, and returns what is
            meant: one word of a command line, or several as a list, or a `plain_value`.
        scope, on_resume: see `Scope` and `OnResume`.
        is_path: the value may be the path of a file that must not change before a run, a search or a cross-validation
            continues; it is stored as an absolute path, and the file may move.
        positional: the name in --help of an argument without a flag; "": the setting is a flag.
        is_keyword: whether it is one of the ``**settings`` of a function of the package lockstep. Others are its own
            parameters, or have no use there.
    """
    is_required = default is factory is MISSING
    metadata = {
        "help": help,
        "bounds": bounds._replace(is_filled=True) if is_required else bounds,  # --weights="$W" of a script without W
        "aliases": aliases,
        "words": words or {},
        "const": const,
        "flag": flag or {},
        "convert": convert,
        "scope": scope,
        "on_resume": on_resume,
        "is_path": is_path,
        "positional": positional,
        "is_keyword": is_keyword,
    }
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def _one_side(value: Any, location: str) -> Any:
    """Returns the side of an image that is given by one number, or two. Raises UserError if these differ."""
    sides = value.split(",") if isinstance(value, str) else value
    if not isinstance(sides, list) or len(sides) != 2:
        return value
    if sides[0] != sides[1]:
        sizes = f"{sides[0]} {sides[1]}"
        raise UserError(f"{location} {sizes}: give the longer side alone; train.py --rect trains on rectangles")
    return sides[0]


def _joined_devices(value: Any, _location: str) -> Any:
    """Returns a list of devices, ``[0, 1]``, as text."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _named_layers(value: Any, _location: str) -> Any:
    """Returns the setting ``freeze``: the list ``[3]`` names a layer, and a number alone means all layers before it."""
    return value * 2 if isinstance(value, list) and len(value) == 1 else value


def _tracker_name(value: Any, _location: str) -> Any:
    """Returns the name of an object tracker, which Ultralytics names by a file, ``botsort.yaml``."""
    return value.removesuffix(".yaml") if isinstance(value, str) else value


# YOLOv5 and YOLOv7 take --img 640 640.
_AMP_WORDS = {"half": "fp16", "amp=True": "auto", "amp=False": "off"}
_IMGSZ: dict[str, Any] = {"aliases": IMGSZ_ALIASES, "flag": {"nargs": "+"}, "convert": _one_side}


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default of a setting; MISSING if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def field_by_alias(config: type) -> dict[str, dataclasses.Field]:
    """Returns the settings by their names and by their other names, such as ``batch`` for ``batch_size``."""
    fields: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(config):
        aliases = [alias.removeprefix("--").replace("-", "_") for alias in field.metadata["aliases"]]
        fields |= dict.fromkeys([field.name, *aliases], field)
    return fields


def names_with(config: type, **metadata: Any) -> frozenset[str]:
    """Returns the names of the settings whose metadata have these values, such as ``scope="machine"``."""
    return frozenset(
        field.name
        for field in dataclasses.fields(config)
        if all(field.metadata[key] == value for key, value in metadata.items())
    )


def changed_settings(config: Any) -> dict[str, Any]:
    """Returns the settings that are not at their defaults, by name."""
    values = {field: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {field.name: value for field, value in values.items() if value != default_of(field)}


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The keys of a hyper-parameter YAML (``configs/hyp``). Names are YOLOv5's where the meaning is the same."""

    lr0: float | None = setting(
        None, Bounds(0), aliases=("--lr",), help="initial learning rate; null: the default of the optimizer"
    )
    lr_factor: float = setting(1.0, Bounds(0), help="factor on the learning rate, however it was chosen")
    lr_mult: float | None = setting(
        1.0, Bounds(0), help="learning rate factor of loaded weights; null: chosen by how well they detect"
    )
    lrf: float = setting(0.01, Bounds(0, 1), help="final learning rate as a fraction of lr0")
    momentum: float = setting(0.937, Bounds(0, _MAX_MOMENTUM), help="momentum of SGD and Muon, beta1 of Adam")
    weight_decay: float = setting(0.0005, Bounds(0), help="weight decay; biases and norms are not decayed")
    warmup_epochs: float = setting(3.0, Bounds(0), help="length of the warm-up in epochs, at most a quarter of the run")
    warmup_momentum: float = setting(0.8, Bounds(0, _MAX_MOMENTUM), help="momentum at step 0")
    warmup_bias_lr: float = setting(0.0, Bounds(0), help="learning rate of biases at step 0")
    bn_momentum: float = setting(
        0.03, Bounds(1e-4, 1), help="weight of a batch in the running statistics of batch norm"
    )
    ema_tau: float = setting(2000.0, Bounds(1e-9), help="EMA ramp in steps: 0.9999 * (1 - exp(-step / tau))")
    box: float = setting(7.5, Bounds(0), help="box loss gain")
    cls: float = setting(0.5, Bounds(0), help="class loss gain")
    dfl: float = setting(1.5, Bounds(0), help="distance loss gain (anchor-free heads): DFL, or L1 if reg_max is 1")
    obj: float = setting(1.0, Bounds(0), help="objectness loss gain (anchor heads, YOLOX)")
    distill: float = setting(1.0, Bounds(0), help="gain of the distillation loss (--teacher, --keep-old)")
    anchor_t: float = setting(4.0, Bounds(1), help="maximum width or height ratio between an anchor and its target")
    tal_topk: int = setting(10, Bounds(1), help="candidates per target in task-aligned assignment")
    hsv_h: float = setting(0.015, Bounds(0, 0.5), help="hue jitter, +- fraction of the color circle")
    hsv_s: float = setting(0.7, Bounds(0, 1), help="saturation jitter, +- fraction")
    hsv_v: float = setting(0.4, Bounds(0, 1), help="value jitter, +- fraction")
    degrees: float = setting(0.0, Bounds(0, 180), help="rotation, +- degrees")
    translate: float = setting(0.1, Bounds(0, 1), help="translation, +- fraction of the canvas")
    scale: float = setting(0.5, Bounds(0, 1), help="scale jitter, +- fraction")
    shear: float = setting(0.0, Bounds(0, 45), help="shear, +- degrees")
    perspective: float = setting(0.0, Bounds(0, 0.01), help="perspective coefficients, +-")
    flipud: float = setting(0.0, Bounds(0, 1), help="probability of a vertical flip")
    fliplr: float = setting(
        0.5, Bounds(0, 1), help="probability of a horizontal flip; off by default if flips exchange classes"
    )
    mosaic: float = setting(1.0, Bounds(0, 1), help="probability of a four-image mosaic")
    mosaic_block: int = setting(
        16, Bounds(0), help="draw mosaic and mixup partners from blocks of n samples; 0: from all images"
    )
    mixup: float = setting(0.0, Bounds(0, 1), help="probability of blending two samples")
    close_mosaic: int | None = setting(
        None, Bounds(0), help="disable mosaic and mixup in the last n epochs; null: 10, at most half of the run"
    )
    close_scale: int | None = setting(
        None, Bounds(0), help="shrink the scale jitter over the last n epochs; null: 10, at most half of the run"
    )
    tile_visibility: float = setting(0.3, Bounds(0, 1), help="ignore objects of which a tile shows a smaller fraction")
    tile_backgrounds: float = setting(
        0.5, Bounds(0), help="tiles without objects per epoch, at most this multiple of those with objects"
    )
    albumentations: list[dict] = setting(
        factory=list, help="pixel- or box-level transforms, e.g. [{name: Blur, p: 0.1}, {name: CLAHE}]"
    )


HYPERPARAMETERS = tuple(field.name for field in dataclasses.fields(Hyperparameters))


@dataclass(frozen=True, kw_only=True)
class LossLimit:
    """Flag of the commands that read labels."""

    max_bad: float = setting(
        0.1, Bounds(0, 1), help="stop if more than this fraction of the images or labels cannot be used"
    )


@dataclass(frozen=True, kw_only=True)
class Downloads:
    """Flag of the commands that may download weights."""

    offline: bool = setting(False, help="never download weights", scope="machine", on_resume="machine")


@dataclass(frozen=True, kw_only=True)
class _RunConfig(Downloads):
    """Flags of the commands that write a run folder."""

    name: str = setting(
        "exp", Bounds(is_line=True, is_folder=True), help="name of this run", scope="run", on_resume="command"
    )
    exist_ok: bool = setting(
        False, help="write into an existing run folder, and overwrite its files", scope="run", on_resume="command"
    )


@dataclass(frozen=True, kw_only=True)
class _DetectionsConfig(_RunConfig):
    """Flags of val.py and detect.py."""

    trust: bool = setting(False, help=TRUST_HELP)
    box_voting: bool = setting(True, help="let boxes suppressed by NMS refine the kept box and raise its score")
    nms: bool = setting(False, help="use the one-to-many head of NMS-free models, with NMS")
    max_det: int = setting(
        MAX_DETECTIONS,
        Bounds(1, MAX_CANDIDATES),
        help="maximum number of detections per image or, with tiles, per tile",
    )
    amp: str = setting("off", Bounds(choices=AMP_TYPES), words=_AMP_WORDS, help="autocast type")
    tile: int | None = setting(
        None, Bounds(0), help="cut images into overlapping tiles of n x n pixels; 0: off; default: as in training"
    )
    overlap: float | None = setting(
        None, Bounds(0.05, 0.9), help="overlap of neighboring tiles as a fraction of their size; default: 0.2"
    )
    tile_full_image: bool = setting(True, help="also use the whole image, scaled to --imgsz")


@dataclass(frozen=True, kw_only=True)
class DataFlags(LossLimit, _RunConfig):
    """Flags of the commands that train, and of val.py."""

    classes: list[str] = setting(factory=list, help="use only these classes of the data set, by number or name")
    single_cls: bool = setting(False, help="treat all classes as one")
    cache_dir: str = setting(
        "", help="folder of index and disk caches; empty: ~/.cache/lockstep", scope="machine", on_resume="again"
    )
    device: str = setting(
        "",
        convert=_joined_devices,
        help="cpu, mps, 0 or 0,1; empty: the best available device",
        scope="machine",
        on_resume="command",
    )
    workers: int = setting(
        -1,
        Bounds(-1, 1024),
        help="loader workers per rank; -1: its share of the cores, at most 8, or 16 with GPUs",
        scope="machine",
        on_resume="machine",
    )
    plots: bool = setting(
        True, words={"noplots": False}, help="write plots and report.html", scope="run", on_resume="extends"
    )
    stage: str = setting(
        "",
        help="copy the data to this folder on each node's local disk first; may contain {node_rank}",
        scope="machine",
        on_resume="again",
    )
    spawn: int = setting(
        0,
        Bounds(0),
        help="start this many processes on this machine without torchrun",
        scope="machine",
        on_resume="command",
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataFlags):
    """The flags of train.py. Names are YOLOv5's where the meaning is the same."""

    data: str = setting(
        "demo",
        flag={"default": None},
        help=f"{DATA_HELP}; needed without --resume (tools.kfold and tools.search: demo)",
        is_path=True,
        on_resume="machine",
        is_keyword=False,
    )
    fraction: float = setting(1.0, Bounds(1e-6, 1), help="random fraction of the training images to train on")
    val_fraction: float = setting(
        0.0, Bounds(0.05, 0.5, sentinel=0.0), help="without 'val': hold out this fraction of the training images"
    )
    model: str = setting(
        "", aliases=("--cfg",), help="model name or YAML; empty: the model of --weights, or yolov8n", is_path=True
    )
    weights: str = setting(
        "", help="checkpoint to start from, or a public name such as yolov8n; empty: from scratch", is_path=True
    )
    teacher: str = setting(
        "", help="trained, usually larger model whose outputs are additional targets", is_path=True, on_resume="machine"
    )
    keep_old: bool = setting(False, help="learn new classes without losing those of --weights")
    hyp: str = setting("auto", help="recipe in configs/hyp or YAML; auto: by --keep-old and --weights", scope="run")
    override: list[str] = setting(
        factory=list,
        aliases=("--set",),
        flag={"action": "extend", "metavar": "KEY=VALUE"},
        help="hyper-parameters that override --hyp",
        scope="run",
        is_keyword=False,  # each hyper-parameter is one
    )
    epochs: int = setting(100, Bounds(1), help="number of epochs", on_resume="extends")
    time: float = setting(
        0.0, Bounds(0), help="train for as many epochs as fit into this many hours; 0: --epochs", on_resume="extends"
    )
    batch_size: int = setting(
        16,
        Bounds(1, sentinel=FIND_BATCH_SIZE),
        aliases=("--batch",),
        help="images per global batch; -1: as many as fit",
        on_resume="extends",
    )
    imgsz: int = setting(640, Bounds(64), **_IMGSZ, help="size of square training images, pixels")
    rect: bool = setting(False, help="shuffled rectangular batches of images with similar aspect ratios")
    resume: str | None = setting(
        None,
        const="",
        help="checkpoint or run; alone: that of --name, else the newest; auto: start or resume --project/--name",
        scope="run",
        on_resume="command",
        is_keyword=False,
    )
    cache: str = setting(
        "none",
        Bounds(choices=("none", "ram", "disk")),
        const="ram",
        words={"cache_images": "ram"},
        help="keep decoded images, one copy per node",
        scope="run",
        on_resume="machine",
    )
    image_weights: bool = setting(False, help="sample images of classes with low AP more often")
    repeat_factor: float = setting(
        0.0, Bounds(0, 1), help="repeat images of classes that occur in less than this fraction of the images; 0: off"
    )
    cls_pw: float = setting(0.0, Bounds(0, 4), help="weight classes in the loss by 1 / frequency to this power")
    multi_scale: float = setting(
        0.0, Bounds(0, 0.9), const=0.5, help="vary the image size between steps by up to +- this fraction of --imgsz"
    )
    quad: bool = setting(False, help="merge some groups of four images into one image of twice the side")
    optimizer: str = setting(
        "auto", Bounds(choices=("auto", "SGD", "Adam", "AdamW", "Muon")), words={"adam": "Adam"}, help="optimizer"
    )
    cos_lr: bool = setting(
        False, words={"linear_lr": False}, help="decay the learning rate by a cosine instead of linearly"
    )
    nominal_batch: int = setting(
        0, Bounds(0), aliases=("--nbs",), help="images over which a step accumulates gradients; 0: one batch"
    )
    amp: str = setting(
        "auto",
        Bounds(choices=AMP_TYPES),
        words=_AMP_WORDS,
        help="autocast type; auto: bf16 if supported, fp16 on older GPUs",
    )
    compile: bool = setting(
        False, help="torch.compile the model, with CUDA graphs on a GPU if sizes are fixed", on_resume="machine"
    )
    sync_bn: int = setting(
        0,
        Bounds(0, sentinel=ALL_RANKS),
        const=ALL_RANKS,
        help="synchronize batch norm over all processes or groups of n; 0: off",
    )
    zero: bool = setting(False, help="shard the optimizer state over the processes (ZeRO stage 1)", on_resume="machine")
    virtual_ranks: int = setting(
        0, Bounds(0), help="cut each batch into n shards; bitwise equal on 1, 2, 4, ... n processes; 0: one per process"
    )
    pipeline: int = setting(
        1, Bounds(1, 2), help="2: split the model's layers between two processes", on_resume="machine"
    )
    threads: int = setting(
        0,
        Bounds(0, _MAX_THREADS),
        help="CPU threads per process; 0: OMP_NUM_THREADS, else the cores but one; 1 with virtual ranks on CPUs",
        on_resume="machine",
    )
    skip_zero_grads: bool = setting(False, help="skip weight updates where the gradient is exactly zero")
    freeze: list[int] = setting(
        factory=list,
        convert=_named_layers,
        help="layers to freeze: one number n freezes 0..n-1, several (or a Python list) name layers",
    )
    label_smoothing: float = setting(0.0, Bounds(0, 0.5), help="label smoothing of the classes")
    fitness: str = setting(
        "AP", help="metric for best.pt and --patience: AP, AP50, AP75, F1, precision or recall; of one class: AP:NAME"
    )
    patience: int = setting(
        0, Bounds(0), help="stop after this many epochs without a better --fitness; 0: never", on_resume="extends"
    )
    save_period: int = setting(
        0, Bounds(0), help="keep a checkpoint every n epochs; 0: never", scope="run", on_resume="extends"
    )
    save_minutes: float = setting(
        10.0, Bounds(0), help="also save within an epoch every n minutes; 0: never", scope="run", on_resume="extends"
    )
    eval_ranks: int = setting(
        0,
        Bounds(0),
        help="the last n processes only validate, while the others train",
        scope="run",
        on_resume="command",
    )
    val_every: int = setting(
        1,
        Bounds(0),
        words={"noval": 0, "val=False": 0},
        help="validate every n epochs and at the end; 0: at the end only",
    )
    autoanchor: bool = setting(True, words={"noautoanchor": False}, help="refit anchors that fit the boxes badly")
    export: list[str] = setting(
        factory=list,
        bounds=Bounds(choices=tuple(EXPORT_FORMATS)),
        convert=refuse_other_formats,
        help="export best.pt to these formats at the end; tested before the first epoch",
        scope="run",
        on_resume="extends",
    )
    seed: int = setting(0, Bounds(0), help="seed of all random numbers")
    deterministic: bool = setting(False, help="use deterministic kernels")
    callbacks: str = setting(
        "",
        help="MODULE:OBJECT with your callbacks: on_start, on_step, on_epoch, on_end",
        on_resume="again",
        is_keyword=False,
    )
    tracker: list[str] = setting(
        factory=list,
        bounds=Bounds(choices=("mlflow", "wandb")),
        help="services that also receive settings, results and reports",
        scope="run",
        on_resume="again",
    )
    project: str = setting(
        "runs/train", Bounds(is_line=True, is_output=True), help="folder of runs", scope="run", on_resume="command"
    )

    @property
    def folder(self) -> Path:
        """The folder ``--project/--name``. A new run is in another one (exp2, ...) if it exists, unless ``--exist-ok``
        or ``--resume auto`` is given."""
        return Path(self.project, self.name)


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run."""

    config: TrainConfig  # paths are absolute (`engine.train.resume.resolve`)
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

    weights: str = setting(aliases=("--model",), help="checkpoint or exported file to evaluate", is_keyword=False)
    data: str = setting("", help="data set YAML; empty: the checkpoint's", is_keyword=False)
    task: str = setting("val", Bounds(choices=("train", "val", "test")), aliases=("--split",), help="split to evaluate")
    batch_size: int = setting(16, Bounds(1), aliases=("--batch",), help="images per batch and process")
    imgsz: int = setting(0, Bounds(0), **_IMGSZ, help="longer image side, pixels; 0: the checkpoint's")
    rect: bool | None = setting(None, help="rectangles; --no-rect: squares; default: by head (YOLOX: squares)")
    conf_thres: float = setting(
        0.001,
        Bounds(0, 1),
        aliases=("--conf",),
        help="count only detections above it; other values than the default also set the threshold of P, R and F1",
    )
    iou_thres: float | None = setting(
        None,
        Bounds(0, 1),
        aliases=("--iou",),
        help="NMS IoU threshold; default: by head for AP, detect.py's for P, R and F1",
    )
    tta: bool = setting(
        False, aliases=("--augment",), help="test-time augmentation: add a flipped view and a flipped, enlarged one"
    )
    save_json: bool = setting(True, help="write predictions.json in COCO format")
    project: str = setting("runs/val", Bounds(is_line=True, is_output=True), help="folder of runs", scope="run")

    @property
    def chosen_confidence(self) -> float | None:
        """The confidence of precision, recall and F1 that ``--conf-thres`` gives; None: the one that F1 chooses."""
        return None if self.conf_thres == ValConfig.conf_thres else self.conf_thres


@dataclass(frozen=True, kw_only=True)
class DetectConfig(_DetectionsConfig):
    """The flags of detect.py."""

    weights: str = setting(aliases=("--model",), help="checkpoint, exported file, or a public name such as yolov8n")
    source: str = setting(help="image, folder, glob, video, .txt list, webcam number, or the URL of an image or stream")
    imgsz: int = setting(0, Bounds(0), **_IMGSZ, help="longer image side, pixels; 0: the checkpoint's")
    conf_thres: float | None = setting(
        None, Bounds(0, 1), aliases=("--conf",), help="confidence threshold; default: the one chosen by F1, or 0.25"
    )
    iou_thres: float | None = setting(
        None,
        Bounds(0, 1),
        aliases=("--iou",),
        help="NMS IoU threshold; default: 0.45; NMS-free models: none, unless --agnostic-nms",
    )
    classes: list[str] = setting(factory=list, help="keep only these classes, by number or name")
    agnostic_nms: bool = setting(False, help="class-agnostic NMS")
    track: str | None = setting(
        None,
        Bounds(choices=OBJECT_TRACKERS),
        aliases=("--tracker",),
        const="bytetrack",
        convert=_tracker_name,
        help="give ids to objects in videos and ordered images; without a value: bytetrack",
    )
    device: str = setting("", help="cpu, mps or 0; empty: the best available device")
    save_txt: bool = setting(
        False, help="write labels in YOLO txt format; with --track, tracks in MOT Challenge format"
    )
    save_conf: bool = setting(False, help="append the confidence to each row of the txt labels")
    save_json: bool = setting(False, help="write predictions.json")
    save_crop: bool = setting(False, help="write a crop of each detection, with a margin")
    nosave: bool = setting(False, words={"save=False": True}, help="do not write annotated images and videos")
    quiet: bool = setting(False, help="print only the summary and errors")
    view_img: bool = setting(False, aliases=("--show",), help="show results in a window")
    line_thickness: int = setting(
        0, Bounds(0), aliases=("--line-width",), help="line width of boxes, pixels; 0: from the image size"
    )
    hide_labels: bool = setting(False, help="draw boxes without labels")
    hide_conf: bool = setting(False, help="draw labels without confidences")
    vid_stride: int = setting(1, Bounds(1), help="process every n-th frame of a video")
    max_frames: int = setting(0, Bounds(0), help="stop a video or stream after n frames; 0: never")
    project: str = setting("runs/detect", Bounds(is_line=True, is_output=True), help="folder of runs")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Downloads):
    """The flags of export.py."""

    weights: str = setting(aliases=("--model",), help="checkpoint, or a public name such as yolov8n", is_keyword=False)
    format: list[str] = setting(
        factory=lambda: ["onnx"],
        bounds=Bounds(choices=tuple(EXPORT_FORMATS), is_filled=True),
        convert=refuse_other_formats,
        aliases=("--include",),
        help="one or more file formats",
    )
    imgsz: list[int] = setting(
        factory=list, aliases=IMGSZ_ALIASES, help="image size, or height and width, pixels; default: the checkpoint's"
    )
    batch: int = setting(1, Bounds(1), aliases=("--batch-size",), help="batch size of the exported model")
    dynamic: bool = setting(False, help="any batch, and any sides that are multiples of the stride")
    half: bool = setting(False, help="float16 weights and convolutions")
    int8: bool = setting(
        False, help=f"8-bit convolutions, calibrated on 300 training images ({', '.join(formats_with('--int8'))})"
    )
    layout: str = setting(
        "raw",
        Bounds(choices=("raw", "end2end")),
        help="output: all boxes and scores, or at most 300 detections after NMS",
    )
    nms: bool = setting(False, help="export the one-to-many head of NMS-free models, which needs NMS")
    iou_thres: float | None = setting(
        None,
        Bounds(0, 1),
        aliases=("--iou",),
        help="NMS IoU threshold; default: 0.45 in end2end files, by head for the AP of raw ones",
    )
    opset: int = setting(18, help="ONNX opset; torch's exporter writes no valid files below 18")
    data: str = setting("", help="data set YAML to check and calibrate with; empty: the checkpoint's")
    check: bool = setting(True, help="compare the exported model with the checkpoint on 64 validation images")
    cache_dir: str = setting("", help="folder of index caches; empty: ~/.cache/lockstep")
