"""Trains a detector: ``python train.py --data DATA.yaml --model yolov8n``, or under torchrun on several devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from utils.config.parser import given_flags, parse_config
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.launch import is_launched
from utils.distributed.spawn import spawn
from utils.entrypoint import run_main
from utils.errors import errors_of

if TYPE_CHECKING:  # torch and all that needs it are imported once the flags are known to be good
    from torch import Tensor, nn

    from data.index.dataset_yaml import DatasetSpec
    from data.loading.loader import InfiniteDataLoader
    from engine.checkpoint.run import Run
    from engine.trainer import Trainer
    from engine.watchdog import Watchdog
    from models.detector import Detector
    from utils.distributed.context import DistributedContext
    from utils.distributed.stop_signals import StopSignals


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse_config(TrainConfig, argv, "Trains a detector.")
    if config.spawn > 1 and not is_launched():
        spawn(run_main, config.spawn, (main, argv))
        return
    from engine.checkpoint.run import open_run
    from engine.checks import check_same_start
    from engine.watchdog import Watchdog
    from utils.distributed.context import DistributedContext, one_voice
    from utils.distributed.stop_signals import StopSignals
    from utils.machine.limits import explained, smaller

    with StopSignals() as signals, Watchdog(signals) as watchdog:
        ctx = DistributedContext.from_environment(config.device, config.local_rank, config.local_world_size)
        with ctx.closing(), one_voice(ctx):
            watchdog.meet(ctx)
            check_same_start(ctx, config)
            with open_run(ctx, config, given_flags(TrainConfig, argv)) as run:
                size = run.config.batch_size, run.config.imgsz
                with explained(partial(smaller, *size, least_batch=ctx.world_size, device=ctx.device.type)):
                    train(ctx, run, signals, watchdog)


def train(ctx: DistributedContext, run: Run, signals: StopSignals, watchdog: Watchdog) -> None:
    from data.loading.run_loaders import build_loaders
    from engine.checks import check_same_model, check_same_run, idle_on_head, idle_settings
    from engine.process import open_folder, prepare_process
    from engine.reporting.plots import illustrate
    from utils.logger import get_logger

    check_same_run(ctx, run)
    check_settings(ctx, run)
    prepare_process(ctx, run)
    spec = open_data(ctx, run)
    model, pretrained = build_model(ctx, run, spec)
    check_same_model(ctx, model, weights_from_files(run, model, pretrained))
    run = settle_batch_size(ctx, run, model)
    idle = [*idle_settings(ctx, run.config, run.hyp), *idle_on_head(model.head, run.config)]
    for line in idle if ctx.is_main else ():
        get_logger().warning("%s", line)
    train_loader, val_loader = build_loaders(ctx, run.config, run.hyp, spec, stride=model.stride)
    settle_weights(run, model, train_loader)
    with open_folder(ctx, run) as run:
        trainer = make_trainer(ctx, run, signals, watchdog, spec, model, pretrained, train_loader, val_loader)
        pictures = illustrate(ctx, run, trainer)
        trainer.fit(on_epoch=pictures.after_epoch if pictures else None)
        if pictures:
            pictures.finish()
        trainer.tracker.close()
        report_end(trainer)


def check_settings(ctx: DistributedContext, run: Run) -> None:
    """Refuses what settings and processes alone rule out: at once, not after hours of copying or scanning images."""
    from data.loading.run_loaders import check_loader_settings
    from engine.batch_size import check_batch_search
    from engine.step_setup import check_step_settings
    from utils.machine.limits import require_package

    if ctx.is_main and not run.config.noplots:
        require_package("matplotlib", "plots", "use --noplots")
    check_batch_search(ctx, run.config)
    check_step_settings(ctx, run.config)
    check_loader_settings(ctx, run.config, run.hyp)


def open_data(ctx: DistributedContext, run: Run) -> DatasetSpec:
    from data.open_dataset import open_dataset

    config = run.config
    return open_dataset(
        config.data,
        ("train", "val"),
        stage=config.stage,
        cache_dir=config.cache_dir,
        ctx=ctx,
        known_root=run.data_root,
    )


def build_model(ctx: DistributedContext, run: Run, spec: DatasetSpec) -> tuple[Detector, tuple[str, ...]]:
    """The detector on its device, with starting weights and frozen layers; resumed weights come later. And the names
    of the parameters that came from weights when the run began."""
    from data.index.index import class_names
    from engine.checkpoint.resume import check_classes, resumed_pretrained
    from models.build import build_starting_model

    names = class_names(spec, run.config.single_cls)
    if run.content is None:
        return build_starting_model(ctx, run.config, names, resumed=None)
    check_classes(run.path, run.content["names"], names, spec.source)
    with errors_of(run.path):
        model, _ = build_starting_model(ctx, run.config, names, resumed=run.content["model_spec"])
    return model, resumed_pretrained(run.content, model)


def settle_batch_size(ctx: DistributedContext, run: Run, model: Detector) -> Run:
    """The run with the batch that ``--batch-size -1`` finds; any other run as it is."""
    from engine.batch_size import with_batch_that_fits

    if run.config.batch_size != FIND_BATCH_SIZE:
        return run
    run = with_batch_that_fits(ctx, run, model, build_loss(ctx, run, model))
    check_settings(ctx, run)
    return run


def build_loss(ctx: DistributedContext, run: Run, model: Detector) -> nn.Module:
    return model.head.build_loss(run.hyp, label_smoothing=run.config.label_smoothing).to(ctx.device)


def weights_from_files(run: Run, model: Detector, pretrained: tuple[str, ...]) -> Iterator[Tensor]:
    """What the model starts with and did not draw at random; of a resumed run all, which are not loaded yet."""
    stored = run.content["model"] if run.content is not None else model.state_dict()
    yield from (stored[name] for name in (stored if run.content is not None else pretrained))


def settle_weights(run: Run, model: Detector, train_loader: InfiniteDataLoader) -> None:
    """Weights of a resumed run, its anchors among them; in a new one the anchors as the training boxes want them, the
    same on all processes. The criterion copies anchors, so it is built afterwards."""
    from engine.checkpoint.checkpointer import errors_of_fit
    from models.autoanchor import check_anchors, sides_at
    from utils.logger import get_logger

    if run.content is not None:
        with errors_of_fit(run.path):
            model.load_state_dict(run.content["model"])
    elif model.head.anchors is not None:
        config, sides = run.config, sides_at(train_loader.index.ground_truth(), run.config.imgsz)
        refit = not config.noautoanchor
        report = check_anchors(sides, model, anchor_t=run.hyp.anchor_t, refit=refit, seed=config.seed)
        get_logger().info("%s", report.line)


def make_trainer(
    ctx: DistributedContext,
    run: Run,
    signals: StopSignals,
    watchdog: Watchdog,
    spec: DatasetSpec,
    model: Detector,
    pretrained: tuple[str, ...],
    train_loader: InfiniteDataLoader,
    val_loader: InfiniteDataLoader,
) -> Trainer:
    from engine.build import build_trainer
    from models.postprocess.detections import detections_to_score

    return build_trainer(
        ctx,
        run,
        signals=signals,
        watchdog=watchdog,
        model=model,
        criterion=build_loss(ctx, run, model),
        pretrained=pretrained,
        postprocess=detections_to_score,
        data_source=spec.source,
        data_root="" if run.config.stage else str(spec.root),
        train_loader=train_loader,
        val_loader=val_loader,
    )


def report_end(trainer: Trainer) -> None:
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
