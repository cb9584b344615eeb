"""Checks the settings of a run against each other, its processes and the machine, and says which have no effect."""

from __future__ import annotations

import math

from data.render.user_transforms import UserTransforms
from engine.export.formats import require_packages
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.train.compile import check_compiler
from models.detector import Detector
from utils.config.epochs import last_early_validation
from utils.config.flags import unused_settings
from utils.config.settings import FIND_BATCH_SIZE, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import refuse
from utils.machine.devices import resolve_amp
from utils.machine.packages import require_package
from utils.strings import counted


def check_settings(ctx: DistributedContext, settings: RunSettings, *, resumes: bool = False) -> None:
    """Raises UserError for settings that conflict with each other, with the processes or with the machine. Reads no
    data, so that a mistake does not surface after hours of copying or scanning images.

    ``resumes``: whether the run continues; with ``--keep-old``, its command may then name the teacher's present place.
    """
    config = settings.config
    ranks = ctx.world_size
    batch_size = config.batch_size
    finds_batch_size = batch_size == FIND_BATCH_SIZE
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    shards = ranks // config.pipeline  # of a batch
    shards_text = counted(shards, "process") if config.pipeline == 1 else f"{counted(shards, 'pair')} of processes"
    refuse(
        [
            *_exclusive_flags(ctx, config, virtual_ranks, resumes=resumes),
            (
                config.keep_old and not config.weights,
                "--keep-old: name the model whose classes are kept with --weights",
            ),
            (
                finds_batch_size and ctx.device.type != "cuda",
                f"--batch-size -1: searches on a GPU only, and this run is on {ctx.device}; use a number",
            ),
            (
                ranks % config.pipeline,
                f"--pipeline 2: needs an even number of training processes, this run has {ranks}; start 2, 4, ... with "
                "torchrun or --spawn, or use --pipeline 1",
            ),
            (
                not finds_batch_size and batch_size < shards,
                f"--batch-size {batch_size}: is the total over {shards_text}, and each needs at least one image; use "
                f"{shards} or more",
            ),
            (
                not finds_batch_size and config.quad and batch_size % (4 * max(shards, 1)),
                f"--quad with --batch-size {batch_size} on {shards_text}: needs a multiple of {4 * shards}",
            ),
            (
                config.virtual_ranks and (virtual_ranks & (virtual_ranks - 1) or virtual_ranks % ranks),
                f"--virtual-ranks {virtual_ranks}: must be a power of two and a multiple of the number of processes "
                f"({ranks})",
            ),
            (
                not config.virtual_ranks and virtual_ranks & (virtual_ranks - 1),
                f"--deterministic on {ranks} processes: use 2, 4, 8, ...",
            ),
            (
                not finds_batch_size and virtual_ranks > batch_size,
                f"--virtual-ranks {virtual_ranks}: exceeds the batch size ({batch_size})",
            ),
            (
                ctx.is_distributed and config.sync_bn > 0 and ranks % config.sync_bn,
                f"--sync-bn {config.sync_bn}: does not divide the {ranks} processes of this run",
            ),
            (
                config.compile and config.sync_bn and ctx.is_distributed and (config.multi_scale or config.rect),
                "--compile and --sync-bn: the images must be of one size; leave out --multi-scale and --rect",
            ),
        ]
    )
    _check_machine(ctx, settings)


