"""A checkpoint's detector as the graphs from which file formats are made: one input, and one output in one of two
layouts.

Only operations that every runtime has are used, and no shape depends on values, so the same modules serve ONNX,
OpenVINO, TorchScript and torch.export.

Legend: B images, N boxes, C classes, K candidates of NMS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from engine.export.formats import quiet
from models.detector import Detector
from models.postprocess.box_voting import overlap_and_union
from models.postprocess.selection import detection_iou
from utils.boxes import xyxy_to_cxcywh
from utils.config.export_formats import EXPORT_FORMATS, formats_with
from utils.config.image_size import check_image_size
from utils.config.settings import ExportConfig
from utils.errors import UserError, all_mistakes

if TYPE_CHECKING:
    from onnx import ModelProto

INPUT, OUTPUT = "images", "output0"
END2END_ROWS = 300  # by convention
END2END_MIN_SCORE = 0.001  # lowest score of a row after NMS, as in validation
CANDIDATES = 1024  # (box, class) pairs that NMS in the graph compares
ROUNDS = 24  # iterations of suppression in the graph


@dataclass(frozen=True, kw_only=True)
class ResolvedExport:
    """The flags of export.py on which a file's computation depends, resolved for a model by `resolve_options`."""

    imgsz_hw: tuple[int, int]  # canvas that the file takes, or with ``dynamic`` is meant for, pixels
    batch: int  # images that the file takes at once
    dynamic: bool  # any batch, and any canvas of whole strides
    half: bool  # float16
    int8: bool  # 8-bit convolutions
    end2end: bool  # `EndToEnd`; False: `Raw`
    nms: bool  # the one-to-many branch of an NMS-free head
    nms_iou: float | None  # IoU threshold of the NMS that the detections need, in the file or after it; None: no NMS
    opset: int  # for ONNX


def resolve_options(config: ExportConfig, detector: Detector, imgsz: int) -> ResolvedExport:
    """Fills in the settings that the flags leave to the model. Raises UserError for flags that exclude each other, or
    do not fit the formats or the model.

    ``detector``: fused. ``imgsz``: the checkpoint's image size, pixels.
    """
    sides = config.imgsz or [imgsz]
    flags = {
        "--int8": config.int8,
        "--dynamic": config.dynamic,
        "--batch": config.batch > 1,
        "--layout end2end": config.layout == "end2end",
    }
    with all_mistakes() as mistakes:
        if len(sides) > 2:
            mistakes.add(f"--imgsz: one number or two (height, width), got {len(sides)}")
        if config.half and config.int8:
            mistakes.add("--half and --int8: a file has one of these precisions; choose one")
        for flag in (flag for flag, is_given in flags.items() if is_given):
            unfit = [name for name in config.format if flag in EXPORT_FORMATS[name].unsupported]
            if unfit:
                mistakes.add(f"{flag}: not for {' and '.join(unfit)}; use --format {' or '.join(formats_with(flag))}")
        if config.dynamic and config.batch > 1:
            mistakes.add(f"--dynamic and --batch {config.batch}: a dynamic model takes any batch; leave --batch out")
        if config.dynamic and min(sides) < 2 * detector.stride:
            mistakes.add(f"--imgsz {min(sides)}: too small for --dynamic; use {2 * detector.stride} or more")
        if config.opset < 18:
            mistakes.add(f"--opset {config.opset}: torch's exporter writes no valid files below 18; leave it out")
        if config.iou_thres is not None and detector.nms_iou is None:
            mistakes.add("--iou-thres: the model's detections need no NMS; leave it out, or add --nms")
    for side in sides:
        check_image_size(side, detector.stride)
    is_end2end = config.layout == "end2end"
    nms_iou = config.iou_thres
    if nms_iou is None:  # the threshold of rows is chosen after detect.py's NMS
        nms_iou = detection_iou(detector.nms_iou) if is_end2end else detector.nms_iou
    return ResolvedExport(
        imgsz_hw=(sides[0], sides[-1]),
        batch=config.batch,
        dynamic=config.dynamic,
        half=config.half,
        int8=config.int8,
        end2end=is_end2end,
        nms=config.nms,
        nms_iou=nms_iou,
        opset=config.opset,
    )


