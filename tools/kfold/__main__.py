"""Cross-validation: trains on all folds but one, scores on that one, for each fold; then scores all images together.

python -m tools.kfold --data DATA.yaml --folds 5 --model yolov8n --epochs 100
python -m tools.kfold --data DATA.yaml --groups "patient(\\d+)"

The training and validation images are divided. Images of a group, and near-duplicates, are in the same fold, and every
fold has its part of every class. The same command continues after an interruption.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from utils.config.parser import parse_config
from utils.config.search_settings import KfoldConfig, check_started_once, folder_of
from utils.distributed.launch import require_one_process
from utils.entrypoint import run_main
from utils.errors import Stopped


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_config(KfoldConfig, argv, __doc__.split("\n")[0])
    check_started_once(config)
    require_one_process("tools.kfold", "start it once; --spawn N trains on N processes")
    from engine.input_files import check_training_files

    check_training_files(config, divides=True)
    from tools.kfold.cross_validate import run_folds
    from utils.logger import configure_logging, get_logger
    from utils.machine.stop_signals import StopSignals

    configure_logging(True)
    with StopSignals() as signals:
        try:
            run_folds(config, signals)
        except Stopped:
            get_logger().info("stopped; the same command continues the folds in %s", folder_of(config))
            raise


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
