"""The keyword arguments of `lockstep.train`, `resume`, `val`, `export` and `check`, for editors and type checkers.

This module is generated from the dataclasses of settings in utils/config by tests/helpers/settings_types.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict


class Hyperparameters(TypedDict, total=False):
    lr0: float | None
    """initial learning rate; None: the default of the optimizer"""
    lr_factor: float | None
    """factor on the learning rate, however it was chosen"""
    lr_mult: float | None
    """learning rate factor of loaded weights; None: chosen by how well they detect"""
    lrf: float | None
    """final learning rate as a fraction of lr0"""
    momentum: float | None
    """momentum of SGD and Muon, beta1 of Adam"""
    weight_decay: float | None
    """weight decay; biases and norms are not decayed"""
    warmup_epochs: float | None
    """length of the warm-up in epochs, at most a quarter of the run"""
    warmup_momentum: float | None
    """momentum at step 0"""
    warmup_bias_lr: float | None
    """learning rate of biases at step 0"""
    bn_momentum: float | None
    """weight of a batch in the running statistics of batch norm"""
    clip_norm: float | None
    """maximum norm of the gradients; 0: no clipping"""
    ema_decay: float | None
    """final decay of the weight EMA"""
    ema_tau: float | None
    """EMA ramp in steps: decay * (1 - exp(-step / tau))"""
    box: float | None
    """box loss gain"""
    cls: float | None
    """class loss gain"""
    dfl: float | None
    """distance loss gain (anchor-free heads): DFL, or L1 if reg_max is 1"""
    obj: float | None
    """objectness loss gain (anchor heads, YOLOX)"""
    distill: float | None
    """gain of the distillation loss (`teacher`, `keep_old`)"""
    one2one: float | None
    """gain of the one-to-one loss (models with end2end)"""
    anchor_t: float | None
    """maximum width or height ratio between an anchor and its target"""
    tal_topk: int | None
    """candidates per target in task-aligned assignment"""
    hsv_h: float | None
    """hue jitter, +- fraction of the color circle"""
    hsv_s: float | None
    """saturation jitter, +- fraction"""
    hsv_v: float | None
    """value jitter, +- fraction"""
    degrees: float | None
    """rotation, +- degrees"""
    translate: float | None
    """translation, +- fraction of the canvas"""
    scale: float | None
    """scale jitter, +- fraction"""
    shear: float | None
    """shear, +- degrees"""
    perspective: float | None
    """perspective coefficients, +-"""
    flipud: float | None
    """probability of a vertical flip"""
    fliplr: float | None
    """probability of a horizontal flip; off by default if flips exchange classes"""
    mosaic: float | None
    """probability of a four-image mosaic"""
    mosaic_block: int | None
    """draw mosaic and mixup partners from blocks of n samples; 0: from all images"""
    mixup: float | None
    """probability of blending two samples"""
    close_mosaic: int | None
    """disable mosaic and mixup in the last n epochs; None: 10, at most half of the run"""
    close_scale: int | None
    """shrink the scale jitter over the last n epochs; None: 10, at most half of the run"""
    tile_visibility: float | None
    """ignore objects of which a tile shows a smaller fraction"""
    tile_backgrounds: float | None
    """tiles without objects per epoch, at most this multiple of those with objects"""
    albumentations: list[dict] | None
    """pixel- or box-level transforms, e.g. [{name: Blur, p: 0.1}, {name: CLAHE}]"""


class Downloads(TypedDict, total=False):
    offline: bool | None
    """never download weights"""


class RunSettings(Downloads, total=False):
    name: str | None
    """name of this run"""
    exist_ok: bool | None
    """write into an existing run folder, and overwrite its files"""


class LossLimit(TypedDict, total=False):
    max_bad: float | None
    """stop if more than this fraction of the images or labels cannot be used"""


class DataFlags(LossLimit, RunSettings, total=False):
    classes: str | int | Sequence[str | int] | None
    """use only these classes of the data set, by number or name"""
    single_cls: bool | None
    """treat all classes as one"""
    cache_dir: str | PathLike[str] | None
    """folder of index and disk caches; empty: ~/.cache/lockstep"""
    device: str | int | Sequence[int] | None
    """cpu, mps, 0 or 0,1; empty: the best available device"""
    workers: int | None
    """loader workers per rank; -1: its share of the cores, at most 8, or 16 with GPUs"""
    plots: bool | None
    """write plots and report.html"""
    stage: str | PathLike[str] | None
    """copy the data to this folder on each node's local disk first; may contain {node_rank}"""
    spawn: int | None
    """start this many processes on this machine without torchrun"""


