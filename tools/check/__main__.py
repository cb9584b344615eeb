"""Checks a data set, and with a trained model, its labels.

python -m tools.check DATA.yaml
python -m tools.check DATA.yaml --weights best.pt --json > issues.json
python -m tools.check DATA.yaml --imgsz 1280 --split train --out checked

Shows what it finds in report.html, in a new folder of runs/check. Exit status: 0 if there is nothing to report, 1 if
there is, 2 if the check could not run. The data set is not changed.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.interrupts import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.check.options import CheckOptions
from utils.config.flags import parser_of
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.process.launch import require_one_process
from utils.program import write_result

EXIT_WITH_ISSUES = 1
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


def _parse(argv: Sequence[str] | None) -> CheckOptions:
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
        help=f"longer image side in training, pixels; default: the checkpoint's, or {TrainConfig.imgsz}",
    )
    parser.add_argument("--weights", default="", help="checkpoint trained on this data; adds the label errors it finds")
    parser.add_argument("--trust", action="store_true", help="as in val.py")
    parser.add_argument(
        "--min-score",
        type=float,
        default=DEFAULT_MIN_SCORE,
        help="minimum probability of the label errors that are reported",
    )
    parser.add_argument("--device", default="", help="cpu, mps or 0, for --weights; default: the best available device")
    parser.add_argument("--workers", type=int, default=-1, help="threads that read images; default: one per core")
    parser.add_argument("--json", action="store_true", help="print all issues as JSON, and nothing else, to stdout")
    parser.add_argument("--out", type=Path, help="folder for report.html; default: runs/check/exp, exp2, ...")
    parser.add_argument("--noplots", action="store_true", help="write no report.html")
    options = CheckOptions(**vars(parser.parse_args(argv)))
    if options.imgsz < 0:
        raise UserError(f"--imgsz {options.imgsz}: must be at least 1")
    if not 0 <= options.min_score <= 1:
        raise UserError(f"--min-score {options.min_score:g}: must be from 0 to 1")
    return options


def _check(options: CheckOptions) -> tuple[dict[str, Any], list[str]]:
    """Checks the data set. Returns the content of the JSON, and the lines of the summary."""
    from engine.commands.input_files import check_scoring_files

    check_scoring_files(options.weights, options.data, options.split)
    # `--help` and the messages about flags and files do not wait for torch.
    from tools.check.dataset_check import check_dataset

    return check_dataset(options)


if __name__ == "__main__":
    from utils.process.entrypoint import run_main

    run_main(main)
