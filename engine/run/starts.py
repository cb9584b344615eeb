"""How a run starts: `NewRun` from the settings of a command, `ContinuedRun` from a last.pt.

`engine.run.plan.plan_run` returns one of them, and they have the same methods: the rest of the program does not ask
whether there is a checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data.loading.build import count_train_batches
from data.samples.dataset import AugmentedImages
from data.samples.readers import SampleReader
from data.spec import DatasetSpec, DataSource
from engine.evaluation.fitness import Fitness
from engine.optim.build import LoadedParameters
from engine.optim.schedule import new_layers_lr_mult, step_plan
from engine.run.choices import (
    Choices,
    choose_anchors,
    choose_batch_size,
    choose_class_weights,
    choose_flips,
    choose_lr_mult,
    choose_optimizer,
)
from engine.run.teacher import TeacherFile
from engine.train.checkpoint import Checkpoint, DataFingerprint, Progress, RunDescription, UnscoredEpoch
from engine.train.ledger import LedgerState
from engine.train.lr_probe import WeightsProbe, probe_weights
from engine.train.saver import remove_unscored, scores_path
from engine.train.step import TrainStep
from models.detector import Detector, build_meta_detector
from models.losses.distillation import Teacher
from models.weights.download import fetch_weights
from models.weights.load import check_shapes, model_of
from models.weights.origin import RANDOM, origin_of_run, taught_by
from models.weights.read import StoredWeights, read_weights, shapes_of
from models.weights.transfer import transfer_weights
from utils.class_names import class_difference
from utils.config.epochs import is_closing_epoch
from utils.config.settings import RunSettings, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError, errors_of
from utils.files.torch_file import read_checkpoint
from utils.logger import get_logger
from utils.schema import build

DEFAULT_MODEL = "yolov8n"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data set and the other files of a run."""

    spec: DatasetSpec  # with the classes of a teacher that are kept, and the images that are held out
    names: tuple[str, ...]  # of the model's classes
    used_classes: list[str]  # names of the data set's classes that --classes chose
    fitness: Fitness
    weights: StoredWeights | None  # from which a new run starts
    meta_model: Detector  # the run's model, on the meta device
    teacher: TeacherFile | None
    samples: AugmentedImages  # of the training split, with the flips of the settings
    val: SampleReader
    fingerprint: DataFingerprint


class LoadedWeights(NamedTuple):
    """The weights with which a model starts."""

    pretrained: dict[str, tuple[int, ...]]  # rows of new classes, by name of each parameter from weights
    tensors: list[Tensor]  # from files, equal on all ranks
    origin: dict[str, str]  # fields of `models.weights.origin.Origin`
    probe: WeightsProbe | None = None  # how well the weights of a new run detect its objects; None: not measured
    lines: Sequence[str] = ()  # of the log


