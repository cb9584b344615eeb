"""Cross-validates: for each fold, trains on the other folds and scores on this one; then scores all images together.

python -m tools.kfold --data DATA.yaml --folds 5 --weights yolox_s --epochs 50
python -m tools.kfold --data DATA.yaml --groups "patient(\\d+)"

Divides the training and validation images. Images of a group, and near-duplicates, stay in the same fold, and every
fold gets its share of every class. The same command continues after an interruption.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence
from functools import partial

from utils.config.tool_settings import KfoldConfig
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("kfold", _cross_validate, argv)


def _cross_validate(config: KfoldConfig) -> None:
    from tools.experiment.experiment import run_experiment
    from tools.kfold.cross_validate import run_folds

    run_experiment(config, partial(run_folds, config))


if __name__ == "__main__":
    run_main(main)
