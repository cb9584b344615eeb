"""An evaluating process of ``--eval-ranks``, which scores the weights that it receives until the run ends."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from data.index.index import DatasetIndex
from data.open import open_data
from engine.assembly.loss_and_validation import build_criterion, build_validation
from engine.assembly.process_setup import choose_kernels
from engine.assembly.starting_model import rebuild_model
from engine.eval_ranks.messages import SetupMessage, WeightsMessage, common_facts
from engine.eval_ranks.server import serve
from engine.evaluation.result import Evaluation
from engine.run.resolve_paths import resolve
from engine.run.run import RunSettings
from utils.config.settings import TrainConfig, names_with
from utils.detections import DetectionTable
from utils.distributed.context import DistributedContext
from utils.distributed.rendezvous import join_run
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.process.launch import Launch


def run_evaluation_process(launch: Launch | None, config: TrainConfig, explicit_flags: Collection[str]) -> NoReturn:
    """Runs an evaluating process until the run ends. A signal ends only this process.

    ``explicit_flags``: names of the settings on the command line.
    """
    configure_logging(False)
    get_logger().setLevel(logging.ERROR)  # the training processes read the same files, and warn
    ctx = join_run(launch, config.device, eval_ranks=config.eval_ranks)
    serve(ctx, partial(RunScorer, ctx, config, explicit_flags))


class RunScorer:
    """Scores weights as the training processes would. Raises UserError if the data cannot be opened or differ from
    theirs."""

    def __init__(
        self, ctx: DistributedContext, config: TrainConfig, explicit_flags: Collection[str], setup: SetupMessage
    ) -> None:
        """``explicit_flags``: names of the settings on this process's command line."""
        machine_settings = names_with(TrainConfig, scope="machine")
        local_settings = {name: getattr(config, name) for name in machine_settings if name in explicit_flags}
        source = setup.source
        if setup.finds_own_data:
            source = replace(source, data=resolve(config).data)
        config = replace(setup.settings.config, **local_settings)
        self._has_plots = not config.noplots
        if ctx.device.type == setup.device:
            torch.set_num_threads(setup.threads)  # on a CPU the rounding may depend on their number
        choose_kernels(config)
        # The run's data set, at the location that this process uses.
        spec = open_data(replace(source, stage=config.stage, cache_dir=config.cache_dir), ctx)
        self._model = rebuild_model(ctx, config, setup.names, spec.pixels.channels, setup.model_spec)
        self._model.load_state_dict(setup.ema)
        settings = RunSettings(config, setup.settings.hyp)
        self._criterion = build_criterion(ctx, settings, self._model, class_weights=setup.class_weights)
        self._validation = build_validation(ctx, settings, spec, self._model, self._criterion)
        _check_facts(self._validation.loader.index, setup.facts)

    def __call__(self, weights: WeightsMessage) -> Evaluation | None:
        """Evaluates ``weights``. Returns on rank 0 what the training processes need of it, None elsewhere."""
        self._model.load_state_dict(weights.ema)
        self._criterion.set_closing(weights.is_closing)
        evaluation = self._validation.evaluator.run(self._model, self._validation.loader)
        if evaluation is None or self._has_plots:
            return evaluation
        no_detections = DetectionTable.concatenate([])  # only plots show them
        return replace(evaluation, for_ap=no_detections, detected=no_detections, preview=None)


def _check_facts(index: DatasetIndex, facts: dict[str, str]) -> None:
    """Raises UserError if the code or the data differ from those of the training processes."""
    for name, value in common_facts(index).items():
        if facts.get(name) != value:
            raise UserError(f"{name} differs from that of the training processes")
