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

from utils.config.tool_settings import CheckConfig
from utils.logger import configure_logging, get_logger
from utils.process.entrypoint import run_main
from utils.process.exit_codes import CHECK_FAILED
from utils.run_command import Outcome, run_command


def main(argv: Sequence[str] | None = None) -> None:
    run_command("check", _check, argv)


def _check(config: CheckConfig) -> Outcome:
    """Checks the data set, and prints the JSON or the lines of the summary."""
    from engine.commands.input_files import check_scoring_files

    with contextlib.redirect_stdout(sys.stderr) if config.json else contextlib.nullcontext():
        configure_logging(True)
        check_scoring_files(config.weights, config.data, config.split)
        from tools.check.dataset_check import check_dataset  # imports torch, once the files are known to be there

        content, lines = check_dataset(config)
    if config.json:
        json.dump(content, sys.stdout, indent=1)
        print()
    else:
        for line in lines:
            get_logger().info("%s", line)
    return Outcome(content, exit_status=CHECK_FAILED if content["issues"] else 0)


if __name__ == "__main__":
    run_main(main)
