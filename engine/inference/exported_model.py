"""Models for inference from files that export.py or another program has exported."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.formats.metadata import ExportMetadata, parse_metadata
from engine.formats.model_format import Session
from engine.formats.registry import format_of, load_format
from engine.formats.runtimes import check_input_size
from engine.inference.model import InferenceModel
from engine.inference.output_layout import LayoutKind, OutputLayout
from utils.config.export_formats import EXPORT_FORMATS, titles_of_programs
from utils.errors import UserError, errors_of
from utils.machine.limits import explain_limit
from utils.pixels import PixelFormat
from utils.strings import counted

DEFAULT_SIDE_PX = 640  # of the canvas of files that state no size
FOREIGN_IOU = 0.7  # NMS threshold in validation for files that state none


def open_exported(path: Path, *, device: torch.device, nms: bool, trust: bool) -> InferenceModel:
    """Opens an exported file or folder; arguments and errors as in `open_model`."""
    if not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(f"{path}: {'is a pipe or device, not a file' if os.path.exists(path) else 'no such file'}")
    name = format_of(path)
    if name is None:
        raise UserError(f"{path}: is not an exported model")
    with errors_of(path):
        if EXPORT_FORMATS[name].runs_code and not trust:
            raise UserError(
                f"{path}: opening {titles_of_programs()} files may run code in them; if you trust its source, use "
                "--trust (in Python: trust=True)"
            )
        session = load_format(name).open(path, device)
        reopen = partial(open_exported, path.absolute(), device=device, nms=nms, trust=trust)
        model = ExportedModel(session, parse_metadata(session.metadata), path, device, reopen)
    if nms and model.nms_iou is None:
        raise UserError(
            f"{path}: --nms: its detections need no NMS; leave it out or, if the checkpoint has two branches, export "
            "the other one with export.py --nms"
        )
    return model


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
        """``reopen`` opens the file again, from any working folder. Raises UserError for a file that is not a detector
        of images, accepts no canvas of its own stride, or needs far larger images than any detector."""
        super().__init__()
        self._reopen = reopen
        self._run = session.run
        self.path = path
        self.format = format_of(path) or "unknown"
        self.device = device
        self.info = asdict(metadata)
        self.batch, channels, height, width = session.input_shape or metadata.input_shape
        if channels not in (None, metadata.channels):
            expected = f"not {metadata.channels}, as its metadata says" if metadata.is_ours else "not RGB"
            raise UserError(f"{path}: takes images of {counted(channels, 'channel')}, {expected}")
        self.pixels = PixelFormat(metadata.channels, metadata.bits)
        self.stride = metadata.stride
        fixed_side = height or width
        default_side = fixed_side or DEFAULT_SIDE_PX
        stated = metadata.imgsz_hw or (default_side, default_side)
        stated_height, stated_width = (-(-side // self.stride) * self.stride for side in stated)  # as YOLOv5 rounds
        shape = (height or stated_height, width or stated_width)
        self.input_hw = shape if fixed_side else None  # if one side is fixed, the other stays as stated
        self.imgsz = max(shape)
        check_input_size(path, (self.batch or 1, metadata.channels, *shape))
        self._layout = OutputLayout.of(self._probe(shape), metadata, path)
        self.names = self._layout.names
        # Files of other programs do not state whether their detections need NMS.
        is_raw = self._layout.kind is not LayoutKind.DETECTIONS
        needs_nms = is_raw and not metadata.is_ours and not metadata.end2end
        self.nms_iou = FOREIGN_IOU if needs_nms else metadata.nms_iou
        self.has_builtin_voting = metadata.box_voting
        self.validation_iou = metadata.validation_iou or FOREIGN_IOU
        self.squares = metadata.squares
        self.plain_confidence = metadata.confidence
        self.confidence = metadata.confidence if metadata.voting_confidence is None else metadata.voting_confidence

    def __reduce__(self) -> tuple[Callable[[], InferenceModel], tuple[()]]:
        return self._reopen, ()

    def _probe(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Returns the shape of the output for a batch of gray images."""
        height, width = shape
        try:
            images = torch.full((self.batch or 1, self.pixels.channels, height, width), 0.5, device=self.device)
            with torch.inference_mode():
                return tuple(self._run_batch(images).shape)
        except Exception as error:
            reason = explain_limit(error)
            if reason is None:
                raise
            raise self._cannot_process((height, width), reason) from None

    def forward(self, images: Tensor) -> list[Tensor]:
        height, width = images.shape[2:]
        if self.input_hw is not None and self.input_hw != (height, width):
            expected_height, expected_width = self.input_hw
            raise UserError(
                f"{self.path}: takes inputs of {expected_height}x{expected_width} pixels (height x width), not "
                f"{height}x{width}"
            )
        images = images.float()
        if self.batch is None or self.batch == len(images):
            return [self._run_batch(images)]
        padding = images.new_zeros((-len(images) % self.batch, *images.shape[1:]))
        outputs = [self._run_batch(part) for part in torch.cat((images, padding)).split(self.batch)]
        return [torch.cat(outputs)[: len(images)]]

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
            reason = " ".join(str(error).split())[:300]
            raise self._cannot_process(images.shape[2:], reason) from error
        if output.ndim == 3 and len(output) != len(images):
            raise UserError(f"{self.path}: returns results of {len(output)} for a batch of {len(images)} images")
        return output

    def _cannot_process(self, hw: Sequence[int], reason: str) -> UserError:
        height, width = hw
        return UserError(f"{self.path}: cannot process an image of {height}x{width} pixels ({reason})")

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        with errors_of(self.path):
            return self._layout.decode(raw[0].float())