class TrainSettings(DataFlags, Hyperparameters, total=False):
    fraction: float | None
    """random fraction of the training images to train on"""
    val_fraction: float | None
    """without 'val': hold out this fraction of the training images"""
    model: str | PathLike[str] | None
    """model name or YAML; empty: the model of `weights`, or yolov8n"""
    weights: str | PathLike[str] | None
    """checkpoint to start from, or a public name such as yolov8n; empty: from scratch"""
    teacher: str | PathLike[str] | None
    """trained, usually larger model whose outputs are additional targets"""
    keep_old: bool | None
    """learn new classes without losing those of `weights`"""
    hyp: str | PathLike[str] | None
    """recipe in configs/hyp or YAML; auto: by `keep_old` and `weights`"""
    epochs: int | None
    """number of epochs"""
    time: float | None
    """train for as many epochs as fit into this many hours; 0: `epochs`"""
    batch_size: int | None
    """images per global batch; -1: as many as fit"""
    imgsz: int | None
    """size of square training images, pixels"""
    rect: bool | None
    """shuffled rectangular batches of images with similar aspect ratios"""
    cache: Literal["none", "ram", "disk"] | bool | None
    """keep decoded images, one copy per node"""
    image_weights: bool | None
    """sample images of classes with low AP more often"""
    repeat_factor: float | None
    """repeat images of classes that occur in less than this fraction of the images; 0: off"""
    cls_pw: float | None
    """weight classes in the loss by 1 / frequency to this power"""
    multi_scale: float | bool | None
    """vary the image size between steps by up to +- this fraction of `imgsz`"""
    quad: bool | None
    """merge some groups of four images into one image of twice the side"""
    optimizer: Literal["auto", "SGD", "Adam", "AdamW", "Muon"] | None
    """optimizer"""
    cos_lr: bool | None
    """decay the learning rate by a cosine instead of linearly"""
    nominal_batch: int | None
    """images over which a step accumulates gradients; 0: one batch"""
    amp: Literal["auto", "off", "bf16", "fp16"] | None
    """autocast type; auto: bf16 if supported, fp16 on older GPUs"""
    compile: bool | None
    """torch.compile the model, with CUDA graphs on a GPU if sizes are fixed"""
    sync_bn: int | bool | None
    """synchronize batch norm over all processes or groups of n; 0: off"""
    zero: bool | None
    """shard the optimizer state over the processes (ZeRO stage 1)"""
    virtual_ranks: int | None
    """cut each batch into n shards; bitwise equal on 1, 2, 4, ... n processes; 0: one per process"""
    pipeline: int | None
    """2: split the model's layers between two processes"""
    threads: int | None
    """CPU threads per process; 0: torch's default, 1 with virtual ranks on CPUs"""
    skip_zero_grads: bool | None
    """skip weight updates where the gradient is exactly zero"""
    freeze: int | Sequence[int] | None
    """layers to freeze: one number n freezes 0..n-1, several (or a Python list) name layers"""
    label_smoothing: float | None
    """label smoothing of the classes"""
    fitness: str | None
    """metric for best.pt and `patience`: AP, AP50, AP75, F1, precision or recall; of one class: AP:NAME"""
    patience: int | None
    """stop after this many epochs without a better `fitness`; 0: never"""
    save_period: int | None
    """keep a checkpoint every n epochs; 0: never"""
    save_minutes: float | None
    """also save within an epoch every n minutes; 0: never"""
    eval_ranks: int | None
    """the last n processes only validate, while the others train"""
    val_every: int | None
    """validate every n epochs and at the end; 0: at the end only"""
    autoanchor: bool | None
    """refit anchors that fit the boxes badly"""
    export: (
        Literal["onnx", "openvino", "torchscript", "pt2", "ncnn", "litert"]
        | Sequence[Literal["onnx", "openvino", "torchscript", "pt2", "ncnn", "litert"]]
        | None
    )
    """export best.pt to these formats at the end; tested before the first epoch"""
    seed: int | None
    """seed of all random numbers"""
    deterministic: bool | None
    """use deterministic kernels"""
    tracker: Literal["mlflow", "wandb"] | Sequence[Literal["mlflow", "wandb"]] | None
    """services that also receive settings, results and reports"""
    project: str | PathLike[str] | None
    """folder of runs"""


