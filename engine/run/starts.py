"""How a run starts: `NewRun` from the settings of a command, `ContinuedRun` from a last.pt.

`engine.run.plan.plan_run` returns one of them, and they have the same methods: the rest of the program does not ask
whether there is a checkpoint.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.loading.build import count_train_batches
from data.samples.dataset import AugmentedImages
from data.samples.readers import SampleReader
from data.spec import DatasetSpec, DataSource
from engine.evaluation.fitness import Fitness
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
from engine.train.lr_probe import probe_weights
from engine.train.saver import remove_unscored, scores_path
from engine.train.step import TrainStep
from models.detector import Detector, build_meta_detector
from models.losses.distillation import Teacher
from models.weights.download import fetch_weights
from models.weights.load import check_shapes, class_count, model_of, names_for
from models.weights.origin import RANDOM, origin_of_run, taught_by
from models.weights.read import StoredWeights, read_weights, shapes_of
from models.weights.transfer import match_weights, transfer_weights
from utils.class_names import class_difference
from utils.config.epochs import is_closing_epoch
from utils.config.settings import RunSettings, TrainConfig
from utils.distributed.agreement import check_same_model
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
    used_classes: list[str]  # names of the data set's classes that --classes chose
    fitness: Fitness
    meta_model: Detector  # the run's model, on the meta device
    weights: StoredWeights | None  # from which a new run starts
    teacher: TeacherFile | None
    samples: AugmentedImages  # of the training split, with the flips of the settings
    val: SampleReader
    fingerprint: DataFingerprint

    def described(self, config: TrainConfig) -> dict[str, Any]:
        """Returns the fields of a `RunDescription` that follow from the files."""
        teacher = self.teacher
        return {
            "model_spec": self.meta_model.spec,
            "names": list(self.meta_model.names),
            "used_classes": self.used_classes,
            "imgsz": config.imgsz,
            "bits": self.spec.pixels.bits,
            "data": {"source": str(self.spec.source), "root": "" if config.stage else str(self.spec.root)},
            "identity": self.fingerprint,
            "val_images": sorted(self.spec.held_out),
            "tile": self.spec.tile,
            "teacher": {"path": teacher.path, "sha256": teacher.sha256} if teacher else {},
        }


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a command trains, decided before data and model are opened. Equal on all ranks but for the settings that are
    each machine's own."""

    settings: RunSettings
    folder: Path | None  # locked; None: `claim_folder` makes it
    messages: list[str]  # written to the log before anything else

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
    val_images: tuple[str, ...] = ()  # `hold_out_validation` chooses them

    def check_teacher(self, teacher: TeacherFile) -> None:
        """Raises UserError if this is not the teacher with which the run began."""

    def open_model(
        self, ctx: DistributedContext, names: tuple[str, ...], channels: int
    ) -> tuple[Detector, StoredWeights | None]:
        """Builds the model on the meta device, and returns it with the weights from which the run starts, if there are
        any. Raises UserError if these do not fit."""
        config = self.settings.config
        if not config.weights:
            source = config.model or DEFAULT_MODEL
            return build_meta_detector(source, len(names), names=names, channels=channels), None
        weights = read_weights(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
        model = build_meta_detector(config.model or model_of(weights), len(names), names=names, channels=channels)
        classes = class_count(model, weights.shapes)
        if config.keep_old:  # the model's first classes are those of the weights, also of a file without names
            weights = replace(weights, names=names[:classes])
        elif classes:
            weights = replace(weights, names=names_for(classes, weights.names, weights.path))
        match_weights(model, weights)  # raises UserError if nothing fits
        return model, weights

    def choose(self, ctx: DistributedContext, inputs: Inputs, model: Detector, teacher: Teacher | None) -> Choices:
        """Puts the weights into the model, and makes the choices that the settings leave open, in the order in which
        they depend on each other. A new class starts from the rows of the class that scores best at its objects. Every
        rank must call this. Raises UserError if processes have read different weights, or if no batch fits on the GPUs.
        """
        config = self.settings.config
        hyp = self.settings.hyp
        samples = inputs.samples
        train = samples.reader.image_index
        weights = inputs.weights
        origin = RANDOM if weights is None else origin_of_run(weights)
        if inputs.teacher is not None and config.teacher:
            origin = taught_by(origin, inputs.teacher.origin)
        probe = None
        pretrained: dict[str, tuple[int, ...]] = {}
        if weights is None:
            get_logger().info("random weights")
        else:
            if ctx.is_main:
                probe = probe_weights(config, weights, samples, inputs.meta_model, ctx.device)
            probe = broadcast_object(ctx, probe)
            similar = {} if config.model or config.keep_old else probe.similar
            report = transfer_weights(model, weights, similar=similar)
            pretrained = report.pretrained(model)
            for line in report.lines():
                get_logger().info("%s", line)
        state = model.state_dict()
        check_same_model(ctx, model, [state[name] for name in pretrained])
        hyp = replace(hyp, **choose_flips(hyp, model.names, self.given))
        batch_size = choose_batch_size(ctx, RunSettings(config, hyp), model, teacher, samples)
        config = replace(config, batch_size=batch_size)
        steps = step_plan(config, count_train_batches(config, samples))
        optimizer, optimizer_reason = choose_optimizer(config, steps)
        lr_mult, lr_reason = choose_lr_mult(config, hyp, steps, probe)
        choose_anchors(ctx, config, hyp, model, train, probe)
        description = RunDescription(
            run_id=self.run_id,
            config=replace(config, optimizer=optimizer),
            hyp=replace(hyp, lr_mult=lr_mult),
            pretrained={name: list(rows) for name, rows in pretrained.items()},
            new_lr_mult=new_layers_lr_mult(steps.planned_steps),
            class_weights=choose_class_weights(config, model, train),
            origin=origin._asdict(),
            command=self.settings.config,
            **inputs.described(config),
        )
        return Choices(description, optimizer_reason, lr_reason)

    def restore(
        self, step: TrainStep, epoch_batches: int, fingerprint: DataFingerprint
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
    names_data: bool  # the command gives ``--data``
    resumes = True

    @property
    def stored(self) -> RunDescription:
        return self.checkpoint.description

    @property
    def takes_steps(self) -> bool:
        """Whether steps are left; otherwise a start only scores the last epoch."""
        return not self.end_reason

    @property
    def ended_by_callback(self) -> bool:
        """Whether the run has ended by a callback, and takes no further step."""
        return self.checkpoint.header.ended_by_callback and not self.takes_steps

    @property
    def val_images(self) -> tuple[str, ...]:
        return tuple(self.stored.val_images)

    @property
    def data_source(self) -> DataSource:
        stored_in = "" if self.names_data else str(self.checkpoint.path)
        return replace(super().data_source, stored_in=stored_in)

    def check_teacher(self, teacher: TeacherFile) -> None:
        stored = self.stored.teacher
        flag = teacher.flag
        if not stored:
            raise UserError(f"{flag}: this run began without a teacher; leave out {flag}")
        if stored.get("sha256") != teacher.sha256:
            began = f"the teacher that this run began with ({stored.get('path')})"
            raise UserError(f"{flag}: {teacher.source} is not {began}")

    def open_model(self, ctx: DistributedContext, names: tuple[str, ...], channels: int) -> tuple[Detector, None]:
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
            return build_meta_detector(self.stored.model_spec, len(names), names=names, channels=channels), None

    def choose(self, ctx: DistributedContext, inputs: Inputs, model: Detector, teacher: Teacher | None) -> Choices:
        """Keeps what the run has chosen when it began."""
        check_same_model(ctx, model, self.checkpoint.state.model.values())
        config = self.settings.config
        described = inputs.described(config)
        description = replace(self.stored, config=config, hyp=self.settings.hyp, **described)
        return Choices(description, "as when the run began")

    def restore(
        self, step: TrainStep, epoch_batches: int, fingerprint: DataFingerprint
    ) -> tuple[Progress, LedgerState]:
        """Puts the state of the checkpoint in place. Raises UserError if it does not fit the run."""
        self.checkpoint.restore(step)
        ctx = step.ctx
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
        return progress, LedgerState(self.checkpoint.rows, header.metrics, unscored, header.run.seconds)

    def _position(self, epoch_batches: int, fingerprint: DataFingerprint) -> Progress:
        """Returns the progress of the checkpoint, counted in the batches and steps that an epoch has now.

        An epoch that has begun continues at the same image, or at the last multiple of another batch size before it. If
        its training images or their order have changed, the run continues at the next epoch, so that no image is
        trained on twice: with another data set, or another batch size with ``--rect``, whose batches are of similar
        shapes. The arguments are those of `restore`.
        """
        config = self.settings.config
        before = self.checkpoint.header.run
        progress = replace(self.checkpoint.header.progress)
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
        number = self.checkpoint.header.progress.epoch
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
