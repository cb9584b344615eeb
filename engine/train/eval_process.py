"""An evaluating process of a run (``--eval-ranks``): builds what it needs of the run, and scores its epochs."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from data.loading.build import open_run_val_reader
from data.open import open_data
from engine.evaluation.result import Evaluation
from engine.parallel.eval_ranks import EvalSetup, Scorer, serve
from engine.train.resume import resolve
from engine.train.run import build_criterion, choose_kernels, common_facts, open_evaluation
from models.detector import build_detector
from utils.config.settings import RunSettings, TrainConfig, names_with
from utils.detections import DetectionTable
from utils.distributed.context import DistributedContext
from utils.distributed.join import joined_run
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.process.launch import Launch
from utils.process.signals import StopSignals


def run_evaluating_process(
    launch: Launch | None, config: TrainConfig, explicit_flags: Collection[str], signals: StopSignals
) -> None:
    """Validates what the training processes send until the run ends. Once they have described the run, a signal is
    theirs to follow; before, it ends this process.

    ``explicit_flags``: names of the settings on the command line.
    """
    configure_logging(False)
    get_logger().setLevel(logging.ERROR)  # the training processes read the same files, and warn
    with ExitStack() as stack, joined_run(launch, config.device, eval_ranks=config.eval_ranks) as ctx:

        def build(setup: EvalSetup) -> Scorer:
            stack.enter_context(signals.deferred())
            return build_scorer(ctx, config, explicit_flags, setup)

        serve(ctx, build)


def build_scorer(
    ctx: DistributedContext, config: TrainConfig, explicit_flags: Collection[str], setup: EvalSetup
) -> Scorer:
    """Builds the function that scores averaged weights as the training processes would, see
    `engine.parallel.eval_ranks.Scorer`. Raises UserError if the data cannot be opened or differ from theirs."""
    source = setup.source
    if setup.finds_own_data:
        source = replace(source, data=resolve(config).data)
    own = {name: getattr(config, name) for name in names_with(TrainConfig, scope="machine") if name in explicit_flags}
    settings = RunSettings(replace(setup.config, **own), setup.hyp)
    config = settings.config
    if ctx.device.type == setup.device:
        torch.set_num_threads(setup.threads)  # on a CPU the rounding may depend on their number
    choose_kernels(config)
    # The run's data set, at the location that this process uses.
    spec = open_data(replace(source, stage=config.stage, cache_dir=config.cache_dir), ctx)
    model = build_detector(setup.model_spec, len(setup.names), names=setup.names, channels=spec.pixels.channels)
    model = model.to(ctx.device).to(memory_format=torch.channels_last)
    if model.head.anchors is not None and setup.anchors is not None:
        model.head.anchors.copy_(setup.anchors)
    criterion = build_criterion(ctx, settings, model, setup.class_weights)
    reader = open_run_val_reader(ctx, config, settings.hyp, spec)
    loader, evaluator = open_evaluation(ctx, config, reader, model, criterion)
    for name, value in common_facts(loader.index).items():
        if setup.facts.get(name) != value:
            raise UserError(f"{name} differs from that of the training processes")

    def score(ema: dict[str, Tensor], is_closing: bool) -> Evaluation | None:
        model.load_state_dict(ema)
        criterion.set_closing(is_closing)
        evaluation = evaluator.run(model, loader)
        if evaluation is None or config.plots:
            return evaluation
        none = DetectionTable.concatenate([])  # only plots show the detections
        return replace(evaluation, matches=evaluation.matches.above(np.inf), for_ap=none, detected=none, preview=None)

    return score
