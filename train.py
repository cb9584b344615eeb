"""Trains a detector: ``python train.py --data DATA.yaml --model yolov8n``, or under torchrun on several devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.cli import run_main
from utils.config import TrainConfig, given_flags, parse_config, to_dict
from utils.errors import UserError

if TYPE_CHECKING:  # torch and all that needs it are imported once the flags are known to be good
    from torch import nn

    from data.dataset_yaml import DatasetSpec
    from engine.checkpoint import Progress
    from engine.pictures import RunPictures
    from engine.run import Run
    from engine.schedule import Schedule
    from engine.step import TrainStep
    from engine.trainer import Trainer
    from engine.watchdog import Watchdog
    from models.detector import Detector
    from utils.distributed import DistributedContext
    from utils.stop_signals import StopSignals

NMS_CONFIDENCE, MAX_DETECTIONS = 0.001, 300
DEFAULT_MODEL = "yolov8n"


@dataclass(frozen=True)
class Pace:
    """How batches become steps of the optimiser."""

    accumulate: int  # batches a step; the last one of an epoch may have fewer
    steps: int  # an epoch
    total: int  # of the run


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse_config(TrainConfig, argv, "Trains a detector.")
    from engine.run import open_run
    from engine.watchdog import Watchdog
    from utils.distributed import DistributedContext, is_launched, one_voice, spawn
    from utils.stop_signals import StopSignals

    if config.spawn > 1 and not is_launched():
        spawn(run_main, config.spawn, (main, argv))
        return
    with StopSignals() as signals, Watchdog(signals) as watchdog:
        ctx = DistributedContext.from_environment(config.device, config.local_rank)
        with ctx.closing(), one_voice(ctx):
            watchdog.meet(ctx)
            train(ctx, open_run(ctx, config, given_flags(TrainConfig, argv)), signals, watchdog)


def train(ctx: DistributedContext, run: Run, signals: StopSignals, watchdog: Watchdog) -> None:
    prepare_process(ctx, run)
    spec = load_data(ctx, run)
    model = build_model(ctx, run, spec)
    train_loader, val_loader = build_loaders(ctx, run, spec, model)
    trainer = build_trainer(ctx, run, signals, watchdog, spec, model, train_loader, val_loader)
    pictures = illustrate(ctx, run, trainer)
    trainer.fit(on_epoch=pictures.after_epoch if pictures else None)
    if pictures:
        pictures.finish()
    trainer.tracker.close()
    report_end(run, trainer)


def prepare_process(ctx: DistributedContext, run: Run) -> None:
    """Logging, determinism, and the effective settings, printed once and stored with the run."""
    import torch
    import yaml

    from utils.logger import configure_logging, get_logger
    from utils.whole_file import write_whole

    configure_logging(ctx.is_main, run.folder / "train.log" if ctx.is_main else None)
    if run.config.threads or (shares_of(ctx, run.config) and ctx.device.type == "cpu"):
        # How many threads share a sum decides its rounding, so every number of processes must use as many.
        torch.set_num_threads(run.config.threads or 1)
    if run.config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it, or refuses matrix products
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif ctx.device.type == "cuda":
        torch.backends.cudnn.benchmark = not run.config.multi_scale
    log = get_logger()
    for line in run.lines:
        log.info("%s", line)
    if ctx.is_main:
        settings = {"config": to_dict(run.config), "hyp": to_dict(run.hyp)}
        write_whole(run.folder / "settings.yaml", yaml.safe_dump(settings, sort_keys=False))
        for name, values in settings.items():
            log.info("%s: %s", name, ", ".join(f"{k}={v}" for k, v in values.items()))
    log.info(
        "%d process(es), device %s, torch %s, run folder %s", ctx.world_size, ctx.device, torch.__version__, run.folder
    )


def shares_of(ctx: DistributedContext, config: TrainConfig) -> int:
    """Virtual ranks that the step is to be cut into, 0 for plain DDP. That is as many shares as processes, added in an
    order of its own, so it is taken only where neither ``--virtual-ranks`` nor ``--deterministic`` is asked for.

    Raises UserError for a number that this run cannot have.
    """
    wanted, world = config.virtual_ranks or ctx.world_size, ctx.world_size
    if not config.virtual_ranks and (world == 1 or not config.deterministic):
        return 0
    if wanted & (wanted - 1) or wanted % world:
        fix = f"--virtual-ranks {wanted}: must be a power of two that the {world} process(es) divide"
        raise UserError(fix if config.virtual_ranks else f"--deterministic on {world} processes: use 2, 4, 8, ...")
    if wanted > config.batch_size:
        raise UserError(f"--virtual-ranks {wanted}: more than the {config.batch_size} images of a batch")
    if config.sync_bn or config.sync_bn_group:
        raise UserError("--sync-bn takes statistics over the whole batch, virtual ranks over a share: choose one")
    if len(ctx.devices) > 1:
        raise UserError("--virtual-ranks: one device a process; start with torchrun instead of --device 0,1")
    return wanted


def load_data(ctx: DistributedContext, run: Run) -> DatasetSpec:
    from data.dataset_yaml import load_dataset_spec
    from data.demo import default_demo_root, ensure_demo
    from data.staging import stage_dataset
    from utils.distributed import torch_distributed_zero_first

    if run.config.stage:
        return stage_dataset(run.config.data, run.config.stage, ("train", "val"), ctx)
    if run.config.data != "demo":
        return load_dataset_spec(run.config.data)
    with torch_distributed_zero_first(ctx):
        return load_dataset_spec(ensure_demo(default_demo_root(run.config.cache_dir)))


def build_model(ctx: DistributedContext, run: Run, spec: DatasetSpec) -> Detector:
    """The detector on its device, with starting weights and frozen layers; resumed weights come later."""
    import torch

    from data.index import class_names
    from engine.resume import check_classes
    from models.detector import build_detector
    from models.recognition import model_of
    from models.stored_weights import read_weights
    from models.transfer import transfer_weights
    from utils.downloads import fetch_weights
    from utils.image_size import check_image_size
    from utils.logger import get_logger

    config, log = run.config, get_logger()
    names = class_names(spec, config.single_cls)
    if run.content:
        check_classes(run.path, run.content["names"], names, spec.source)
    stored = None
    if config.weights and run.content is None:
        stored = read_weights(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    if run.content:
        source = run.content["model_spec"]
    else:
        source = config.model or (model_of(stored) if stored else DEFAULT_MODEL)
    model = build_detector(source, len(names), names=names, seed=config.seed)
    check_image_size(config.imgsz, model.stride, least_cells=2)  # batch norm cannot take one picture of one cell
    log.info(
        "%s: %s parameters, %d classes",
        model.spec["name"], f"{sum(p.numel() for p in model.parameters()):,}", len(names),
    )  # fmt: skip
    if stored:
        for line in transfer_weights(model, stored).lines():
            log.info("%s", line)
    freeze(model, config.freeze)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(ctx.device, memory_format=layout)


def freeze(model: Detector, layers: list[int]) -> None:
    """Stops the weights and the batch statistics of ``layers``; a single number n means 0 to n - 1."""
    from models.freezing import freeze_layers
    from utils.logger import get_logger

    if any(not 0 <= layer <= len(model.model) - (len(layers) > 1) for layer in layers):
        raise UserError(f"--freeze {' '.join(map(str, layers))}: the model has layers 0 to {len(model.model) - 1}")
    frozen = set(range(layers[0])) if len(layers) == 1 else set(layers)
    if not frozen:
        return
    if len(frozen) == len(model.model):
        raise UserError(f"--freeze {' '.join(map(str, layers))}: would leave nothing to train")
    freeze_layers(model, frozen)
    get_logger().info("frozen: layers %s", ", ".join(map(str, sorted(frozen))))


def build_loaders(ctx: DistributedContext, run: Run, spec: DatasetSpec, model: Detector) -> tuple[Any, Any]:
    from data.loader import create_dataloader

    config = run.config
    shared = {
        "ctx": ctx,
        "imgsz": config.imgsz,
        "stride": model.stride,
        "hyp": run.hyp,
        "seed": config.seed,
        "epochs": config.epochs,
        "single_cls": config.single_cls,
        "cache": config.cache,
        "render_on": config.augment,
        "fuse": not config.deterministic,
        "cache_dir": config.cache_dir,
        "local_data": bool(config.stage),
        "workers": config.workers,
        "max_bad": config.max_bad,
        "pin_memory": ctx.device.type == "cuda",
    }
    train_loader, _ = create_dataloader(
        spec,
        "train",
        batch_size=config.batch_size,
        augment=True,
        rect=config.rect,
        image_weights=config.image_weights,
        quad=config.quad,
        multi_scale=config.multi_scale,
        **shared,
    )
    # Whole batches are dealt out to the ranks: their size must not depend on how many there are.
    val_loader, _ = create_dataloader(spec, "val", batch_size=config.batch_size, augment=False, rect=True, **shared)
    return train_loader, val_loader


def build_trainer(
    ctx: DistributedContext,
    run: Run,
    signals: StopSignals,
    watchdog: Watchdog,
    spec: DatasetSpec,
    model: Detector,
    train_loader: Any,
    val_loader: Any,
) -> Trainer:
    from engine.checkpoint import Checkpointer
    from engine.evaluator import Evaluator
    from engine.optim import choose_optimizer
    from engine.save_cadence import SaveCadence
    from engine.trackers import build_tracker
    from engine.trainer import Trainer
    from utils.logger import get_logger

    config = run.config
    if run.content is None:
        fit_anchors(run, model, train_loader)
    else:
        model.load_state_dict(run.content["model"])  # anchors included: the criterion copies them
    pace = pace_of(run, len(train_loader))
    rule = choose_optimizer(config.optimizer, pace.total)
    take_step = build_step(ctx, run, model, rule, pace)
    get_logger().info(
        "%s, %d steps (%d an epoch, %d batch(es) each), autocast %s",
        rule, pace.total, pace.steps, pace.accumulate, take_step.amp_dtype or "off",
    )  # fmt: skip
    progress = restore_progress(ctx, run, model, take_step, pace, train_loader)
    tracker = build_tracker(run.folder, enabled=ctx.is_main)
    tracker.truncate(progress.epoch + 1)
    description = {
        "model_spec": model.spec,
        "names": list(model.names),
        "imgsz": config.imgsz,
        "hyp": to_dict(run.hyp),
        "config": to_dict(config) | {"optimizer": rule},  # a longer run must not choose another one when it resumes
        "data": {"source": spec.source, "fingerprint": train_loader.index.fingerprint},
    }
    return Trainer(
        ctx=ctx,
        take_step=take_step,
        schedule=build_schedule(run, pace),
        optimizer=take_step.optimizer,
        ema=take_step.ema,
        train_loader=train_loader,
        val_loader=val_loader,
        evaluator=Evaluator(
            ground_truth=val_loader.index.ground_truth(),
            num_classes=model.num_classes,
            postprocess=find_objects,
            ctx=ctx,
            device=ctx.device,
            amp_dtype=take_step.amp_dtype,
            for_inference=lambda model: model.fuse(one_to_one=None),
            criterion=take_step.criterion,
        ),
        checkpointer=Checkpointer(
            run.folder, ctx=ctx, description=description, period=config.save_period, enabled=ctx.is_main
        ),
        saving=SaveCadence(
            minutes=config.save_minutes,
            steps=config.save_steps,
            has_clock=ctx.is_main,
            at_start=run.content is not None and run.path.resolve() != (run.folder / "last.pt").resolve(),
        ),
        signals=signals,
        watchdog=watchdog,
        stall_s=config.stall_minutes * 60,
        tracker=tracker,
        progress=progress,
        run_dir=run.folder,
        loss_names=take_step.criterion.names,
        epochs=config.epochs,
        accumulate=pace.accumulate,
        val_every=config.val_every,
        patience=config.patience,
        max_bad_steps=config.max_bad_steps,
        refining_epochs=run.hyp.close_mosaic,
        image_weights=config.image_weights,
        seconds=run.content.get("run", {}).get("seconds", 0.0) if run.content else 0.0,
    )


def pace_of(run: Run, epoch_batches: int) -> Pace:
    config = run.config
    accumulate = max(config.accumulate, round(config.nominal_batch / config.batch_size), 1)
    steps = -(-epoch_batches // accumulate)
    return Pace(accumulate, steps, steps * config.epochs)


def build_step(ctx: DistributedContext, run: Run, model: Detector, rule: str, pace: Pace) -> TrainStep:
    """The optimiser's step, by ``rule``, with the loss, the averaged weights and the model as its devices want it."""
    from engine.ema import ModelEma
    from engine.optim import DEFAULT_LR, build_optimizer
    from engine.precision import resolve_amp
    from engine.step import TrainStep
    from models.losses import build_criterion
    from utils.distributed import broadcast_object

    config, hyp = run.config, run.hyp
    optimizer = build_optimizer(
        model,
        rule,
        lr=DEFAULT_LR[rule] * hyp.lr_share if hyp.lr0 is None else hyp.lr0,
        momentum=hyp.momentum,
        weight_decay=hyp.weight_decay,
        sharded=config.zero and ctx.is_distributed,
    )
    ema = ModelEma(model, decay=hyp.ema_decay, tau=hyp.ema_tau)
    amp = broadcast_object(ctx, resolve_amp(config.amp, ctx.device))
    criterion = build_criterion(model, hyp, label_smoothing=config.label_smoothing).to(ctx.device)
    shares = shares_of(ctx, config)
    if config.compress_grads and (shares or not ctx.is_distributed):
        raise UserError("--compress-grads is for plain DDP: several processes, no --virtual-ranks or --deterministic")
    wrapped = model if shares else wrap_model(ctx, run, model, pace)
    if config.compile:
        model.compile()
    return TrainStep(
        model=wrapped,
        criterion=criterion,
        optimizer=optimizer,
        ema=ema,
        ctx=ctx,
        amp_dtype=amp,
        clip_norm=hyp.clip_norm,
        channels_last=config.channels_last,
        virtual_ranks=shares,
        skip_zero_grads=config.skip_zero_grads,
    )


