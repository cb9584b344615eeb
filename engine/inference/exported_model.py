"""Models for inference from files that export.py or another program has exported."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.export.formats import Session, open_exported
from engine.export.metadata import DEFAULT_HW, ExportMetadata, OutputLayout
from engine.inference.model import InferenceModel
from utils.boxes import cxcywh_to_xyxy
from utils.config.export_formats import EXPORT_FORMATS, format_of, titles_of_programs
from utils.errors import UserError, errors_of
from utils.machine.limits import explain_limit
from utils.pixels import PixelFormat
from utils.strings import counted


def open_exported_model(path: Path, *, device: torch.device, nms: bool, trust: bool) -> InferenceModel:
    """Opens an exported file or folder; arguments and errors as in `open_model`."""
    name = format_of(path)
    if name is None or not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(f"{path}: {'is a pipe or device, not a file' if os.path.exists(path) else 'no such file'}")
    if EXPORT_FORMATS[name].runs_code and not trust:
        raise UserError(
            f"{path}: opening {titles_of_programs()} files may run code in them; if you trust its source, use "
            "--trust (in Python: trust=True)"
        )
    metadata, session = open_exported(path, device)
    if nms and metadata.nms_iou is None:
        raise UserError(
            f"{path}: --nms: its detections need no NMS; leave it out or, if the checkpoint has two branches, export "
            "the other one with export.py --nms"
        )
    reopen = partial(open_exported_model, path.absolute(), device=device, nms=nms, trust=trust)
    return ExportedModel(session, metadata, path, device, reopen)


class ExportedModel(InferenceModel):
    """A model in an exported file. Batches are padded or cut to the number of images that it takes.

    Runtimes cannot be pickled, so a pickled model stores only the path of its file, which is opened again on
    unpickling.
    """

    def __init__(
        self,
        session: Session,
        metadata: ExportMetadata,
        path: Path,
        device: torch.device,
        reopen: Callable[[], InferenceModel],
    ) -> None:
        """``reopen`` opens the file again, from any working folder. Raises UserError for a file whose input does not
        fit its metadata."""
        super().__init__()
        self._reopen = reopen
        self._run = session.run
        self._metadata = metadata
        self.path = path
        self.format = format_of(path) or "unknown"
        self.device = device
        self.info = asdict(metadata)
        self.names = metadata.names
        self.batch, channels, height, width = session.input_shape
        if channels not in (None, metadata.channels):
            raise UserError(
                f"{path}: takes images of {counted(channels, 'channel')}, not {metadata.channels}, as its metadata says"
            )
        self.pixels = PixelFormat(metadata.channels, metadata.bits)
        self.stride = metadata.stride
        stated_height, stated_width = metadata.imgsz_hw or DEFAULT_HW
        shape = (height or stated_height, width or stated_width)
        self.input_hw = shape if height or width else None
        self.imgsz = max(shape)
        self.nms_iou = metadata.nms_iou
        self.validation_iou = metadata.validation_iou
        self.squares = metadata.squares
        self.plain_confidence = metadata.confidence
        self.confidence = metadata.confidence if metadata.voting_confidence is None else metadata.voting_confidence

    def __reduce__(self) -> tuple[Callable[[], InferenceModel], tuple[()]]:
        return self._reopen, ()

    def forward(self, images: Tensor) -> list[Tensor]:
        hw = tuple(images.shape[2:])
        if self.input_hw not in (None, hw):
            expected = f"{self.input_hw[0]}x{self.input_hw[1]} pixels (height x width)"
            raise UserError(f"{self.path}: takes inputs of {expected}, not {hw[0]}x{hw[1]}")
        images = images.float()
        size = self.batch or len(images)
        padding = images.new_zeros((-len(images) % size, *images.shape[1:]))
        outputs = [self._run_batch(part) for part in torch.cat((images, padding)).split(size)]
        return [torch.cat(outputs)[: len(images)] if len(outputs) > 1 or len(padding) else outputs[0]]

    def _run_batch(self, images: Tensor) -> Tensor:
        """Runs the file on as many images as it takes. Raises UserError for errors of its runtime, except for limits of
        the machine."""
        try:
            output = self._run(images)
        except UserError:
            raise
        except Exception as error:  # each runtime raises types of its own
            if explain_limit(error) is not None:
                raise
            size = f"{images.shape[2]}x{images.shape[3]} pixels"
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{self.path}: cannot process an image of {size} ({reason})") from error
        if output.ndim == 3 and len(output) != len(images):
            raise UserError(f"{self.path}: returns results of {len(output)} for a batch of {len(images)} images")
        return output

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes the output in the layout that the metadata state."""
        output = raw[0].float()
        num_classes = len(self.names)
        with errors_of(self.path):
            layout = self._metadata.output_layout(output.shape)
        if layout is OutputLayout.COLUMNS:
            boxes, scores = output.transpose(1, 2).split((4, num_classes), -1)
            return cxcywh_to_xyxy(boxes), scores.contiguous()
        if layout is OutputLayout.OBJECTNESS:
            boxes, objectness, scores = output.split((4, 1, num_classes), -1)
            return cxcywh_to_xyxy(boxes), objectness * scores
        boxes, scores, classes = output.split((4, 1, 1), -1)
        unknown = ~((classes > -0.5) & (classes < num_classes - 0.5)) & (scores > 0)
        if unknown.any():
            number = classes[unknown][0].item()
            raise UserError(f"{self.path}: predicts class {number:g}, but its classes are 0 to {num_classes - 1}")
        columns = scores.new_zeros((*scores.shape[:2], num_classes))  # each score in the column of its class
        numbers = classes.nan_to_num().round().long().clamp(0, num_classes - 1)
        return boxes, columns.scatter(-1, numbers, scores)
