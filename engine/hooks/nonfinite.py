"""The guard against non-finite steps: names their files, and ends a run that has only such steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.images.decode import read_image
from engine.checkpoint.newest_run import checkpoint_of_newest_run
from engine.hooks.hook import Hook, Training
from engine.parallel.step_values import StepValues
from utils.distributed.context import all_objects
from utils.errors import UserError, one_line
from utils.files.safe_io import open_direct
from utils.logger import get_logger
from utils.pixels import PixelFormat
from utils.program import resume_flag

# GradScaler starts at 2^16: up to 16 consecutive overflows are its normal search for the scale.
MAX_SCALE_HALVINGS = 16
MAX_CONSECUTIVE_BAD_STEPS = 20  # non-finite steps in a row that end a run; must exceed `MAX_SCALE_HALVINGS`


class NonFiniteSteps(Hook):
    """Names the files of a step that was skipped. Raises UserError after `MAX_CONSECUTIVE_BAD_STEPS` of them."""

    def __init__(self) -> None:
        self._bad_steps: list[Sequence[str]] = []  # the files of each bad step in a row that this process has taken
        self._has_warned = False  # whether the warning about the list of files has been logged

    def after_read(self, trainer: Training, values: StepValues) -> None:
        progress = trainer.progress
        if values.finite:
            self._bad_steps = []
            return
        self._bad_steps.append(values.paths)
        if values.local_finite and trainer.step.scaler.is_enabled() and progress.bad_steps <= MAX_SCALE_HALVINGS:
            get_logger().info("float16 gradients overflow: step skipped, the loss scale is halved")
        else:
            self._name_files(trainer, values)
        if progress.bad_steps >= MAX_CONSECUTIVE_BAD_STEPS:
            trainer.checkpointer.wait()
            raise UserError(self._reason(trainer))

    def _name_files(self, trainer: Training, values: StepValues) -> None:
        """Logs the files of a bad step, and appends them to this rank's list. This rank's shard of a small batch may be
        empty."""
        if values.paths:
            self._append_to_list(trainer, values)
        is_blank = have_single_colors(values.paths, trainer.loader.index.pixels)
        files = " ".join(values.paths) or "this process had no images"
        if is_blank:
            files += ", all of a single color"
        if not values.local_finite:
            get_logger().warning("non-finite loss, step skipped; its files: %s", files)
        elif trainer.ctx.is_main or is_blank:
            get_logger().warning("non-finite gradient (norm %s), step skipped; its files: %s", values.grad_norm, files)

    def _append_to_list(self, trainer: Training, values: StepValues) -> None:
        """Appends the files of a bad step to this rank's list. Warns once if the list cannot be written, as on a full
        disk: the log names the files as well."""
        line = one_line(f"epoch {trainer.progress.epoch + 1}: {' '.join(values.paths)}") + "\n"
        path = _list_of_files(trainer)
        try:
            with open(path, "a", encoding="utf-8", errors="surrogateescape", opener=open_direct) as file:
                file.write(line)
        except OSError as error:
            if not self._has_warned:
                get_logger().warning(
                    "%s: cannot be written (%s); the log names the files", path, error.strerror or error
                )
            self._has_warned = True

    def _reason(self, trainer: Training) -> str:
        """Returns why the run stops, and what to do."""
        blank_image = self._find_blank_image(trainer)
        if blank_image:
            return self._reason_for_blank_images(trainer, blank_image)
        last = checkpoint_of_newest_run(trainer.checkpointer.last.parent)
        if last is not None:
            remedy = f"To continue from the last good weights: {resume_flag(last)},"
        else:
            remedy = "There is no checkpoint yet: start again"
        advice = "with a lower lr0 (--set lr0=...) or with --amp off"
        return f"stopped: the last {trainer.progress.bad_steps} steps were not finite. {remedy} {advice}"

    def _find_blank_image(self, trainer: Training) -> str:
        """Returns the path of an image if all images of the bad steps, on all ranks, have a single color; else "".
        Every rank must call this: all have the same bad steps."""
        pixels = trainer.loader.index.pixels
        # This rank's shard of a small batch may be empty.
        steps_with_images = [paths for paths in self._bad_steps if paths]
        are_blank = all(have_single_colors(paths, pixels) for paths in steps_with_images)
        example = steps_with_images[-1][0] if steps_with_images else ""
        ranks = all_objects(trainer.ctx, (are_blank, example))
        if not all(are_blank for are_blank, _ in ranks):
            return ""
        return next((example for _, example in ranks if example), "")

    def _reason_for_blank_images(self, trainer: Training, blank_image: str) -> str:
        """Returns what to do about images without contrast: batch normalization divides by the deviation, which is
        0."""
        last = checkpoint_of_newest_run(trainer.checkpointer.last.parent)
        continuation = "start again"
        if last is not None:
            continuation = f"continue from the last good weights: {resume_flag(last)}"
        return (
            f"stopped: the last {len(self._bad_steps)} steps were not finite, because all of their images have a "
            f"single color, such as {blank_image} ({_list_of_files(trainer)} names others). Remove them, or correct "
            f"'bits' and 'channels' in the data set's YAML if the files are not like that, and {continuation}"
        )


def _list_of_files(trainer: Training) -> Path:
    """Returns the path of this rank's list of files."""
    return trainer.run.folder / f"nonfinite_rank{trainer.ctx.rank}.txt"


def have_single_colors(paths: Sequence[str], pixels: PixelFormat) -> bool:
    """Returns whether every image is of one color, that is, constant in each channel.

    Returns False without images, and if one cannot be read. Reads up to the first image that varies.
    """

    def is_single_color(path: str) -> bool:
        values = read_image(path, pixels=pixels).reshape(-1, pixels.channels)
        return bool((values == values[0]).all())

    try:
        return len(paths) > 0 and all(map(is_single_color, paths))
    except UserError:
        return False
