"""Defines the report of a scan: totals, a line for everything that was left out or changed, and the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.flat_strings import FlatStrings
from data.labels.findings import MISREAD, NO_LABEL, Finding
from data.labels.ledger import EMPTY_LEDGER, Ledger
from utils.errors import one_line
from utils.files.safe_io import write_whole
from utils.strings import counted

_NO_PROBLEM = frozenset({"images", "backgrounds", "boxes", "crowd", NO_LABEL})


@dataclass(frozen=True, slots=True)
class FindingTable:
    """The N findings of a report in columns. File names may contain any character, so lines of text could not be split
    again."""

    where: FlatStrings  # (N,) paths relative to the data set's folder
    kind: FlatStrings  # (N,)
    text: FlatStrings  # (N,)

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> FindingTable:
        findings = list(findings)
        return cls(
            where=FlatStrings.of(finding.where for finding in findings),
            kind=FlatStrings.of(finding.kind for finding in findings),
            text=FlatStrings.of(finding.message for finding in findings),
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, i: int) -> Finding:
        return Finding(self.where[i], self.kind[i], self.text[i])

    def __iter__(self) -> Iterator[Finding]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, slots=True)
class ScanReport:
    """The totals (``images``, ``backgrounds``, ``boxes``, ``crowd``, and a count per kind) and findings of a scan."""

    totals: dict[str, int]
    findings: FindingTable
    ledger: Ledger = EMPTY_LEDGER  # covers the whole split, whatever part a run uses
    advice: tuple[str, ...] = ()  # messages about labels that are probably misread, and what to do
    notes: tuple[str, ...] = ()  # other messages for the user

    @classmethod
    def of(cls, findings: Sequence[Finding], ledger: Ledger = EMPTY_LEDGER, notes: Sequence[str] = ()) -> ScanReport:
        """Returns the report of all ``findings``, without the numbers of images and boxes."""
        advice = tuple(f.text for f in findings if f.kind == MISREAD)
        totals = dict(Counter(f.kind for f in findings))
        return cls(totals, FindingTable.of(findings), ledger, advice, tuple(notes))

    def with_totals(self, totals: dict[str, int]) -> ScanReport:
        """Returns the report with its totals updated by ``totals``."""
        return replace(self, totals=self.totals | totals)

    @property
    def lines(self) -> list[str]:
        """The findings as lines: "file:line: kind: problem"."""
        return list(map(str, self.findings))

    @property
    def problems(self) -> int:
        """Number of findings that the user may want to correct."""
        return sum(self._problem_kinds.values())

    @property
    def _problem_kinds(self) -> dict[str, int]:
        return {kind: n for kind, n in self.totals.items() if kind not in _NO_PROBLEM}

    def summary(self) -> str:
        """Returns one line: the numbers of images, backgrounds, boxes and problems."""
        totals = self.totals
        backgrounds = counted(totals["backgrounds"], "background")
        if totals.get(NO_LABEL):
            backgrounds += f" ({totals[NO_LABEL]:,} without a label file)"
        boxes = counted(totals["boxes"], "box")
        if totals.get("crowd"):
            boxes += f" and {counted(totals['crowd'], 'crowd region')}"
        problems = counted(self.problems, "problem")
        kinds = sorted(self._problem_kinds.items(), key=lambda item: -item[1])
        if kinds:
            problems += f" ({', '.join(f'{count:,} {kind}' for kind, count in kinds)})"
        return f"{counted(totals['images'], 'image')}, {backgrounds}, {boxes}, {problems}"

    def write(self, path: str | Path) -> None:
        """Writes the summary and all lines to a text file."""
        write_whole(path, "".join(f"{line}\n" for line in (self.summary(), *map(one_line, map(str, self.findings)))))
