"""Every setting of the program, as dataclasses.

A field's metadata holds its help text, bounds and choices. Flags, YAML checks, help and the stored config all come from
these fields (`utils.config.parser`), so a setting cannot exist as a flag and not in the stored config, or be accepted
and not checked.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass
from typing import Any

from utils.errors import UserError

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
    formerly=(),
):
    """A dataclass field with what its flag or YAML key needs. Bounds are inclusive; ``also`` is one value beyond them
    that has a meaning of its own. ``bare``: the value of a flag that is given without one; None: a value is required.
    ``formerly``: names that the field had in older checkpoints and recipes, which are still read."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high}
    metadata |= {"also": also, "aliases": aliases, "bare": bare, "formerly": formerly}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What a hyp YAML may hold (``configs/hyp``). Names are YOLOv5's where the meaning is the same."""

    lr0: float | None = setting(None, low=0, help="initial learning rate; null: the optimiser's own")
    lr_mult: float = setting(
        1.0, low=0, formerly=("lr_share",), help="learning rate multiplier of parameters loaded from --weights"
    )
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


def check_image_size(imgsz: int, stride: int, *, least_cells: int = 1) -> None:
    """Raises UserError unless ``imgsz`` is a multiple of the model's largest stride, of ``least_cells`` at least."""
    least = least_cells * stride
    below = max(imgsz // stride * stride, least)
    if imgsz < least:
        raise UserError(f"--imgsz {imgsz}: is too small for the model's stride {stride}; use {least} or more")
    if imgsz % stride:
        raise UserError(
            f"--imgsz {imgsz}: is no multiple of the model's stride {stride}; use {below} or {below + stride}"
        )