class StartingModel(NamedTuple):
    """A model before its first step."""

    model: Detector  # on its device
    weights: LoadedWeights
    teacher: Teacher | None  # for the loss of this model

    @property
    def is_complete(self) -> bool:
        """Whether all parameters come, or came when the run began, from weights."""
        rows = self.weights.pretrained
        return all(name in rows and not rows[name] for name, _ in self.model.named_parameters())


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a command trains, decided before data and model are opened. Equal on all ranks, except for the settings in
    ``per_machine`` and those of scope "machine"."""

    settings: RunSettings
    folder: Path | None  # locked; None: `claim_folder` makes it
    per_machine: frozenset[str]  # settings whose values are each process's own
    messages: tuple[str, ...]  # written to the log before anything else

    @property
    def data_source(self) -> DataSource:
        config = self.settings.config
        output = str(self.folder or config.folder) if config.plots else ""
        return replace(DataSource.of_training(config), output=output, continues_output=self.folder is not None)


@dataclass(frozen=True, kw_only=True)
class NewRun(_Start):
    """A run from the beginning. Its settings may leave the batch size (-1), ``lr_mult`` (None) and the optimizer (auto)
    open."""

    run_id: str
    given: frozenset[str]  # hyper-parameters that a file of ``--hyp`` or ``--set`` gives
    resumes = False
    takes_steps = True
    ended_by_callback = False
    saves_first = True  # a run has its record before its first step
    val_images: tuple[str, ...] = ()  # `hold_out_validation` chooses them

    @property
    def command(self) -> TrainConfig:
        """The settings that have begun the run, some of them open."""
        return self.settings.config

    def read_weights(self, ctx: DistributedContext) -> StoredWeights | None:
        """Reads ``--weights``; None if there are none. Raises UserError for a file without a detector."""
        config = self.settings.config
        return read_weights(fetch_weights(config.weights, ctx=ctx, offline=config.offline)) if config.weights else None

    def check_teacher(self, teacher: TeacherFile) -> None:
        """Raises UserError if this is not the teacher with which the run began."""

    def build_meta_model(self, names: Sequence[str], channels: int, weights: StoredWeights | None) -> Detector:
        """Builds the model of the settings, or else of the weights, on the meta device."""
        source = self.settings.config.model or (model_of(weights) if weights else DEFAULT_MODEL)
        return build_meta_detector(source, len(names), names=names, channels=channels)

    def load_weights(self, ctx: DistributedContext, model: Detector, inputs: Inputs) -> LoadedWeights:
        """Puts the weights into the model. A new class starts from the rows of the class that scores best at its
        objects."""
        config = self.settings.config
        weights = inputs.weights
        origin = RANDOM if weights is None else origin_of_run(weights)
        if inputs.teacher is not None and config.teacher:
            origin = taught_by(origin, inputs.teacher.origin)
        if weights is None:
            return LoadedWeights({}, [], origin._asdict(), lines=["random weights"])
        probe = probe_weights(ctx, config, weights, inputs.samples, inputs.meta_model)
        report = transfer_weights(model, weights, similar={} if config.model or config.keep_old else probe.similar)
        pretrained = report.pretrained(model)
        state = model.state_dict()
        tensors = [state[name] for name in pretrained]
        return LoadedWeights(pretrained, tensors, origin._asdict(), probe, report.lines())

    def choices(self, ctx: DistributedContext, inputs: Inputs, starting: StartingModel) -> Choices:
        """Makes the choices that the settings leave open. Every rank must call this. Raises UserError if no batch fits
        on the GPUs."""
        config = self.settings.config
        hyp = self.settings.hyp
        samples = inputs.samples
        train = samples.reader.image_index
        model = starting.model
        probe = starting.weights.probe
        flips, flips_line = choose_flips(hyp, inputs.names, self.given)
        hyp = replace(hyp, **flips)
        batch_size, size_line = choose_batch_size(ctx, RunSettings(config, hyp), model, starting.teacher, samples)
        config = replace(config, batch_size=batch_size)
        steps = step_plan(config, count_train_batches(config, samples))
        optimizer, optimizer_reason = choose_optimizer(config, steps)
        lr_mult, lr_reason = choose_lr_mult(config, hyp, steps, probe)
        anchors, anchors_line = choose_anchors(ctx, config, hyp, model, train, probe)
        weights, weights_line = choose_class_weights(config, model, train)
        return Choices(
            settings=RunSettings(replace(config, optimizer=optimizer), replace(hyp, lr_mult=lr_mult)),
            anchors=anchors,
            class_weights=weights,
            loaded=LoadedParameters(
                new_rows=starting.weights.pretrained,
                lr_mult=lr_mult,
                new_lr_mult=new_layers_lr_mult(steps.planned_steps),
            ),
            optimizer_reason=optimizer_reason,
            lr_reason=lr_reason,
            messages=[line for line in (flips_line, size_line, anchors_line, weights_line) if line],
        )

    def restore(
        self, ctx: DistributedContext, step: TrainStep, epoch_batches: int, fingerprint: DataFingerprint
    ) -> tuple[Progress, LedgerState]:
        """Returns the position of the run, and its ledger.

        Args:
            step: its state becomes that of the checkpoint.
            epoch_batches: batches of an epoch on each rank.
            fingerprint: of the data set as it is now.
        """
        return Progress(), LedgerState()


@dataclass(frozen=True, kw_only=True)
class ContinuedRun(_Start):
    """A run that continues at its checkpoint, or has ended. See the methods of `NewRun`."""

    folder: Path  # that of the checkpoint
    checkpoint: Checkpoint
    end_reason: str  # why no step is left, and how to train on; "" if steps are left
    is_complete: bool  # at most exports are left
    resumes = True

    @property
    def stored(self) -> RunDescription:
        return self.checkpoint.description

    @property
    def takes_steps(self) -> bool:
        """Whether steps are left; otherwise a start only scores the last epoch."""
        return not self.end_reason

    @property
    def run_id(self) -> str:
        return self.stored.run_id

    @property
    def command(self) -> TrainConfig:
        return self.stored.command or self.settings.config

    @property
    def ended_by_callback(self) -> bool:
        """Whether the run has ended by a callback, and takes no further step."""
        return self.checkpoint.header.ended_by_callback and not self.takes_steps

    @property
    def saves_first(self) -> bool:
        """Whether last.pt must be written before the first step: it says that the run has ended."""
        return self.checkpoint.header.ended_by_callback and self.takes_steps

    @property
    def val_images(self) -> tuple[str, ...]:
        return tuple(self.stored.val_images)

    @property
    def data_source(self) -> DataSource:
        stored_in = "" if "data" in self.per_machine else str(self.checkpoint.path)
        return replace(super().data_source, stored_in=stored_in)

    def read_weights(self, ctx: DistributedContext) -> None:
        return None

    def check_teacher(self, teacher: TeacherFile) -> None:
        stored = self.stored.teacher
        flag = teacher.flag
        if not stored:
            raise UserError(f"{flag}: this run began without a teacher; leave out {flag}")
        if stored.get("sha256") != teacher.sha256:
            began = f"the teacher that this run began with ({stored.get('path')})"
            raise UserError(f"{flag}: {teacher.source} is not {began}")

    def build_meta_model(self, names: Sequence[str], channels: int, weights: StoredWeights | None) -> Detector:
        """Builds the checkpoint's model. Raises UserError if its classes are not ``names``, in this order, or its
        weights do not fit it."""
        path = self.checkpoint.path
        difference = class_difference(self.stored.names, names)
        if difference:
            raise UserError(
                f"{path}: the run and {self.settings.config.data} do not have the same classes ({difference}); for "
                f"other classes start a new run with --weights {shlex.quote(str(path))}"
            )
        check_shapes(path, self.stored.model_spec, self.stored.names, shapes_of(self.checkpoint.state.model))
        with errors_of(path):
            return build_meta_detector(self.stored.model_spec, len(names), names=names, channels=channels)

    def load_weights(self, ctx: DistributedContext, model: Detector, inputs: Inputs) -> LoadedWeights:
        pretrained = {name: tuple(rows) for name, rows in self.stored.pretrained.items()}
        return LoadedWeights(pretrained, list(self.checkpoint.state.model.values()), self.stored.origin)

    def choices(self, ctx: DistributedContext, inputs: Inputs, starting: StartingModel) -> Choices:
        config = self.settings.config
        hyp = self.settings.hyp
        lr_mult = 1.0 if hyp.lr_mult is None else hyp.lr_mult
        if self.stored.class_weights:  # those of the data with which the run began
            weights: Tensor | None = torch.tensor(self.stored.class_weights)
        else:  # all are equal, or the checkpoint is of a version that did not store them
            weights, _ = choose_class_weights(config, starting.model, inputs.samples.reader.image_index)
        return Choices(
            settings=RunSettings(config, replace(hyp, lr_mult=lr_mult)),
            anchors=None,
            class_weights=weights,
            loaded=LoadedParameters(
                new_rows=starting.weights.pretrained, lr_mult=lr_mult, new_lr_mult=self.stored.new_lr_mult
            ),
            optimizer_reason="as when the run began",
        )

    def restore(
        self, ctx: DistributedContext, step: TrainStep, epoch_batches: int, fingerprint: DataFingerprint
    ) -> tuple[Progress, LedgerState]:
        """Puts the state of the checkpoint in place. Raises UserError if it does not fit the run."""
        self.checkpoint.restore(ctx, step)
        header = self.checkpoint.header
        progress = self._position(epoch_batches, fingerprint)
        unscored = header.unscored or self._unscored_last_epoch()
        numbers = [epoch.number for epoch in unscored]
        if ctx.is_main:  # a kill may have left files of an epoch that is trained again
            remove_unscored(self.folder, keep=numbers)
        if self.stored.identity.val_labels != fingerprint.val_labels:  # the scores are not comparable
            for number in numbers if ctx.is_main else ():
                scores_path(self.folder, number).unlink(missing_ok=True)
            if self.takes_steps:
                progress.reset_best()
        # A power cut may have lost best.pt, and a copy of an older checkpoint has none: the next best epoch writes it.
        has_best = broadcast_object(ctx, ctx.is_main and _is_best(self.folder / "best.pt", progress))
        if progress.best_epoch >= 0 and not has_best:
            progress.reset_best()
        rows = self.checkpoint.rows
        return progress, LedgerState(rows, header.metrics, unscored, header.run.seconds)

    def _position(self, epoch_batches: int, fingerprint: DataFingerprint) -> Progress:
        """Returns the progress of the checkpoint, counted in the batches and steps that an epoch has now.

        An epoch that has begun continues at the same image, or at the last multiple of another batch size before it. If
        its training images or their order have changed, the run continues at the next epoch, so that no image is
        trained on twice: with another data set, or another batch size with ``--rect``, whose batches are of similar
        shapes. The arguments are those of `restore`.
        """
        config = self.settings.config
        before = self.checkpoint.header.run
        progress = replace(self.checkpoint.progress)
        data = self.stored.identity

        def compare(split: str, old: str, new: str, consequence: str) -> None:
            if old != new:
                message = "%s: the %s images or labels have changed since the run began (fingerprint %s, now %s); %s"
                get_logger().warning(message, config.data, split, old[:8], new[:8], consequence)

        compare("training", data.train_labels, fingerprint.train_labels, "the run continues at the next epoch")
        compare("validation", data.val_labels, fingerprint.val_labels, "the search for the best epoch begins again")
        steps = step_plan(config, epoch_batches)
        old_size = self.stored.config.batch_size
        is_recounted = old_size != config.batch_size or before.epoch_batches != epoch_batches
        has_other_order = data.train_labels != fingerprint.train_labels or (config.rect and is_recounted)
        if progress.batch == before.epoch_batches or (progress.batch and has_other_order):
            progress.batch = epoch_batches
        elif progress.batch and is_recounted:
            batches = min(progress.batch * old_size // config.batch_size, epoch_batches)
            progress.begin_epoch(batches - batches % steps.accumulate)
        if progress.batch and is_recounted:
            get_logger().info("resume: continues at batch %d of %d", progress.batch, epoch_batches)
        # The schedule is a function of the step relative to all steps.
        progress.updates = progress.epoch * steps.per_epoch + -(-progress.batch // steps.accumulate)
        return progress

    def _unscored_last_epoch(self) -> list[UnscoredEpoch]:
        """Returns the newest epoch if ``--val-every`` has left it out, and it is now the last."""
        if not self.checkpoint.lacks_scores(self.settings.config.epochs):
            return []
        number = self.checkpoint.progress.epoch
        row: dict[str, float] = next((row for row in self.checkpoint.rows if row["epoch"] == number), {})
        scores = ("metrics/", "val/")
        kept = {name: value for name, value in row.items() if name != "epoch" and not name.startswith(scores)}
        is_closing = is_closing_epoch(number, self.stored.config.epochs, self.stored.hyp.close_mosaic)
        return [UnscoredEpoch(number, kept, is_closing, is_validated=True)]


RunStart = NewRun | ContinuedRun


def _is_best(path: Path, progress: Progress) -> bool:
    """Returns whether best.pt is that of the best epoch in ``progress``."""
    try:
        stored = build(Progress, read_checkpoint(path, verify=False).get("progress"), f"{path}: progress")
    except UserError:
        return False
    newest_best = (stored.epoch, stored.best_epoch, stored.best_fitness)
    return newest_best == (progress.best_epoch, progress.best_epoch, progress.best_fitness)
