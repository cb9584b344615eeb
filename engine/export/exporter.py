"""Writes a checkpoint's model in file formats, each checked against the checkpoint.

An export goes through these steps, in this order:

- options.py: the flags, and their meaning for the model; export_data.py: the images;
- engine/formats: the format builds a graph from the model, and writes it to a temporary folder with the metadata of
  description.py and thresholds.py;
- reference.py: the file, in its own runtime, and the checkpoint detect objects in the same images, and their detections
  (differences.py) differ no more than parity.py allows;
- the file gets its final name; a file that fails is called NAME.failed.

trial.py does the same before a training, with boxes and scores instead of detections.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from engine.export.description import CheckOutcome, describe_file
from engine.export.export_data import ExportData, calibration_images
from engine.export.parity import Parity, tolerance_of
from engine.export.reference import Reference
from engine.export.thresholds import Thresholds, output_threshold, trained_thresholds
from engine.formats.graphs import ModelGraphs
from engine.formats.metadata import ExportMetadata
from engine.formats.registry import load_format
from engine.formats.resolved_export import ResolvedExport
from engine.inference.model import CheckpointModel
from engine.inference.open_model import open_model
from models.detector import Detector
from utils.config.export_formats import EXPORT_FORMATS
from utils.errors import FailedCheck, UserError, os_reason
from utils.files.temporary_folder import replace_path, temporary_folder
from utils.logger import get_logger

CPU = torch.device("cpu")


class Exporter:
    """Writes one checkpoint in several formats. The files are written next to the checkpoint."""

    def __init__(
        self, *, detector: Detector, model: CheckpointModel, options: ResolvedExport, data: ExportData | None
    ) -> None:
        """Runs the checkpoint on the images of the check. Raises UserError if it detects nothing in them.

        Args:
            detector: the checkpoint's, not fused.
            model: the checkpoint, which the files should reproduce.
            options: result of `resolve_options`.
            data: None: there is no check and no calibration.
        """
        self._model = model
        self._options = options
        self._data = data
        self._graphs = ModelGraphs(detector, options, self._calibration_batches)
        self._reference: Reference | None = None
        if data is not None and data.checked is not None:
            self._reference = Reference(model, data.checked, options)
        self._thresholds = self._choose_thresholds()

    def export(self, name: str, before_publish: Callable[[Path], None]) -> Path:
        """Writes the format ``name``. The file gets its name when it is finished and has passed its check. Just before,
        ``before_publish`` is called with it.

        Raises FailedCheck if it differs too much from the checkpoint: it is kept as NAME.failed.
        """
        started = time.monotonic()
        model_format = load_format(name)
        path = file_path(self._model.path, self._options, name)
        graph = model_format.build(self._graphs)
        with contextlib.ExitStack() as stack:
            with _write_errors_of(path):
                candidate = stack.enter_context(temporary_folder(path)) / path.name
                model_format.write(graph, candidate, self._metadata)
            parity = self._compare(candidate)
            problems = [] if parity is None else parity.violations(tolerance_of(self._options))
            with _write_errors_of(path):
                if parity is not None and problems:
                    model_format.write(graph, candidate, self._metadata_of_failure)
                    failed = _failed_path(path)
                    replace_path(candidate, failed)
                    advice = self._advice(name) if self._options.int8 else ""
                    raise FailedCheck(_failure_message(failed, path, problems, parity) + advice)
                replaces_file = os.path.lexists(path)
                before_publish(candidate)
                _publish(candidate, path)
        _log_outcome(path, parity, time.monotonic() - started, replaces_file=replaces_file)
        requirements = model_format.requirements(graph)
        if requirements:
            get_logger().info("%s: %s", path, requirements)
        return path

    def _advice(self, name: str) -> str:
        """Returns what to do about an 8-bit file that has failed: OpenVINO's, if that passes, or no check."""
        unchecked = "--no-check writes it all the same"
        if name == "openvino" or any(find_spec(package) is None for package in EXPORT_FORMATS["openvino"].packages):
            return f"; {unchecked}"
        model_format = load_format("openvino")
        path = file_path(self._model.path, self._options, "openvino")
        with temporary_folder(path) as folder:
            model_format.write(model_format.build(self._graphs), folder / path.name, self._metadata)
            parity = self._compare(folder / path.name)
        if parity is None or parity.violations(tolerance_of(self._options)):
            return f"; {unchecked}"
        return f"; OpenVINO's 8-bit file passes: --format openvino --int8 (AP {parity.ap:.4f}); {unchecked}"

    def _compare(self, file: Path) -> Parity | None:
        """Compares the detections of a file with the checkpoint's. Returns None if there is no check."""
        if self._reference is None:
            return None
        exported = open_model(file, device=CPU, trust=True)
        return self._reference.compare(exported, tolerance_of(self._options), threshold=self._thresholds.output)

    @cached_property
    def _metadata(self) -> ExportMetadata:
        """Metadata of a file that passes its check, or needs none."""
        spec = None if self._data is None else self._data.spec
        checked: CheckOutcome = "no" if self._reference is None else "yes"
        return describe_file(self._model, self._options, spec, self._thresholds, checked=checked)

    @property
    def _metadata_of_failure(self) -> ExportMetadata:
        """Metadata of a file that fails its check."""
        outcome: CheckOutcome = "failed"
        return replace(self._metadata, details=self._metadata.details | {"checked": outcome})

    def _choose_thresholds(self) -> Thresholds:
        """Returns the thresholds of the check if it covers all validation images, whole and on the file's canvas, else
        training's. Those of a model trained on tiles are for the joined detections of an image's tiles."""
        options = self._options
        checks_all_images = self._data is not None and self._data.checks_all_images
        is_as_detected = not options.dynamic and not self._model.tile
        if self._reference is not None and checks_all_images and is_as_detected:
            scores = self._reference.shown
            output = output_threshold(scores, options, votes=options.box_voting)
            if output is not None:
                return Thresholds(output, scores.threshold)
        if self._model.is_unscored_branch:
            get_logger().info("--nms: the files state no confidence threshold: training's is of the one-to-one branch")
        return trained_thresholds(self._model, options)

    def _calibration_batches(self) -> Iterator[np.ndarray]:
        if self._data is None or self._data.calibration is None:
            raise ValueError("there are no calibration images")
        return calibration_images(self._data.calibration, self._data.calibration_count, self._options)