def restore_progress(
    ctx: DistributedContext, run: Run, model: Detector, take_step: TrainStep, pace: Pace, train_loader: Any
) -> Progress:
    """Where the run stands, with the checkpoint's state put into its parts; the start of it without a checkpoint."""
    from engine.checkpoint import Progress, restore
    from engine.resume import resumed_position
    from utils.logger import get_logger

    if run.content is None:
        return Progress()
    parts = {"model": model, "ema": take_step.ema, "optimizer": take_step.optimizer, "scaler": take_step.scaler}
    progress, lines = resumed_position(
        restore(run.content, ctx=ctx, **parts, path=run.path),
        run.content,
        fingerprint=train_loader.index.fingerprint,
        batch_size=run.config.batch_size,
        epoch_batches=len(train_loader),
        accumulate=pace.accumulate,
        epochs=run.config.epochs,
    )
    for line in lines:
        get_logger().info("%s", line)
    return progress


def build_schedule(run: Run, pace: Pace) -> Schedule:
    from engine.schedule import Schedule

    hyp = run.hyp
    return Schedule(
        total_steps=pace.total,
        warmup_steps=min(round(hyp.warmup_epochs * pace.steps), pace.total // 4),
        final=hyp.lrf,
        cosine=run.config.cos_lr,
        momentum=hyp.momentum,
        warmup_momentum=hyp.warmup_momentum,
        warmup_bias_lr=hyp.warmup_bias_lr,
    )


def wrap_model(ctx: DistributedContext, run: Run, model: Detector, pace: Pace) -> nn.Module:
    """The model as its number of devices wants it."""
    import torch

    from engine.parallel import parallelise, unused_parameters
    from utils.groups import sync_bn_group
    from utils.logger import get_logger

    side = 2 * model.stride
    unused = unused_parameters(model, torch.zeros(1, 3, side, side, device=ctx.device)) if ctx.is_distributed else []
    if unused:
        get_logger().info("no output depends on %s: DDP looks for such parameters at every step", ", ".join(unused))
    config = run.config
    return parallelise(
        model,
        ctx,
        sync_bn=config.sync_bn or config.sync_bn_group > 0,
        sync_bn_group=sync_bn_group(ctx, config.sync_bn_group),
        unused=unused,
        static=pace.accumulate == 1,
        compress=config.compress_grads,
    )


def fit_anchors(run: Run, model: Detector, train_loader: Any) -> None:
    """Checks an anchor head's anchors against the training boxes; all processes come to the same ones."""
    if model.head.kind != "anchor":
        return
    import numpy as np

    from models.anchors import check_anchors
    from utils.logger import get_logger

    truth = train_loader.index.ground_truth()
    longest = np.repeat(truth.image_hw.max(1), np.diff(truth.offsets))
    sides = truth.boxes_xywh_px[:, 2:] * (run.config.imgsz / longest)[:, None]
    report = check_anchors(
        sides[~truth.crowd], model, anchor_t=run.hyp.anchor_t, refit=not run.config.noautoanchor, seed=run.config.seed
    )
    get_logger().info("%s", report.line)


def find_objects(model: nn.Module, raw: list) -> Any:
    """Raw maps to detections, as validation wants them."""
    from models.postprocess import select_detections, suppression_iou

    boxes, scores = model.decode(raw)
    return select_detections(
        boxes, scores, conf_thres=NMS_CONFIDENCE, iou_thres=suppression_iou(model.head), max_det=MAX_DETECTIONS
    )


def illustrate(ctx: DistributedContext, run: Run, trainer: Trainer) -> RunPictures | None:
    """On rank 0, what draws the run; data and graph are drawn at once."""
    from engine.pictures import RunPictures

    if not ctx.is_main or run.config.noplots:
        return None
    pictures = RunPictures(run.folder, trainer)
    if run.content is None:
        pictures.before(run.config.imgsz)
    return pictures


def report_end(run: Run, trainer: Trainer) -> None:
    from utils.logger import get_logger

    progress, log = trainer.progress, get_logger()
    if progress.best_epoch < 0:
        log.info("done: %d epochs, nothing could be scored; weights: %s", progress.epoch, trainer.checkpointer.last)
        return
    log.info(
        "done: %d epochs; best AP %.4f in epoch %d: %s",
        progress.epoch, progress.best_fitness, progress.best_epoch, trainer.checkpointer.best,
    )  # fmt: skip


if __name__ == "__main__":
    run_main(main)