class Raw(nn.Module):
    """A fused detector that maps images float32 (B, C, H, W) in [0, 1] to float32 (B, 4 + C, N): cx, cy, w, h in
    pixels, then the scores of the classes.

    With ``half`` the layers compute in float16; input, decoding and output are float32.
    """

    def __init__(self, detector: Detector, *, half: bool, nms_iou: float | None) -> None:
        super().__init__()
        self.detector = detector.half() if half else detector
        self.half_layers = half
        self.nms_iou = nms_iou

    def boxes_and_scores(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes boxes (B, N, 4), xyxy pixels, and scores (B, N, C)."""
        if self.half_layers:
            images = images.half()
        return self.detector.decode([level.float() for level in self.detector(images)])

    def forward(self, images: Tensor) -> Tensor:
        boxes, scores = self.boxes_and_scores(images)
        return torch.cat((xyxy_to_cxcywh(boxes).transpose(1, 2), scores.transpose(1, 2)), 1)


class EndToEnd(Raw):
    """As `Raw`, but maps to float32 (B, 300, 6): x1, y1, x2, y2, score, class, by descending score, zeros after the
    last detection.

    NMS compares the `CANDIDATES` best pairs of an image. Greedy suppression is repeated for all of them at once
    (Cluster-NMS, Zheng et al. 2021) `ROUNDS` times; it is exact unless a chain of boxes, each of which suppresses the
    next, is longer than that.
    """

    def forward(self, images: Tensor) -> Tensor:
        boxes, scores = self.boxes_and_scores(images)
        if self.nms_iou is None:
            rows = torch.cat(best_pairs(boxes, scores, END2END_ROWS), -1)
            return torch.where(rows[..., 4:5] > 0, rows, 0.0)
        low, high = boxes.split(2, -1)
        boxes = torch.cat((low, torch.maximum(low, high)), -1)  # swapped sides: a box without area
        boxes, scores, classes = best_pairs(boxes, scores, CANDIDATES)
        candidates = scores[..., 0] > END2END_MIN_SCORE
        keep = kept_pairs(boxes, classes[..., 0], candidates, self.nms_iou)
        ranked, order = torch.where(keep, scores[..., 0], -1.0).topk(END2END_ROWS)
        rows = torch.cat((boxes, scores, classes), -1).gather(1, order[..., None].expand(-1, -1, 6))
        return torch.where(ranked[..., None] > 0, rows, 0.0)


def best_pairs(boxes: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ``count`` (box, class) pairs of each image with the highest scores, best first, padded with zeros:
    boxes (B, count, 4), scores and classes as float (B, count, 1).

    The best pairs belong to the boxes with the best highest scores, so only those boxes' pairs are ranked.
    """
    num_classes = scores.shape[-1]
    boxes = torch.cat((boxes, boxes.new_zeros(boxes.shape[0], count, 4)), 1)
    scores = torch.cat((scores, scores.new_zeros(boxes.shape[0], count, num_classes)), 1)
    best = scores.amax(-1).topk(count).indices[..., None]
    pairs = scores.gather(1, best.expand(-1, -1, num_classes)).flatten(1)
    pair_scores, pair = pairs.topk(count)
    box = best.gather(1, torch.div(pair, num_classes, rounding_mode="floor")[..., None])
    classes = torch.remainder(pair, num_classes)[..., None].float()
    return boxes.gather(1, box.expand(-1, -1, 4)), pair_scores[..., None], classes


def kept_pairs(boxes: Tensor, classes: Tensor, candidates: Tensor, iou_thres: float) -> Tensor:
    """Returns which pairs NMS keeps: bool (B, K), from boxes (B, K, 4), the best first, classes (B, K) and candidates
    bool (B, K)."""
    coordinates = boxes.permute(2, 0, 1)
    overlap, union = overlap_and_union(coordinates[..., None], coordinates[:, :, None])  # (B, K, K)
    same_class = (classes[:, :, None] == classes[:, None]).float()
    # Row suppresses column. Nothing is divided, so boxes without area overlap nothing.
    suppresses = (overlap.gt_(union.mul_(iou_thres)) * same_class).triu(1)
    keep = candidates.float()[:, None]
    allowed = keep
    for _ in range(ROUNDS):
        keep = allowed * (keep @ suppresses == 0).float()
    return keep[:, 0] > 0


@dataclass
class ModelGraphs:
    """Builds the graphs that formats write, and keeps the ONNX graph, which several formats need.

    ``calibration``: returns batches of training images, float32 (B, C, H, W); only ``options.int8`` needs it.
    """

    detector: Detector  # not fused
    options: ResolvedExport
    calibration: Callable[[], Iterable[np.ndarray]] = tuple

    def module(self, *, half: bool) -> Raw:
        """Returns the detector, fused, in eval mode; with ``half`` its layers compute in float16."""
        layout = EndToEnd if self.options.end2end else Raw
        fused = self.detector.fuse(one_to_one=not self.options.nms)
        return layout(fused, half=half, nms_iou=self.options.nms_iou).eval()

    def images(self) -> Tensor:
        """Returns a batch for tracing."""
        batch = self.options.batch
        if self.options.dynamic:
            batch = max(batch, 2)  # torch.export treats a side of one cell, or a batch of one, as a constant
        return torch.zeros(batch, self.detector.channels, *self.options.imgsz_hw)

    def dynamic_shapes(self) -> tuple[dict[int, object]] | None:
        """Returns shapes for `torch.export` with any batch, height and width in whole strides; None for fixed ones."""
        if not self.options.dynamic:
            return None
        dim = torch.export.Dim
        return ({0: dim("batch"), 2: self.detector.stride * dim("height"), 3: self.detector.stride * dim("width")},)

    def trace(self, *, half: bool) -> torch.jit.ScriptModule:
        """Returns the module as a TorchScript program."""
        with quiet(), torch.no_grad():
            return torch.jit.freeze(torch.jit.trace(self.module(half=half), self.images(), check_trace=False))

    @cached_property
    def float_onnx(self) -> ModelProto:
        return self.onnx(half=False)

    def onnx(self, *, half: bool) -> ModelProto:
        """Builds the ONNX graph. Raises UserError for an opset that torch does not write."""
        import onnx

        opset = self.options.opset
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                self.module(half=half),
                (self.images(),),
                dynamo=True,
                opset_version=opset,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=self.dynamic_shapes(),
                verbose=False,
            )
        assert program is not None  # it is None without dynamo
        proto = program.model_proto
        if proto.opset_import[0].version != opset:
            raise UserError(f"--opset {opset}: torch wrote opset {proto.opset_import[0].version} instead; use that")
        # The exporter writes the newest version of the file format; older runtimes read the one that operators need.
        proto.ir_version = min(proto.ir_version, onnx.helper.find_min_ir_version_for(proto.opset_import))
        graph = proto.graph  # its notes name files of this machine
        for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph, proto):
            part.doc_string = ""
            del part.metadata_props[:]
        return proto