def file_path(weights: Path, options: ResolvedExport, name: str) -> Path:
    """Returns the path of a file of the format ``name``.

    It differs by branch and by layout, because a program that reads one cannot read the other, and by precision, so
    that files of several precisions can be compared.
    """
    branch = "_nms" if options.nms else ""
    layout = "_end2end" if options.layout == "end2end" else ""
    precision = ""
    if options.half:
        precision = "_half"
    elif options.int8:
        precision = "_int8"
    return weights.with_name(f"{weights.stem}{branch}{layout}{precision}{EXPORT_FORMATS[name].suffix}")


def file_bytes(path: Path) -> int:
    """Returns the size of an exported file, or of all files in an exported folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else (path,)))


@contextlib.contextmanager
def _write_errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({os_reason(error)})") from None


def _log_outcome(path: Path, parity: Parity | None, seconds: float, *, replaces_file: bool) -> None:
    outcome = "not checked (--no-check)" if parity is None else f"{seconds:.0f} s; {parity.summary}"
    if replaces_file:
        outcome += "; replaces an earlier export"
    get_logger().info("%s: %.1f MB, %s", path, file_bytes(path) / 1e6, outcome)


def _failed_path(path: Path) -> Path:
    """Returns where a file that should have become ``path`` is kept if it fails its check."""
    return path.with_name(f"{path.name}.failed")


def _publish(candidate: Path, path: Path) -> None:
    """Moves the file ``candidate`` from its temporary folder to ``path``. In exchange, a failed file of an earlier
    export goes to that folder, with which it is removed."""
    replace_path(candidate, path)
    failed = _failed_path(path)
    if os.path.lexists(failed):
        os.replace(failed, candidate.with_name(failed.name))


def _failure_message(failed: Path, path: Path, problems: Sequence[str], parity: Parity) -> str:
    """Returns the message about the file ``failed``, which should have become ``path``."""
    earlier = f"; {path} is still the file of an earlier export" if os.path.lexists(path) else ""
    return (
        f"{failed}: differs too much from the checkpoint: {'; '.join(problems)} (worst image: {parity.worst_image})"
        f"{earlier}"
    )
