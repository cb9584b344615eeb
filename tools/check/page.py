"""The page of a check: what was found, drawn, and what the data set is like. It needs no other file and no network."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.check.census import census_content, take_census
from data.check.gallery import DRAWN_SCORE, LABEL_LEGEND, MOST_LABEL_ERRORS
from data.check.issues import ADVICE, DUPLICATES, LABEL_ERRORS, Issue, by_kind
from data.check.labels import SIZE_STEP
from data.check.photos import COLORS
from data.check.scanned import CheckedSplit
from data.spec.dataset_spec import DatasetSpec
from tools.check.cards import IssueGalleries
from utils.drawing import page
from utils.errors import UserError, first_line
from utils.files.folders import cache_folder, increment_path
from utils.logger import get_logger
from utils.structures import DetectionTable

FILE_NAME, TEMPLATE = "report.html", "tools/check/page.html"
PROJECT = "runs/check"
MOST_LISTED = 400  # findings in the table


def make_out(spec: DatasetSpec, out: Path) -> None:
    """Makes the folder that the user names for the page. Raises UserError if it cannot, or is in the data set."""
    if folder := _inside(out, spec):
        raise UserError(f"--out {out}: is in the data set ({folder}), which is never written to; name another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None


def new_folder(spec: DatasetSpec) -> Path:
    """runs/check/exp, exp2, ... in the working folder; in the cache folder if the working folder is in the data set."""
    return increment_path(cache_folder() / "check" if _inside(Path(PROJECT), spec) else PROJECT, "exp")


def _inside(path: Path, spec: DatasetSpec) -> str:
    """The folder of the data set that ``path`` is in; "" if there is none."""
    real = os.path.realpath(path)
    folders = map(os.path.realpath, _data_folders(spec))
    return next((folder for folder in folders if os.path.commonpath([real, folder]) == folder), "")


def _data_folders(spec: DatasetSpec) -> list[str]:
    """The smallest folder that holds what the YAML names below its root, and each folder that it names elsewhere."""
    named = []
    sources = [part.split(s) for s, source in spec.splits.items() for part in source.parts or (spec,)]
    for source in sources:
        named += [str(p if p.is_dir() else p.parent) for p in (*source.images, *filter(None, [source.annotations]))]
        if source.annotations is None:  # YOLO txt: the last folder `images` becomes `labels`
            parts = [os.path.join(str(p), "").rpartition(f"{os.sep}images{os.sep}") for p in source.images]
            named += [os.path.join(before, "labels", after) for before, found, after in parts if found]
    named = list(dict.fromkeys(map(os.path.normpath, named)))
    below = [folder for folder in named if os.path.commonpath([folder, spec.root]) == str(spec.root)]
    return [*([os.path.commonpath(below)] if below else []), *(folder for folder in named if folder not in below)]


def write_page(
    out: Path | None,
    spec: DatasetSpec,
    splits: Sequence[CheckedSplit],
    issues: Sequence[Issue],
    detections: Mapping[str, DetectionTable],
    trust: Sequence[str] = (),
    *,
    imgsz: int,
    weights: str,
) -> Path | None:
    """Writes `FILE_NAME` and returns its path. A failure costs a warning; the result is then None.

    Args:
        out: its folder; None: a new folder in runs/check.
        detections: by split; empty without ``weights``.
        trust: how far the model can be trusted about labels.
        imgsz: longer image side in training, pixels.
    """
    try:
        content = _content(spec, splits, issues, detections, imgsz, weights) | {"trust": trust}
        path = (out or new_folder(spec)) / FILE_NAME
        title, subtitle = f"Check of {Path(spec.source).stem}", f"Written {page.now()}. The data set was not changed."
        page.write_page(path, TEMPLATE, title, subtitle, **content)
    except Exception as error:  # the findings are printed in any case
        get_logger().warning("the report cannot be written (%s)", first_line(error))
        return None
    return path


def _content(
    spec: DatasetSpec,
    splits: Sequence[CheckedSplit],
    issues: Sequence[Issue],
    detections: Mapping[str, DetectionTable],
    imgsz: int,
    weights: str,
) -> dict[str, Any]:
    """What page.html shows."""
    galleries = IssueGalleries(splits, detections)
    kinds = by_kind(issues)
    facts = [("data set", spec.source), ("its folder", str(spec.root)), ("--imgsz", f"{imgsz} px")]
    facts += [(f"images of {split.name}", f"{len(split.index):,}") for split in splits]
    censuses = [take_census(split.index, split.name, imgsz) for split in splits]
    most = MOST_LISTED // max(len(kinds), 1)
    listed = [issue for group in kinds.values() for issue in group[:most]]
    return {
        "colors": COLORS,
        "issues": issues,
        "kinds": page.Table(
            ("finding", "number", "what to do", "what it means", "splits"),
            [(kind, len(of), *reversed(ADVICE.get(kind, ("", ""))), _by_split(of)) for kind, of in kinds.items()],
            "Findings by kind",
        ),
        "facts": [*facts, ("model that examined the labels", weights or "none (--weights)")],
        "model": Path(weights).name,
        "label_errors": galleries.label_errors(issues),
        "errors": sum(issue.kind in LABEL_ERRORS for issue in issues),
        "most_errors": MOST_LABEL_ERRORS,
        "drawn_score": DRAWN_SCORE,
        "label_legend": LABEL_LEGEND,
        "groups": [(kind, len(group)) for kind, group in kinds.items() if kind in DUPLICATES],
        "duplicates": galleries.duplicates(issues),
        "boxes": galleries.boxes(issues),
        "data": census_content(censuses, [split.index for split in splits], imgsz=imgsz, stride=SIZE_STEP),
        "findings": page.Table(
            ("finding", "split", "where", "what", "probability"),
            [
                (i.kind, i.split or ", ".join(dict.fromkeys(i.splits)), page.code(_where(i)), i.text, i.score)
                for i in listed
            ],
            "Findings, with their places" if len(listed) == len(issues) else f"Of each kind at most {most}",
        ),
    }


def _by_split(issues: Sequence[Issue]) -> str:
    counts = Counter(", ".join(dict.fromkeys(issue.splits)) or issue.split or "whole data set" for issue in issues)
    return "; ".join(f"{split}: {count:,}" for split, count in counts.most_common())


def _where(issue: Issue) -> str:
    return issue.where or (issue.images[0] if issue.images else "")
