"""A trial of the export before a training (``train.py --export``), so that a failing export fails early."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.export.description import describe_file
from engine.export.differences import largest_difference
from engine.export.exporter import CPU, file_path
from engine.export.options import require_packages, resolve_options
from engine.export.parity import FLOAT32
from engine.export.thresholds import trained_thresholds
from engine.formats.graphs import ModelGraphs, example_images
from engine.formats.registry import load_format
from engine.inference.model import CheckpointModel
from engine.inference.open_model import open_model
from models.detector import Detector
from utils.config.settings import ExportConfig, TrainConfig
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.errors import FailedCheck
from utils.logger import get_logger

MAX_BOX_DIFFERENCE = 1e-3  # as a fraction of the image's longer side


def try_export(ctx: DistributedContext, config: TrainConfig, model: Detector) -> None:
    """Exports the untrained model of a run with ``--export``, so that a format that fails does so before the
    training."""
    if not config.export:
        return
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            try_formats(model, config.export, config.imgsz)


def try_formats(detector: Detector, formats: Sequence[str], imgsz: int) -> None:
    """Exports ``detector`` to a temporary folder and compares all boxes and scores on noise: before training there may
    be no detections to compare. Raises FailedCheck for a file that computes something else, and UserError if an export
    fails."""
    started = time.monotonic()
    require_packages(formats)
    with tempfile.TemporaryDirectory() as folder:
        config = ExportConfig(weights=str(Path(folder, "untrained.pt")), format=list(formats), check=False)
        detector = copy.deepcopy(detector).to(CPU)
        model = CheckpointModel(detector.fuse(), {"imgsz": imgsz}, Path(config.weights), CPU)
        options = resolve_options(config, model.detector, imgsz)
        graphs = ModelGraphs(detector, options)
        metadata = describe_file(model, options, None, trained_thresholds(model, options), checked="no")
        images = torch.rand(example_images(model, options).shape, generator=torch.Generator().manual_seed(0))
        for name in dict.fromkeys(formats):
            path = file_path(model.path, options, name)
            model_format = load_format(name)
            model_format.write(model_format.build(graphs), path, metadata)
            box, score = largest_difference(model, open_model(path, device=CPU, trust=True), images)
            if not (box <= MAX_BOX_DIFFERENCE and score <= FLOAT32.score):
                raise FailedCheck(
                    f"--export {name}: the file does not compute what the model does: boxes differ by {box:.2g} of the "
                    f"image, scores by {score:.2g}"
                )
    seconds = time.monotonic() - started
    get_logger().info("--export: tested: %s (%.0f s)", ", ".join(formats), seconds)
