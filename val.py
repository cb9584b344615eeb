"""Scores checkpoints and exported files on a data set: COCO's AP, precision, recall and F1, per class and by size.

python val.py --weights runs/train/exp/best.pt
python val.py --weights best.onnx --data DATA.yaml
torchrun --nproc_per_node 2 val.py --weights yolov8n.pt --data DATA.yaml
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import sys
from collections.abc import Sequence

from utils.config.parser import parse_config
from utils.config.settings import ValConfig
from utils.logger import configure_logging
from utils.machine.limits import limits_as_user_errors, memory_advice
from utils.process.launch import read_launch
from utils.process.main import run_main
from utils.process.spawn import check_processes


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse_config(ValConfig, argv)
    # Not imported at the top: --help must stay fast.
    from engine.commands.input_files import check_validation

    launch = read_launch()
    if launch is None:
        check_processes(config.spawn, config.device)
        check_validation(config)
    if config.spawn > 1 and launch is None:
        from utils.process.spawn import spawn

        spawn(main, config.spawn, (argv,))
        return
    # Modules that need torch are imported once the flags and files are known to be valid.
    from utils.distributed.join import joined_run

    advice = memory_advice(config.batch_size, config.imgsz or 640, min_batch=1, device="")
    with joined_run(launch, config.device) as ctx, limits_as_user_errors(lambda: advice):
        configure_logging(ctx.is_main)
        from engine.commands.val import validate  # in here, so that only one process reports a failing import

        validate(config, ctx)


if __name__ == "__main__":
    run_main(main)