def _exclusive_flags(
    ctx: DistributedContext, config: TrainConfig, virtual_ranks: int, *, resumes: bool
) -> list[tuple[object, str]]:
    """Returns, for each pair of flags that exclude each other, whether both are given, and what to say then."""
    virtual = "--virtual-ranks" if config.virtual_ranks else "--deterministic"  # the latter, with several processes
    given = {
        virtual: virtual_ranks,
        "--batch-size -1": config.batch_size == FIND_BATCH_SIZE,
        "--compile": config.compile,
        "--device 0,1": len(ctx.devices) > 1,
        "--eval-ranks": ctx.eval_ranks,
        "--image-weights": config.image_weights,
        "--keep-old": config.keep_old,
        "--model": config.model,
        "--pipeline 2": config.pipeline > 1,
        "--repeat-factor": config.repeat_factor,
        "--single-cls": config.single_cls,
        "--sync-bn": config.sync_bn,
        "--teacher": config.teacher and not (config.keep_old and resumes),
    }
    exclusive = [
        (
            "--pipeline 2",
            [virtual, "--sync-bn", "--compile", "--teacher", "--keep-old", "--batch-size -1"],
            "each process has half of the model",
        ),
        (
            "--device 0,1",
            [virtual, "--sync-bn", "--compile", "--batch-size -1"],
            "needs one device per process, so start with torchrun or --spawn",
        ),
        ("--eval-ranks", ["--teacher", "--keep-old"], "the teacher runs in the training processes only"),
        ("--eval-ranks", ["--image-weights"], "images are chosen by the scores of the previous epoch"),
        ("--image-weights", ["--repeat-factor"], "both choose how often images are seen"),
        (virtual, ["--sync-bn"], "statistics are those of a shard, or of the whole batch"),
        ("--keep-old", ["--model"], "the model is that of --weights"),
        ("--keep-old", ["--teacher"], "the teacher is the model of --weights"),
        ("--keep-old", ["--single-cls"], "there are no new classes"),
    ]
    return [
        (given[flag] and given[other], f"{flag} and {other}: {reason}; leave out one of them")
        for flag, others, reason in exclusive
        for other in others
    ]


def _check_machine(ctx: DistributedContext, settings: RunSettings) -> None:
    """Raises UserError for settings that need a package, a device or a compiler that this machine does not have."""
    config = settings.config
    if ctx.is_main:
        if config.export:
            require_packages(config.export)
        if config.plots:
            require_package("matplotlib", "plots", "use --no-plots")
    if config.cache == "disk":
        require_package("lmdb", "--cache disk", "use --cache ram")
    if settings.hyp.albumentations:
        UserTransforms(settings.hyp.albumentations, config.seed)  # raises UserError if they are wrong
    resolve_amp(config.amp, ctx.device)
    if config.compile:
        check_compiler(ctx.device)


def unused_settings_of_run(ctx: DistributedContext, settings: RunSettings, model: Detector, *, tile: int) -> list[str]:
    """Returns the lines of `unused_settings` for a run. ``tile``: side of the tiles of the images, pixels; 0: whole
    images."""
    config = settings.config
    hyp = settings.hyp
    head = model.head
    epochs = math.inf if config.time else config.epochs
    has_mosaic = not config.rect and (hyp.mosaic > 0 or hyp.mixup > 0)
    in_mosaic = "mosaic_block" if head.refines else "mosaic_block close_mosaic"
    is_late = config.patience > last_early_validation(epochs, config.val_every) - config.val_every
    table = (
        (head.anchors is None, "autoanchor", "the model has no anchors"),
        (head.num_classes == 1, "cls_pw", "the model has one class"),
        (ctx.world_size == 1, "sync_bn zero", "there is one training process"),
        (
            is_late,
            "patience",
            "no validation comes so late in the run; choose a smaller one, or another --epochs or --val-every",
        ),
        (not config.weights, "lr_mult", "there is no --weights"),
        (not hyp.warmup_epochs, "warmup_momentum warmup_bias_lr", "warmup_epochs is 0"),
        (not (config.teacher or config.keep_old), "distill", "there is no --teacher or --keep-old"),
        (True, " ".join(sorted(head.unused_hyperparameters)), "the model's loss does not use it"),
        (model.channels != 3, "hsv_h hsv_s hsv_v", "images without three channels have no color"),
        (config.rect, "mosaic mixup", "--rect leaves mosaic and mixup out"),
        (not has_mosaic, in_mosaic, "no image is made of several"),
        (not hyp.scale, "close_scale", "scale is 0"),
        (not tile, "tile_visibility tile_backgrounds", "the data set's YAML has no 'tile'"),
    )
    return unused_settings(config, table, settings)
