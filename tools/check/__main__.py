"""Checks a data set, and with a trained model, its labels.

python -m tools.check DATA.yaml
python -m tools.check DATA.yaml --weights best.pt --json > issues.json
python -m tools.check DATA.yaml --imgsz 1280 --split train --out checked

Draws what it finds in report.html, in runs/check. Exit status: 0 if there is nothing to report, 1 if there is, 2 if the
check could not run. The data set is never written to.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.interrupts import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.flags import parser_of
from utils.distributed.launch import require_one_process
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.program import write_result

if TYPE_CHECKING:
    from engine.report.gallery import DrawnDetections

EXIT_WITH_ISSUES = 1
DEFAULT_IMGSZ = 640
DEFAULT_MIN_SCORE = 0.3


def main(argv: Sequence[str] | None = None) -> None:
    options = _parse(argv)
    require_one_process("tools.check")
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        configure_logging(True)
        content, lines = _check(options)
    if options.json:
        json.dump(content, sys.stdout, indent=1)
        print()
    else:
        for line in lines:
            get_logger().info("%s", line)
    write_result(**content)
    if content["issues"]:
        raise SystemExit(EXIT_WITH_ISSUES)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(
        "check",
        "Checks a data set: files, labels, near-duplicate images, sizes and classes. The exit status is 0 if there is "
        "nothing to report, 1 if there is, and 2 if the check could not run.",
    )
    parser.add_argument("data", metavar="DATA", help="data set YAML, the name of one in configs/data, or demo")
    parser.add_argument("--split", nargs="+", default=[], metavar="SPLIT", help="splits to check; default: all")
    parser.add_argument(
        "--imgsz",
        "--img",
        "--img-size",
        type=int,
        default=0,
        help=f"longer image side in training, pixels; default: the checkpoint's, or {DEFAULT_IMGSZ}",
    )
    parser.add_argument("--weights", default="", help="checkpoint trained on this data; adds the label errors it finds")
    parser.add_argument("--trust", action="store_true", help="as in val.py")
    parser.add_argument(
        "--min-score", type=float, default=DEFAULT_MIN_SCORE, help="least probability of label errors that are reported"
    )
    parser.add_argument("--device", default="", help="cpu, mps or 0, for --weights; default: the best available device")
    parser.add_argument("--workers", type=int, default=-1, help="threads that read images; default: one per core")
    parser.add_argument("--json", action="store_true", help="print all issues as JSON, and nothing else, to stdout")
    parser.add_argument("--out", type=Path, help="folder for report.html; default: runs/check/exp, exp2, ...")
    parser.add_argument("--noplots", action="store_true", help="write no report.html")
    options = parser.parse_args(argv)
    if options.imgsz < 0:
        raise UserError(f"--imgsz {options.imgsz}: must be at least 1")
    if not 0 <= options.min_score <= 1:
        raise UserError(f"--min-score {options.min_score:g}: must be from 0 to 1")
    return options


def _check(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Checks the data set. Returns the content of the JSON, and the lines of the summary."""
    from engine.commands.input_files import check_scoring_files

    check_scoring_files(options.weights, options.data, options.split or ())
    # Modules that need torch are imported only after flags and files are known to be valid.
    from data.source.dataset_spec import DataSource
    from data.source.open import open_data
    from tools.check.duplicates import image_issues
    from tools.check.issue_kinds import summary_lines
    from tools.check.label_checks import box_pairs, box_sizes, class_use, scan_dataset, scan_issues
    from tools.check.page import make_out, write_page
    from utils.config.settings import ValConfig
    from utils.distributed.context import DistributedContext
    from utils.machine.resources import available_cores
    from utils.strings import class_difference, counted

    model = None
    if options.weights:
        from engine.commands.val import canvases_of, check_size
        from engine.evaluation.label_errors import trust_lines
        from engine.inference.model_data import check_channels
        from engine.inference.predictor import open_weights
        from tools.check.label_errors import label_issues

        model = open_weights(options.weights, device=options.device, trust=options.trust)
        validation = ValConfig(weights=options.weights, imgsz=options.imgsz, workers=options.workers)
        check_size(validation, model)
    spec = open_data(DataSource(options.data), DistributedContext.single())
    if model:
        difference = class_difference(model.names, spec.names)
        if difference:
            weights = options.weights
            raise UserError(f"--weights {weights}: the classes of the model and of the data set differ ({difference})")
        check_channels(model, spec)
    splits = tuple(options.split or spec.splits)
    for split in splits:
        spec.split(split)
    if options.out:
        make_out(spec, options.out)
    imgsz = canvases_of(validation, model).imgsz if model else options.imgsz or DEFAULT_IMGSZ
    workers = available_cores() if options.workers < 0 else options.workers
    scanned = scan_dataset(spec, tuple(dict.fromkeys(splits)), workers=workers)
    issues = [issue for split in scanned for issue in scan_issues(split)]
    issues += image_issues(scanned, max(workers, 1))
    issues += [issue for split in scanned for issue in box_pairs(split)]
    issues += box_sizes(scanned, imgsz)
    issues += class_use(scanned)
    detections: dict[str, DrawnDetections] = {}
    trust: list[str] = []
    if model:
        label_errors, detections, results = label_issues(validation, model, spec, scanned, options.min_score)
        issues += label_errors
        epochs = model.info.get("progress", {}).get("epoch", 0)
        trained = f" (after {counted(epochs, 'epoch')})" if type(epochs) is int and epochs > 0 else ""
        trust = trust_lines(Path(options.weights).name + trained, results, spec.names, label_errors)
    lines = trust + (summary_lines(issues) or ["nothing to report"])
    report = None
    if not options.noplots:
        report = write_page(options.out, spec, scanned, issues, detections, trust, imgsz=imgsz, weights=options.weights)
    if report:
        lines.append(f"report: {report}")
    content = {
        "data": spec.source,
        "root": str(spec.root),
        "imgsz": imgsz,
        "report": str(report) if report else None,
        "splits": {split.name: dict(split.index.report.totals) for split in scanned},
        "model": trust,
        "issues": [issue.content() for issue in issues],
    }
    return content, lines


if __name__ == "__main__":
    from utils.entrypoint import run_main

    run_main(main)
