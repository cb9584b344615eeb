"""One typed source of every setting: dataclasses from which flags, YAML checks, help and the stored config come.

A field's metadata holds its help text, bounds and choices; `build_parser` and `hyperparameters_from` read nothing else,
so a setting cannot exist as a flag and not in the stored config, or be accepted and not checked.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import math
import re
import sys
import types
import typing
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from utils.errors import UserError
from utils.regular_file import read_regular
from utils.yolo_flags import advice, translated

T = TypeVar("T")
MOST_NESTED = 100  # levels of a YAML
MOST_VALUES = 200_000
MOST_BYTES = 1 << 24
_MOST_INTEGER = 2**63 - 1
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
FIND_BATCH_SIZE = -1  # as --batch-size


def setting(
    default: Any = MISSING,
    *,
    help: str,
    choices=None,
    low=None,
    high=None,
    also=None,
    aliases=(),
    factory=MISSING,
    bare=None,
):
    """A dataclass field with what its flag or YAML key needs. Bounds are inclusive; ``also`` is one value beyond them
    that has a meaning of its own. ``bare``: the value of a flag that is given without one; None: a value is wanted."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high}
    metadata |= {"also": also, "aliases": aliases, "bare": bare}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What a hyp YAML may hold (``configs/hyp``). Names are YOLOv5's where the meaning is the same."""

    lr0: float | None = setting(None, low=0, help="initial learning rate; null: the optimiser's own")
    lr_share: float = setting(1.0, low=0, help="share of the learning rate for what comes from --weights")
    lrf: float = setting(0.01, low=0, high=1, help="final learning rate as a share of lr0")
    momentum: float = setting(0.937, low=0, high=1, help="SGD and Muon momentum, Adam beta1")
    weight_decay: float = setting(0.0005, low=0, help="decay of weights that are not biases or norms")
    warmup_epochs: float = setting(3.0, low=0, help="warm-up length in epochs, fractions allowed")
    warmup_momentum: float = setting(0.8, low=0, high=1, help="momentum at step 0")
    warmup_bias_lr: float = setting(0.0, low=0, help="learning rate of biases at step 0")
    clip_norm: float = setting(10.0, low=0, help="gradient norm limit; 0 turns it off")
    ema_decay: float = setting(0.9999, low=0, high=1, help="EMA decay reached late in training")
    ema_tau: float = setting(2000.0, low=1e-9, help="EMA ramp in steps: decay * (1 - exp(-step / tau))")
    box: float = setting(7.5, low=0, help="box loss gain")
    cls: float = setting(0.5, low=0, help="class loss gain")
    dfl: float = setting(1.5, low=0, help="distance loss gain: DFL, or L1 where reg_max is 1 (anchor-free heads)")
    obj: float = setting(1.0, low=0, help="objectness loss gain (anchor heads, YOLOX)")
    one2one: float = setting(4.0, low=0, help="gain of the one-to-one branch's whole loss (models with end2end)")
    anchor_t: float = setting(4.0, low=1, help="largest width or height ratio of an anchor to its target")
    tal_topk: int = setting(10, low=1, help="candidates a target in task-aligned assignment")
    tal_alpha: float = setting(0.5, low=0, help="exponent of the class score in task-aligned assignment")
    tal_beta: float = setting(6.0, low=0, help="exponent of the IoU in task-aligned assignment")
    hsv_h: float = setting(0.015, low=0, high=0.5, help="hue jitter, share of the circle")
    hsv_s: float = setting(0.7, low=0, high=1, help="saturation jitter, share")
    hsv_v: float = setting(0.4, low=0, high=1, help="value jitter, share")
    degrees: float = setting(0.0, low=0, high=180, help="rotation, +- degrees")
    translate: float = setting(0.1, low=0, high=1, help="translation, +- share of the canvas")
    scale: float = setting(0.5, low=0, high=1, help="scale jitter, +- share")
    shear: float = setting(0.0, low=0, high=45, help="shear, +- degrees")
    perspective: float = setting(0.0, low=0, high=0.01, help="perspective coefficients, +-")
    flipud: float = setting(0.0, low=0, high=1, help="probability of an up-down flip")
    fliplr: float = setting(0.5, low=0, high=1, help="probability of a left-right flip")
    mosaic: float = setting(1.0, low=0, high=1, help="probability of a four-image mosaic")
    mosaic_block: int = setting(
        16,
        low=0,
        help="mosaic and mixup partners come from so many neighbours in the order, decoded once; 0: from all images",
    )
    mixup: float = setting(0.0, low=0, high=1, help="probability of mixing with a second picture")
    close_mosaic: int = setting(10, low=0, help="epochs at the end without mosaic and mixup")
    multi_scale_range: float = setting(0.5, low=0, high=0.9, help="--multi-scale: sizes within +- this share of imgsz")
    albumentations: list[dict] = setting(
        factory=list,
        help="pixel- or box-level transforms by name with arguments, e.g. [{name: Blur, p: 0.1}, {name: CLAHE}]",
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The flags of train.py. Names are YOLOv5's where the meaning is the same."""

    data: str = setting("demo", help="data set YAML, or 'demo' for the embedded set")
    model: str = setting(
        "", aliases=("--cfg",), help="model name (yolov8n, ...) or YAML file; empty: the model of --weights, or yolov8n"
    )
    weights: str = setting("", help="checkpoint to start from, or a public name such as yolov8n; empty: from scratch")
    hyp: str = setting("auto", help="scratch, finetune, debug or a YAML file; auto: as --weights asks for")
    override: list[str] = setting(factory=list, aliases=("--set",), help="hyper-parameters as key=value, over --hyp")
    epochs: int = setting(100, low=1, help="epochs in all")
    batch_size: int = setting(
        16,
        low=1,
        also=FIND_BATCH_SIZE,
        aliases=("--batch",),
        help="images a step over all processes; -1: as many as fit on the GPUs",
    )
    imgsz: int = setting(640, low=64, aliases=("--img", "--img-size"), help="square training size, pixels")
    rect: bool = setting(False, help="rectangular batches by aspect, shuffled")
    resume: str | None = setting(None, bare="", help="continue a run: a checkpoint, or no value for the newest run")
    device: str = setting("", help="cpu, 0, 0,1, mps; empty: the best there is")
    workers: int = setting(-1, low=-1, help="loader processes for each rank; -1: its share of the cores, 8 at most")
    cache: str = setting(
        "none",
        choices=("none", "ram", "disk", "device"),
        bare="ram",
        help="keep decoded images, one copy a node; bare: ram; device: in each GPU's memory (with --augment device)",
    )
    augment: str = setting("host", choices=("host", "device"), help="where mosaic, affine, colour and flips are done")
    cache_dir: str = setting("", help="where index and disk caches go; empty: ~/.cache/lockstep")
    stage: str = setting("", help="copy the data to this folder of each node's own disk first; may hold {node_rank}")
    image_weights: bool = setting(False, help="draw images by the weakness of their classes")
    multi_scale: bool = setting(False, help="vary the size from step to step")
    quad: bool = setting(False, help="collate four images into one of twice the size, in some samples")
    single_cls: bool = setting(False, help="treat all classes as one")
    max_bad: float = setting(0.1, low=0, high=1, help="share of bad images above which the run stops")
    verify: str = setting(
        "sample", choices=("sample", "full"), help="decode in the scan: images that look wrong and a sample, or all"
    )
    optimizer: str = setting("auto", choices=("auto", "SGD", "Adam", "AdamW", "Muon"), help="optimiser")
    cos_lr: bool = setting(False, help="cosine instead of linear schedule")
    accumulate: int = setting(1, low=1, help="batches a step of the optimiser")
    nominal_batch: int = setting(0, low=0, help="accumulate up to this many images a step; 0: never")
    amp: str = setting("auto", choices=("auto", "off", "bf16", "fp16"), help="autocast type; auto: bf16 if supported")
    channels_last: bool = setting(True, help="NHWC memory layout")
    compile: bool = setting(False, help="torch.compile the model, on a GPU with CUDA graphs if sizes are fixed")
    sync_bn: bool = setting(False, help="batch statistics over all processes")
    sync_bn_group: int = setting(0, low=0, help="batch statistics over groups of so many processes; 0: see --sync-bn")
    compress_grads: bool = setting(False, help="exchange gradients as bfloat16 (plain DDP): half the bytes")
    zero: bool = setting(False, help="shard the optimiser's state over the processes")
    virtual_ranks: int = setting(
        0, low=0, help="cut batches into so many shares; the bits are the same on any fewer processes; 0: one a process"
    )
    threads: int = setting(0, low=0, help="CPU threads a process; 0: torch's choice, 1 with virtual ranks on CPUs")
    skip_zero_grads: bool = setting(False, help="leave weights alone whose gradient is exactly zero")
    freeze: list[int] = setting(factory=list, help="layers to freeze: one number n freezes 0..n-1, several name layers")
    label_smoothing: float = setting(0.0, low=0, high=0.5, help="class label smoothing")
    patience: int = setting(0, low=0, help="stop after this many epochs without a better AP; 0: never")
    save_period: int = setting(0, low=0, help="also keep a checkpoint every n epochs; 0: never")
    save_minutes: float = setting(10.0, low=0, help="also save inside an epoch every so many minutes; 0: never")
    save_steps: int = setting(0, low=0, help="also save inside an epoch every n steps; 0: never")
    stall_minutes: float = setting(10.0, low=0, help="write down where a run hangs that has done no step for so long")
    val_every: int = setting(1, low=0, help="validate every n epochs and at the end; 0: at the end only")
    noplots: bool = setting(False, help="write no plots")
    noautoanchor: bool = setting(False, help="never refit anchors")
    seed: int = setting(0, low=0, help="every random choice follows from it")
    deterministic: bool = setting(False, help="deterministic kernels")
    max_bad_steps: int = setting(20, low=1, help="non-finite steps in a row that stop the run")
    project: str = setting("runs/train", help="folder of runs")
    name: str = setting("exp", help="name of this run")
    exist_ok: bool = setting(False, help="write into an existing run folder")
    offline: bool = setting(False, help="never download weights")
    spawn: int = setting(0, low=0, help="start this many processes on this machine without torchrun")
    local_rank: int | None = setting(None, help="set by the old launcher")
    local_world_size: int | None = setting(None, low=1, help="processes a machine, as old launchers' examples pass it")


@dataclass(frozen=True, kw_only=True)
class ValConfig:
    """The flags of val.py."""

    weights: str = setting(help="checkpoint to score")
    data: str = setting("", help="data set YAML; empty: the checkpoint's")
    task: str = setting("val", choices=("train", "val", "test"), help="split")
    batch_size: int = setting(16, low=1, aliases=("--batch",), help="images a batch on one process")
    imgsz: int = setting(0, low=0, aliases=("--img", "--img-size"), help="longer side, pixels; 0: the checkpoint's")
    rect: bool = setting(True, help="batches by aspect, padded as little as possible")
    conf_thres: float = setting(0.001, low=0, high=1, aliases=("--conf",), help="confidence threshold")
    iou_thres: float | None = setting(
        None, low=0, high=1, aliases=("--iou",), help="NMS IoU threshold; default: by head (0.7, 0.6, or no NMS)"
    )
    nms: bool = setting(False, help="NMS-free models: score their one-to-many head with NMS")
    tta: bool = setting(
        False, aliases=("--augment",), help="look at each image thrice: as it is, mirrored, mirrored and larger"
    )
    max_det: int = setting(300, low=1, help="detections an image")
    single_cls: bool = setting(False, help="treat all classes as one")
    device: str = setting("", help="cpu, 0, 0,1, mps; empty: the best there is")
    workers: int = setting(-1, low=-1, help="loader processes for each rank; -1: its share of the cores, 8 at most")
    amp: str = setting("off", choices=("auto", "off", "bf16", "fp16"), help="autocast type")
    cache_dir: str = setting("", help="where the index cache goes; empty: ~/.cache/lockstep")
    stage: str = setting("", help="copy the data to this folder of each node's own disk first; may hold {node_rank}")
    max_bad: float = setting(0.1, low=0, high=1, help="share of bad images above which the run stops")
    verify: str = setting(
        "sample", choices=("sample", "full"), help="decode in the scan: images that look wrong and a sample, or all"
    )
    save_json: bool = setting(True, help="write predictions.json in COCO's format")
    noplots: bool = setting(False, help="write no plots")
    per_size: bool = setting(False, help="print and write AP and AR of small, medium and large objects of each class")
    verbose: bool = setting(True, help="print a line a class")
    project: str = setting("runs/val", help="folder of runs")
    name: str = setting("exp", help="name of this run")
    exist_ok: bool = setting(False, help="write into an existing run folder")
    offline: bool = setting(False, help="never download weights")
    spawn: int = setting(0, low=0, help="start this many processes on this machine without torchrun")
    local_rank: int | None = setting(None, help="set by the old launcher")
    local_world_size: int | None = setting(None, low=1, help="processes a machine, as old launchers' examples pass it")


@dataclass(frozen=True, kw_only=True)
class DetectConfig:
    """The flags of detect.py."""

    weights: str = setting(help="checkpoint, or a public name such as yolov8n")
    source: str = setting(help="image, folder, glob, video, .txt list, stream URL, or a webcam number")
    imgsz: int = setting(0, low=0, aliases=("--img", "--img-size"), help="longer side, pixels; 0: the checkpoint's")
    conf_thres: float | None = setting(
        None,
        low=0,
        high=1,
        aliases=("--conf",),
        help="confidence threshold; default: that of the best F1 in the checkpoint's validation, else 0.25",
    )
    iou_thres: float | None = setting(
        None, low=0, high=1, aliases=("--iou",), help="NMS IoU threshold; default: 0.45, of NMS-free models no NMS"
    )
    nms: bool = setting(False, help="NMS-free models: detect with their one-to-many head and NMS")
    max_det: int = setting(300, low=1, help="detections an image")
    classes: list[int] = setting(factory=list, help="keep these classes only")
    agnostic_nms: bool = setting(False, help="suppress across classes")
    device: str = setting("", help="cpu, 0, mps; empty: the best there is")
    amp: str = setting("off", choices=("auto", "off", "bf16", "fp16"), help="autocast type")
    save_txt: bool = setting(False, help="write YOLO txt labels")
    save_conf: bool = setting(False, help="append confidences to the txt rows")
    save_json: bool = setting(False, help="write predictions.json")
    save_crop: bool = setting(False, help="write the crop of each detection")
    nosave: bool = setting(False, help="write no annotated media")
    offline: bool = setting(False, help="never download weights")
    view_img: bool = setting(False, help="show results in a window")
    line_thickness: int = setting(0, low=0, help="box line width, pixels; 0: by image size")
    hide_labels: bool = setting(False, help="draw boxes without labels")
    hide_conf: bool = setting(False, help="draw labels without confidences")
    vid_stride: int = setting(1, low=1, help="take every n-th frame of a video")
    max_frames: int = setting(0, low=0, help="stop a video or stream after n frames; 0: never")
    project: str = setting("runs/detect", help="folder of runs")
    name: str = setting("exp", help="name of this run")
    exist_ok: bool = setting(False, help="write into an existing run folder")


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name closest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def load_yaml(path: str | Path) -> Any:
    """Parses a YAML file. Raises UserError naming file and line when it is missing or malformed."""
    try:
        return _parse_yaml(read_regular(path, most=MOST_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, a YAML file is wanted") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{mark.line + 1}: " if mark else " "
        raise UserError(f"{path}:{line}{getattr(error, 'problem', None) or 'malformed YAML'}") from None


def _parse_yaml(text: str) -> Any:
    """As ``yaml.safe_load``, ten times faster where PyYAML came with libyaml; a repeated key is a mistake. Raises
    RecursionError for text nested deeper than any setting; libyaml's loader would end the process."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _checked_text(_loaded(text, loader))
    except yaml.YAMLError:  # libyaml sees mistakes in other lines
        return _checked_text(_loaded(text, yaml.SafeLoader))


def _loaded(text: str, loader: type) -> Any:
    if sum(map(text.count, "[{-?")) + max(len(row) - len(row.lstrip()) for row in text.split("\n")) > MOST_NESTED:
        _check_nesting(text, loader)
    return yaml.load(text, Loader=_once_each(loader))


def _checked_text(value: Any) -> Any:
    """``value``, of a YAML, if it can be written out: aliases may make it contain itself, or repeat parts billions of
    times; texts may hold what no file or terminal takes. Raises yaml.YAMLError."""
    sizes: dict[int, int] = {}  # of each list and mapping; 0 while it is being counted

    def size(part: Any) -> int:
        if isinstance(part, str):
            if "\0" in part or (not part.isprintable() and _HALF_CHARACTER.search(part)):
                raise yaml.constructor.ConstructorError(problem="text with a NUL or half a character")
            return 1
        if isinstance(part, int) and not -_MOST_INTEGER <= part <= _MOST_INTEGER:
            raise yaml.constructor.ConstructorError(problem="a number of more than 64 bits")
        if not isinstance(part, dict | list | tuple | set):
            return 1
        known = sizes.get(id(part))
        if known == 0:
            raise yaml.constructor.ConstructorError(problem="an alias refers to what it is part of")
        if known is None:
            sizes[id(part)] = 0
            parts = [*part.keys(), *part.values()] if isinstance(part, dict) else part
            known = sizes[id(part)] = 1 + sum(map(size, parts))
            if known > MOST_VALUES:
                raise yaml.constructor.ConstructorError(
                    problem=f"its aliases expand to more than {MOST_VALUES:,} values"
                )
        return known

    size(value)
    return value


@functools.cache
def _once_each(base: type) -> type:
    """The safe loader ``base``, refusing mappings that have a key twice: YAML would keep the last without a word."""

    class Strict(base):
        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._checked: set[int] = set()

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Comes before what ``<<`` merges in, which a mapping's own keys may replace, is put among them."""
            if id(node) not in self._checked:
                self._checked.add(id(node))
                lines: dict[tuple[str, str], int] = {}  # of each scalar key's tag and text
                for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                    first = lines.get((key.tag, key.value))
                    if first is not None:
                        problem = f"key '{key.value}' is there twice (first in line {first}); remove one"
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    lines[key.tag, key.value] = key.start_mark.line + 1
            super().flatten_mapping(node)
            if len(node.value) > MOST_VALUES:
                raise yaml.constructor.ConstructorError(None, None, "its merges are too many", node.start_mark)

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep=deep)
            except (ValueError, TypeError, AttributeError, OverflowError, KeyError, IndexError):
                kind = node.tag.rpartition(":")[2]
                problem = f"{str(node.value)[:60]!r} is no {kind} that can be read; put it in quotes if it is text"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    return Strict


def _check_nesting(text: str, loader: type) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise RecursionError


def _type_of(field: dataclasses.Field, owner: type) -> tuple[type, bool]:
    """The plain type of a field (list element types dropped to list) and whether None is allowed."""
    hint = typing.get_type_hints(owner)[field.name]
    if isinstance(hint, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return inner[0], True
    return hint, False


def _check(value: Any, field: dataclasses.Field, owner: type, where: str) -> Any:
    """``value`` as the field's type, or a UserError that begins with ``where``."""
    kind, optional = _type_of(field, owner)
    if value is None and optional:
        return None
    origin = typing.get_origin(kind) or kind
    if origin is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):  # YAML 1.1 reads "1e-3" as text
            value = float(value)
    if not isinstance(value, origin) or (origin in (int, float) and isinstance(value, bool)):
        raise UserError(f"{where}: wants {getattr(origin, '__name__', origin)}, got {value!r}")
    if origin is float and math.isinf(value):
        raise UserError(f"{where}: wants a finite number, got {value!r}")
    meta = field.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise UserError(f"{where}: wants one of {', '.join(meta['choices'])}, got {value!r}")
    if value == meta["also"]:
        return value
    if meta["low"] is not None and not value >= meta["low"]:
        instead = "" if meta["also"] is None else f" or {meta['also']}"
        raise UserError(f"{where}: wants at least {meta['low']}{instead}, got {value!r}")
    if meta["high"] is not None and not value <= meta["high"]:
        raise UserError(f"{where}: wants at most {meta['high']}, got {value!r}")
    return value


def from_mapping(cls: type[T], values: Any, where: str) -> T:
    """A checked config from a mapping; unknown keys and wrong types raise UserError naming ``where``."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(f"{where}: wants 'key: value' lines, got {type(values).__name__}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise UserError(f"{where}: unknown key '{key}'{suggestion(str(key), known)}")
    return cls(**{k: _check(v, known[k], cls, f"{where}: {k}") for k, v in values.items()})


def hyperparameters_from(path: str, overrides: typing.Sequence[str] = ()) -> Hyperparameters:
    """Defaults, then the YAML at ``path`` (if any), then ``key=value`` overrides, each value read as YAML."""
    values = (load_yaml(path) if path else {}) or {}
    return with_overrides(from_mapping(Hyperparameters, values, path or "hyper-parameters"), overrides)


def with_overrides(hyp: Hyperparameters, overrides: typing.Sequence[str]) -> Hyperparameters:
    """``hyp`` with ``key=value`` on top, each value read as YAML."""
    changed = {}
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator:
            raise UserError(f"--set {item}: wants key=value")
        try:
            changed[key.strip()] = _parse_yaml(text)
        except yaml.YAMLError:
            raise UserError(f"--set {item}: the value is malformed YAML") from None
        except RecursionError:
            raise UserError(f"--set {key}: the value is nested too deeply") from None
    checked = from_mapping(Hyperparameters, changed, "--set")
    return dataclasses.replace(hyp, **{k: getattr(checked, k) for k in changed})


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors and exit code 2, suggestions for misspelt flags, ``_`` as good as ``-`` in them.
    ``script``: whose flags these are, as `utils.yolo_flags` names it."""

    def __init__(self, *, script: str, **options: Any) -> None:
        super().__init__(**options)
        self._script = script

    def parse_known_args(self, args=None, namespace=None):
        given = [_dashed(a) for a in (sys.argv[1:] if args is None else args)]
        given = translated(self._script, given)
        hyperparameters = {f.name for f in dataclasses.fields(Hyperparameters)}
        if line := advice(self._script, given, self._option_string_actions, hyperparameters):
            self.error(line)
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> typing.NoReturn:
        if message.startswith("unrecognized arguments: "):
            flag = message.split(": ", 1)[1].split()[0].split("=")[0]
            message += suggestion(flag, self._option_string_actions)
        self.exit(2, f"error: {message}\n")


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, separator, value = argument.partition("=")
    return flag.replace("_", "-") + separator + value


def build_parser(cls: type, description: str) -> argparse.ArgumentParser:
    """A parser with one flag a field: ``--batch-size`` and ``--batch_size`` both work; booleans take --x and --no-x."""
    parser = _Parser(
        script=cls.__name__.removesuffix("Config").lower(),
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(cls):
        kind, _ = _type_of(field, cls)
        origin = typing.get_origin(kind) or kind
        meta = field.metadata
        names = ["--" + field.name.replace("_", "-"), *meta["aliases"]]
        required = field.default is MISSING and field.default_factory is MISSING
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        options: dict[str, Any] = {"dest": field.name, "help": meta["help"]}
        options |= {"required": True} if required else {"default": default}
        if origin is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif origin is list:
            element = (typing.get_args(kind) or (str,))[0]
            options |= {"nargs": "+", "type": element}
            if field.name == "override":
                options |= {"action": "extend", "metavar": "KEY=VALUE"}
        else:
            options |= {"type": origin, "choices": meta["choices"]}
            if meta["bare"] is not None:
                options |= {"nargs": "?", "const": meta["bare"]}
        parser.add_argument(*names, **options)
    return parser


def parse_config(cls: type[T], argv: typing.Sequence[str] | None, description: str) -> T:
    """Command line to checked config. Raises UserError for values out of range; argparse exits for misspelt flags."""
    values = vars(build_parser(cls, description).parse_args(argv))
    known = {f.name: f for f in dataclasses.fields(cls)}
    return cls(**{k: _check(v, known[k], cls, "--" + k.replace("_", "-")) for k, v in values.items()})


def given_flags(cls: type, argv: typing.Sequence[str] | None) -> set[str]:
    """Names of the fields that the command line sets, as against those left at their defaults."""
    parser = build_parser(cls, "")
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    return set(vars(parser.parse_args(argv)))


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data (for YAML and checkpoints), lists copied."""
    return dataclasses.asdict(config)
