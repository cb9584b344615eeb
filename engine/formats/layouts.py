"""The output of an exported model: one tensor, in one of two layouts.

Only operations that every runtime has are used, and no shape depends on values, so the same modules serve ONNX,
OpenVINO, TorchScript and torch.export.

Legend: B images, N boxes, C classes, K candidates of NMS, D detections.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.detector import Detector
from models.postprocess.box_voting import MIN_VOTING_SCORE, VOTERS, log_misses, raised_scores, vote_weights
from models.postprocess.nms import overlap_and_union, overlaps
from utils.boxes import xyxy_to_cxcywh

END2END_ROWS = 300  # rows of the end2end layout, by convention
END2END_MIN_SCORE = 0.001  # lowest score of a row of the end2end layout after NMS, as in validation
CANDIDATES = VOTERS  # (box, class) pairs that NMS in the graph compares, and that vote
ROUNDS = 24  # iterations of suppression in the graph
MAX_COORDINATE = 1e30


class ExportModule(nn.Module):
    """A fused detector that maps images float32 (B, C, H, W) in [0, 1] to one output.

    With ``half`` the layers compute in float16; input, decoding and output are float32.
    """

    def __init__(self, detector: Detector, half: bool, nms_iou: float | None, box_voting: bool) -> None:
        super().__init__()
        self.detector = detector.half() if half else detector
        self.half_layers = half
        self.nms_iou = nms_iou
        self.box_voting = box_voting

    def boxes_and_scores(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes boxes (B, N, 4), xyxy pixels, and scores (B, N, C)."""
        if self.half_layers:
            images = images.half()
        return self.detector.decode([level.float() for level in self.detector(images)])


class Raw(ExportModule):
    """float32 (B, 4 + C, N): cx, cy, w, h in pixels, then the scores of the classes."""

    def forward(self, images: Tensor) -> Tensor:
        boxes, scores = self.boxes_and_scores(images)
        return torch.cat((xyxy_to_cxcywh(boxes).transpose(1, 2), scores.transpose(1, 2)), 1)


class EndToEnd(ExportModule):
    """float32 (B, 300, 6): x1, y1, x2, y2, score, class, by descending score, zeros after the last detection.

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
        pairs = torch.cat((boxes, scores, classes), -1)
        rows = pairs.gather(1, order[..., None].expand(-1, -1, 6))
        if self.box_voting:
            rows = voted_rows(rows, order, pairs, self.nms_iou)
        rows = torch.where(ranked[..., None] > 0, rows, 0.0)
        if self.box_voting:  # scores have changed
            order = rows[..., 4].topk(END2END_ROWS).indices
            rows = rows.gather(1, order[..., None].expand(-1, -1, 6))
        return rows


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
    overlap = overlaps(coordinates, coordinates, iou_thres)  # (B, K, K)
    same_class = (classes[:, :, None] == classes[:, None]).float()
    suppresses = (overlap * same_class).triu(1)  # row suppresses column
    keep = candidates.float()[:, None]
    allowed = keep
    for _ in range(ROUNDS):
        keep = allowed * (keep @ suppresses == 0).float()
    return keep[:, 0] > 0


def voted_rows(rows: Tensor, numbers: Tensor, pairs: Tensor, iou_thres: float) -> Tensor:
    """Moves kept boxes and raises their scores by box voting, see `models.postprocess.box_voting.vote`.

    Sums are not computed as matrix products, which on GPUs may have the precision of TF32.

    Args:
        rows: (B, D, 6), the kept pairs: x1, y1, x2, y2, score, class.
        numbers: (B, D), position of each row in ``pairs``.
        pairs: (B, K, 6), all pairs that may vote.

    Returns rows (B, D, 6).
    """
    kept = rows.permute(2, 0, 1)[..., None]  # (6, B, D, 1)
    voters = pairs.permute(2, 0, 1)[:, :, None]  # (6, B, 1, K)
    is_other = numbers[..., None] != torch.arange(pairs.shape[1], device=pairs.device)
    weights = _weights_of_votes(kept, voters, is_other, iou_thres)
    boxes = _moved_boxes(kept, voters, weights)
    scores = raised_scores(kept[4, ..., 0], log_misses(weights).sum(-1))
    return torch.cat((boxes, scores[None], kept[5:, ..., 0])).permute(1, 2, 0)


def _weights_of_votes(kept: Tensor, voters: Tensor, is_other: Tensor, iou_thres: float) -> Tensor:
    """Computes the weight of each pair's vote on each kept box: (B, D, K), 0 where it has none.

    Args:
        kept: (6, B, D, 1), the rows of `voted_rows`, transposed.
        voters: (6, B, 1, K).
        is_other: bool (B, D, K), False for the kept box itself.
    """
    voter_scores = voters[4]
    overlap, union = overlap_and_union(kept[:4], voters[:4])
    is_same_class = kept[5] == voters[5]
    votes = (overlap > union * iou_thres) & is_same_class & (voter_scores > MIN_VOTING_SCORE) & is_other
    return torch.where(votes, voter_scores * vote_weights(overlap / union), 0.0)


def _moved_boxes(kept: Tensor, voters: Tensor, weights: Tensor) -> Tensor:
    """Computes the weighted means of kept boxes and their voters: (4, B, D). Arguments: see `_weights_of_votes`."""
    # Infinite boxes have no vote, but 0 * inf is NaN.
    finite = torch.where(voters[:4].abs() < MAX_COORDINATE, voters[:4], 0.0)
    boxes = kept[:4, ..., 0]
    scores = kept[4, ..., 0]
    mean = ((weights * finite).sum(-1) + boxes * scores) / (weights.sum(-1) + scores)
    return torch.where(boxes.abs() < MAX_COORDINATE, mean, boxes)


def make_layout(
    detector: Detector, layout: str, *, half: bool = False, nms_iou: float | None = None, box_voting: bool = True
) -> ExportModule:
    """Returns the module to export, in eval mode, for a fused ``detector``. ``nms_iou`` (None: the detections need no
    NMS) and ``box_voting`` apply to the NMS inside end2end."""
    layouts: dict[str, type[ExportModule]] = {"raw": Raw, "end2end": EndToEnd}
    return layouts[layout](detector, half, nms_iou, box_voting).eval()