class DetectionsSettings(RunSettings, total=False):
    trust: bool | None
    """open OpenVINO, TorchScript, .pt2, ncnn and TFLite files; they can run code"""
    box_voting: bool | None
    """let boxes suppressed by NMS refine the kept box and raise its score"""
    nms: bool | None
    """use the one-to-many head of NMS-free models, with NMS"""
    max_det: int | None
    """maximum number of detections per image or, with tiles, per tile"""
    amp: Literal["auto", "off", "bf16", "fp16"] | None
    """autocast type"""
    tile: int | None
    """cut images into overlapping tiles of n x n pixels; 0: off; default: as in training"""
    overlap: float | None
    """overlap of neighboring tiles as a fraction of their size; default: 0.2"""
    tile_full_image: bool | None
    """also use the whole image, scaled to `imgsz`"""


class ValSettings(DetectionsSettings, DataFlags, total=False):
    task: Literal["train", "val", "test"] | None
    """split to evaluate"""
    batch_size: int | None
    """images per batch and process"""
    imgsz: int | None
    """longer image side, pixels; 0: the checkpoint's"""
    rect: bool | None
    """rectangles; `no_rect`: squares; default: by head (YOLOX: squares)"""
    conf_thres: float | None
    """count only detections above it; other values than the default also set the threshold of P, R and F1"""
    iou_thres: float | None
    """NMS IoU threshold; default: by head for AP, detect.py's for P, R and F1"""
    tta: bool | None
    """test-time augmentation: add a flipped view and a flipped, enlarged one"""
    save_json: bool | None
    """write predictions.json in COCO format"""
    project: str | PathLike[str] | None
    """folder of runs"""


class ExportSettings(Downloads, total=False):
    format: (
        Literal["onnx", "openvino", "torchscript", "pt2", "ncnn", "litert"]
        | Sequence[Literal["onnx", "openvino", "torchscript", "pt2", "ncnn", "litert"]]
        | None
    )
    """one or more file formats"""
    imgsz: int | Sequence[int] | None
    """image size, or height and width, pixels; default: the checkpoint's"""
    batch: int | None
    """batch size of the exported model"""
    dynamic: bool | None
    """any batch, and any sides that are multiples of the stride"""
    half: bool | None
    """float16 weights and convolutions"""
    int8: bool | None
    """8-bit convolutions, calibrated on training images (onnx, openvino, litert)"""
    layout: Literal["raw", "end2end"] | None
    """output: all boxes and scores, or at most 300 detections after NMS"""
    nms: bool | None
    """export the one-to-many head of NMS-free models, which needs NMS"""
    iou_thres: float | None
    """NMS IoU threshold; default: 0.45 in end2end files, by head for the AP of raw ones"""
    opset: int | None
    """ONNX opset; torch's exporter writes no valid files below 18"""
    data: str | PathLike[str] | None
    """data set YAML to check and calibrate with; empty: the checkpoint's"""
    check: bool | None
    """compare the exported model with the checkpoint on validation images"""
    check_images: int | None
    """number of validation images to compare on"""
    calibration_images: int | None
    """number of training images for `int8`"""
    cache_dir: str | PathLike[str] | None
    """folder of index caches; empty: ~/.cache/lockstep"""


class CheckSettings(TypedDict, total=False):
    split: str | Sequence[str] | None
    """splits to check; default: all"""
    imgsz: int | None
    """longer image side in training, pixels; 0: the checkpoint's, or 640"""
    weights: str | PathLike[str] | None
    """checkpoint trained on this data; adds the label errors it finds"""
    trust: bool | None
    """open OpenVINO, TorchScript, .pt2, ncnn and TFLite files; they can run code"""
    min_score: float | None
    """minimum score of the label errors that are reported"""
    device: str | int | Sequence[int] | None
    """cpu, mps or 0, for `weights`; empty: the best available device"""
    workers: int | None
    """threads that read images; -1: one per core"""
    out: str | PathLike[str] | None
    """folder for report.html; empty: runs/check/exp, exp2, ..."""
    plots: bool | None
    """write report.html"""
