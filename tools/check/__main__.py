"""Checks a data set and, given a trained model, its labels.

python -m tools.check DATA.yaml
python -m tools.check DATA.yaml --weights best.pt --json > issues.json
python -m tools.check DATA.yaml --imgsz 1280 --split train --out checked

Shows the issues in report.html, in a new folder below runs/check. Exit status: 0 if there is nothing to report, 1 if
there is, 2 if the check could not run. The data set is not changed.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from utils.config.tool_settings import CheckConfig
from utils.errors import CHECK_FAILED
from utils.logger import configure_logging, get_logger
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("check", _check, argv)


def _check(config: CheckConfig) -> None:
    content = check(config)
    if content["issues"]:
        raise SystemExit(CHECK_FAILED)


def check(config: CheckConfig) -> dict[str, Any]:
    """Checks the data set, prints the summary or the JSON, and draws the page. Returns what the JSON contains."""
    with contextlib.redirect_stdout(sys.stderr) if config.json else contextlib.nullcontext():
        configure_logging(True)
        from tools.check.content import json_content, summary, write_report  # import torch
        from tools.check.dataset_check import check_dataset

        result = check_dataset(config)
        for line in () if config.json else summary(result):
            get_logger().info("%s", line)
        report = write_report(result, config.out) if config.plots else None
    content = json_content(result, report)
    if config.json:
        json.dump(content, sys.stdout, indent=1)
        print()
    return content


if __name__ == "__main__":
    run_main(main)
