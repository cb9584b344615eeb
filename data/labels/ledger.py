"""Keeps the ledger of a split: how many labeled images and objects are used, and how many are lost for which reason.

Every reader of files and labels reports unusable content as a `Finding`, with the number of images and objects that are
lost. `Ledger.of` adds them up when a split is scanned, and index caches and shards store the sums. `refusal_message`
compares the sums with ``--max-bad``, and `loss_warning` with `WARNED_SHARE`. Images and objects that a user chooses to
leave out (``--classes``, ``ignore:``, ``--fraction``) are not lost: `data.index.selection`, which makes such choices,
does not change the ledger. An image that it leaves out because of a lost row, with no object of the classes in use, is
not counted either, because the row already is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data.labels.findings import BAD_IMAGE, BAD_LABEL, Finding
from utils.schema import Count
from utils.strings import counted

WARNED_SHARE = 0.01  # losses of at least this fraction of the images or objects are logged as a warning
_SHOWN = 3  # reasons in a message


@dataclass(frozen=True, slots=True)
class Loss:
    """Number of images and objects that are lost for one reason."""

    kind: str  # kind of its findings
    images: Count  # images left out, and label files of images that the split does not contain
    objects: Count  # rows of label files or annotations
    example: str  # its first finding, "file:line: problem"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts the used and lost images and objects of a split."""

    used_images: Count = 0
    used_objects: Count = 0  # including crowd regions and repeated boxes
    losses: tuple[Loss, ...] = ()  # largest share first

    @classmethod
    def of(cls, findings: Iterable[Finding], used_images: int, used_objects: int) -> Ledger:
        """Adds up the losses of ``findings``, by kind and cause."""
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in findings:
            if finding.lost_images or finding.lost_objects:
                groups.setdefault(_group(finding), []).append(finding)
        losses = [
            Loss(
                kind=kind,
                images=sum(finding.lost_images for finding in group),
                objects=sum(finding.lost_objects for finding in group),
                example=f"{group[0].where}: {group[0].text}",
            )
            for (kind, _), group in groups.items()
        ]
        return cls(used_images, used_objects, tuple(losses))._sorted()

    @classmethod
    def joined(cls, ledgers: Sequence[Ledger]) -> Ledger:
        """Returns the ledger of several splits that are used as one."""
        return cls(
            sum(ledger.used_images for ledger in ledgers),
            sum(ledger.used_objects for ledger in ledgers),
            tuple(loss for ledger in ledgers for loss in ledger.losses),
        )._sorted()

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> Ledger:
        """Restores a ledger from its `content` in a cache file or an index of shards."""
        return cls(content["used_images"], content["used_objects"], tuple(Loss(**loss) for loss in content["losses"]))

    def content(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return asdict(self)

    @property
    def lost_images(self) -> int:
        return sum(loss.images for loss in self.losses)

    @property
    def lost_objects(self) -> int:
        return sum(loss.objects for loss in self.losses)

    @property
    def images(self) -> int:
        """Number of images of the split, including labeled images that it does not contain."""
        return self.used_images + self.lost_images

    @property
    def objects(self) -> int:
        """Number of labeled objects, without those in label files that cannot be parsed."""
        return self.used_objects + self.lost_objects

    @property
    def share(self) -> float:
        """The lost fraction, 0 to 1, of the images or of the objects, whichever is larger.

        Neither implies the other: one image may contain most of the objects, and a lost label file may contain no
        countable ones.
        """
        return self._share(self.lost_images, self.lost_objects)

    def _share(self, images: int, objects: int) -> float:
        return max(images / max(self.images, 1), objects / max(self.objects, 1))

    def _sorted(self) -> Ledger:
        losses = sorted(self.losses, key=lambda loss: -self._share(loss.images, loss.objects))
        return Ledger(self.used_images, self.used_objects, tuple(losses))

    def loss_summary(self) -> str:
        """Returns text such as ``3 of 20 images and 45 of 100 labeled objects``, or "" if nothing is lost."""
        parts = []
        if self.lost_images:
            parts.append(f"{self.lost_images:,} of {counted(self.images, 'image')}")
        if self.lost_objects:
            parts.append(f"{self.lost_objects:,} of {counted(self.objects, 'labeled object')}")
        return " and ".join(parts)

    @property
    def main_losses(self) -> tuple[Loss, ...]:
        """The largest losses, which `reasons` names."""
        return self.losses[:_SHOWN]

    def reasons(self) -> str:
        """Returns the causes of the largest losses, each with an example."""
        reasons = []
        for loss in self.main_losses:
            if loss.images == 1 or (loss.images == 0 and loss.objects == 1):
                reasons.append(f"{loss.kind}: {loss.example}")
                continue
            amounts = [(loss.images, "image"), (loss.objects, "object")]
            amount = " with ".join(counted(count, noun) for count, noun in amounts if count)
            reasons.append(f"{loss.kind}: {amount}, first {loss.example}")
        if len(self.losses) > _SHOWN:
            reasons.append(f"and {counted(len(self.losses) - _SHOWN, 'other reason')}")
        return "; ".join(reasons)


EMPTY_LEDGER = Ledger()  # nothing labeled, nothing lost


def refusal_message(ledger: Ledger, max_bad: float) -> str:
    """Returns why a split must not be used, or "" if at most the fraction ``max_bad`` of it is lost and an image is
    left."""
    if ledger.used_images and ledger.share <= max_bad:
        return ""
    return f"{ledger.loss_summary()} can't be used (--max-bad is {max_bad:g}): {ledger.reasons()}"


def loss_warning(ledger: Ledger) -> str:
    """Returns a message about the losses of a split that is used, or "" for less than `WARNED_SHARE`."""
    if ledger.share < WARNED_SHARE:
        return ""
    return f"{ledger.loss_summary()} can't be used and are left out: {ledger.reasons()}"


def _group(finding: Finding) -> tuple[str, str]:
    """Returns the key by which losses are added up: the kind and, for unusable image and label files, the cause without
    its numbers. Other findings are grouped by kind only."""
    if finding.kind not in (BAD_IMAGE, BAD_LABEL):
        return finding.kind, ""
    return finding.kind, re.sub(r"\d+", "N", finding.cause or finding.text)
