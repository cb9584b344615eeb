"""The page of a check: what was found, drawn, and what the data set is like. It needs no other file and no network."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from data.check.census import census_parts, take_census
from data.check.issues import DUPLICATES, EXPLANATIONS, LABEL_ERRORS, REMEDIES, Issue, by_kind
from data.check.labels import SIZE_STEP
from data.check.scanned import CheckedSplit
from data.index.dataset_yaml import DatasetSpec
from engine.tools.check.cards import DRAWN_SCORE, MOST_LABEL_ERRORS, IssueGalleries
from utils.drawing import page
from utils.drawing.charts import legend
from utils.errors import UserError
from utils.files.folders import cache_folder, increment_path
from utils.logger import get_logger
from utils.strings import counted
from utils.structures import DetectionTable

FILE_NAME = "report.html"
PROJECT = "runs/check"
MOST_LISTED = 400  # findings in the table
_LABEL = ("label that the finding is about", "label-key")
_OTHERS = ("other labels", "correct")


def make_out(spec: DatasetSpec, out: Path) -> None:
    """Makes the folder that the user names for the page. Raises UserError if it cannot, or is in the data set."""
    if folder := _inside(out, spec):
        raise UserError(f"--out {out}: is in the data set ({folder}), which is never written to; name another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None


def _new_folder(spec: DatasetSpec) -> Path:
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
    for source in spec.splits.values():
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
    *,
    imgsz: int,
    weights: str,
) -> Path | None:
    """Writes `FILE_NAME` and returns its path. A failure costs a warning; the result is then None.

    Args:
        out: its folder; None: a new folder in runs/check.
        detections: by split; empty without ``weights``.
        imgsz: longer image side in training, pixels.
    """
    try:
        built = _build(spec, splits, issues, detections, imgsz=imgsz, weights=weights)
        path = (out or _new_folder(spec)) / FILE_NAME
        built.write(path)
    except Exception as error:  # the findings are printed in any case
        get_logger().warning("the report cannot be written (%s)", (str(error).strip() or repr(error)).splitlines()[0])
        return None
    return path


def _build(
    spec: DatasetSpec,
    splits: Sequence[CheckedSplit],
    issues: Sequence[Issue],
    detections: Mapping[str, DetectionTable],
    *,
    imgsz: int,
    weights: str,
) -> page.Page:
    now = datetime.now().astimezone().isoformat(" ", "minutes")
    out = page.Page(f"Check of {Path(spec.source).stem}", f"Written {now}. The data set was not changed.")
    galleries = IssueGalleries(out, splits, detections)
    out.section("Summary", *_summary(spec, splits, issues, imgsz, weights))
    if weights:
        out.section("Label errors", *_label_errors(galleries, issues, weights))
    out.section("Near-duplicates", *_near_duplicates(galleries, issues))
    boxes = galleries.boxes(issues)
    colors = legend([("box that the finding is about", "spurious"), ("first of two boxes", "label-key"), _OTHERS])
    out.section("Images and boxes", *((colors, boxes) if boxes else ("There is no finding about an image or a box.",)))
    censuses = [take_census(split.index, split.name, imgsz) for split in splits]
    out.section("Data", *census_parts(censuses, [split.index for split in splits], imgsz=imgsz, stride=SIZE_STEP))
    out.section("Samples of each class", *_samples(galleries, splits))
    out.section("All findings", *_all_findings(issues))
    return out


def _summary(
    spec: DatasetSpec, splits: Sequence[CheckedSplit], issues: Sequence[Issue], imgsz: int, weights: str
) -> Iterator[page.Content]:
    kinds = by_kind(issues)
    if issues:
        yield f"{counted(len(issues), 'finding')} of {counted(len(kinds), 'kind')}."
        columns = ("finding", "number", "splits", "what it means", "what to do")
        rows = [
            (kind, len(group), _by_split(group), EXPLANATIONS.get(kind, ""), REMEDIES.get(kind, ""))
            for kind, group in kinds.items()
        ]
        yield page.table(columns, rows, "Findings by kind")
    else:
        yield "Nothing to report."
    facts = [("data set", spec.source), ("its folder", str(spec.root)), ("--imgsz", f"{imgsz} px")]
    facts += [(f"images of {split.name}", f"{len(split.index):,}") for split in splits]
    yield page.facts([*facts, ("model that examined the labels", weights or "none (--weights)")])


def _by_split(issues: Sequence[Issue]) -> str:
    counts = Counter(", ".join(dict.fromkeys(issue.splits)) or issue.split or "whole data set" for issue in issues)
    return "; ".join(f"{split}: {count:,}" for split, count in counts.most_common())


def _label_errors(galleries: IssueGalleries, issues: Sequence[Issue], weights: str) -> Iterator[page.Content]:
    found = sum(issue.kind in LABEL_ERRORS for issue in issues)
    cards = galleries.label_errors(issues)
    if cards is None:
        yield "The model contradicts no label."
        return
    first = f"The {MOST_LABEL_ERRORS} most probable of " if found > MOST_LABEL_ERRORS else ""
    yield (
        f"{first}{counted(found, 'label error')} according to {Path(weights).name}, with probabilities: "
        f"the label or the model is wrong. Detections from confidence {DRAWN_SCORE} on are drawn."
    )
    yield legend(
        [_LABEL, _OTHERS, ("detection, or suggested box", "location"), ("suggested box without a label", "missed")]
    )
    yield cards


def _near_duplicates(galleries: IssueGalleries, issues: Sequence[Issue]) -> Iterator[page.Content]:
    groups = by_kind(issue for issue in issues if issue.kind in DUPLICATES)
    cards = galleries.duplicates(issues)
    if cards is None:
        yield "There are none. Mirrored, rotated and strongly cropped copies are not looked for."
        return
    said = "; ".join(f"{counted(len(group), 'group')} of {kind}" for kind, group in groups.items())
    yield f"{said}. Two images of each group are shown, with their labels."
    yield cards


def _samples(galleries: IssueGalleries, splits: Sequence[CheckedSplit]) -> Iterator[page.Content]:
    cards, classes = galleries.samples()
    if cards is None:
        yield "There are no boxes."
        return
    used = len(set().union(*(split.index.classes.tolist() for split in splits)))
    shown = f"{classes} of {used} classes that have boxes" if classes < used else "Each class"
    yield f"{shown}, from small to large boxes."
    yield legend([("box of the class", "location"), _OTHERS])
    yield cards


def _all_findings(issues: Sequence[Issue]) -> Iterator[page.Content]:
    kinds = by_kind(issues)
    most = MOST_LISTED // max(len(kinds), 1)
    listed = [issue for group in kinds.values() for issue in group[:most]]
    rows = [
        (i.kind, i.split or ", ".join(dict.fromkeys(i.splits)), page.code(_where(i)), i.text, i.score) for i in listed
    ]
    if not rows:
        yield "Nothing to report."
        return
    caption = "Findings, with their places" if len(listed) == len(issues) else f"Of each kind at most {most}"
    table = page.table(("finding", "split", "where", "what", "probability"), rows, caption)
    yield page.fold(f"{len(listed):,} of {len(issues):,} findings", table)
    yield Markup("{} prints all findings, with the names of all files.").format(page.code("--json"))


def _where(issue: Issue) -> str:
    return issue.where or (issue.images[0] if issue.images else "")
