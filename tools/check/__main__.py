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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.tool_settings import CheckConfig
from utils.errors import CHECK_FAILED
from utils.logger import configure_logging, get_logger
from utils.process.main import run_command, run_main

if TYPE_CHECKING:
    from tools.check.dataset_check import CheckResult


def main(argv: Sequence[str] | None = None) -> None:
    run_command("check", _check, argv)


def _check(config: CheckConfig) -> None:
    content = check(config)
    if content["issues"]:
        raise SystemExit(CHECK_FAILED)


def check(config: CheckConfig) -> dict[str, Any]:
    """Checks the data set, prints the summary or the JSON, and draws the page. Returns what the JSON contains."""
    with _json_alone_on_stdout(config):
        configure_logging(True)
        from tools.check.dataset_check import check_dataset  # imports torch

        result = check_dataset(config)
    if not config.json:
        for line in result.summary():
            get_logger().info("%s", line)
    report = None
    try:
        report = _draw(config, result)
    finally:  # the JSON names the page, and is not lost if the page cannot be drawn
        content = result.content(report)
        if config.json:
            json.dump(content, sys.stdout, indent=1)
            print()
    return content


def _draw(config: CheckConfig, result: CheckResult) -> Path | None:
    """Writes the page, and returns its path; None with ``--no-plots``, or after a warning."""
    if not config.plots:
        return None
    from tools.check.page import write_page

    with _json_alone_on_stdout(config):
        report = write_page(result, Path(config.out) if config.out else None)
        if report is not None:
            get_logger().info("report: %s", report)
    return report


def _json_alone_on_stdout(config: CheckConfig) -> contextlib.AbstractContextManager:
    """Reserves standard output for the JSON of ``--json`` during the block."""
    return contextlib.redirect_stdout(sys.stderr) if config.json else contextlib.nullcontext()


if __name__ == "__main__":
    run_main(main)
