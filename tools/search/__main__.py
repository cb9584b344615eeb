"""Searches hyper-parameters: trains with different values and reports the best.

python -m tools.search --hyp optimizer --trials 30 --data DATA.yaml --weights yolov8n --epochs 20
python -m tools.search --hyp my_ranges.yaml --trials 30 --data DATA.yaml --folds 3

The same command continues an interrupted search. Several processes of it, also on several machines that share the
folder, divide the trials among themselves.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence
from functools import partial

from utils.config.tool_settings import SearchConfig
from utils.machine.packages import require_package
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("search", _search, argv)


def _search(config: SearchConfig) -> None:
    require_package("optuna", "tools.search", "leave the hyper-parameters as they are")
    from tools.experiment.experiment import run_experiment
    from tools.search.search import search

    run_experiment(config, partial(search, config))


if __name__ == "__main__":
    run_main(main)
