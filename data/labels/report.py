"""The report of a scan: totals, a line for everything that was left out or changed, and the ledger."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from data.labels.findings import MISREAD, NO_LABEL, Finding
from data.labels.ledger import NOTHING, Ledger
from utils.errors import one_line
from utils.files.safe_io import write_whole
from utils.strings import FlatStrings, counted

_NO_PROBLEM = frozenset({"images", "backgrounds", "boxes", "crowd", NO_LABEL})


@dataclass(frozen=True, slots=True)
class ScanReport:
    """Totals (``images``, ``backgrounds``, ``boxes``, ``crowd``, and a count per kind) and lines of text."""

    totals: dict[str, int]
    lines: FlatStrings  # "file:line: kind: what", paths relative to the data set's folder
    ledger: Ledger = NOTHING  # of the whole split, whatever a view uses of it
    advice: tuple[str, ...] = ()  # what is probably misread, and what to do
    notes: tuple[str, ...] = ()  # what else a user should know

    @classmethod
    def of(cls, findings: Sequence[Finding], ledger: Ledger = NOTHING, notes: Sequence[str] = ()) -> ScanReport:
        """The report of all ``findings``, without the numbers of images and boxes."""
        advice = tuple(f.text for f in findings if f.kind == MISREAD)
        totals = dict(Counter(f.kind for f in findings))
        return cls(totals, FlatStrings.of(map(str, findings)), ledger, advice, tuple(notes))

    @property
    def problems(self) -> int:
        """Number of findings that the user may want to correct."""
        return sum(self._problem_kinds.values())

    @property
    def _problem_kinds(self) -> dict[str, int]:
        return {kind: n for kind, n in self.totals.items() if kind not in _NO_PROBLEM}

    def summary(self) -> str:
        t = self.totals
        unlabeled = f" ({t[NO_LABEL]:,} without a label file)" if t.get(NO_LABEL) else ""
        text = f"{counted(t['images'], 'image')}, {counted(t['backgrounds'], 'background')}{unlabeled}, "
        text += counted(t["boxes"], "box") + (f" and {counted(t['crowd'], 'crowd region')}" if t.get("crowd") else "")
        detail = ", ".join(f"{n:,} {k}" for k, n in sorted(self._problem_kinds.items(), key=lambda item: -item[1]))
        return f"{text}, {counted(self.problems, 'problem')}" + (f" ({detail})" if detail else "")

    def write(self, path: str | os.PathLike) -> None:
        write_whole(path, "".join(f"{line}\n" for line in (self.summary(), *map(one_line, self.lines))))
