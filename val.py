"""Scores checkpoints and exported files on a data set: COCO's AP, precision, recall and F1, per class and by size.

python val.py --weights runs/train/exp/best.pt
python val.py --weights best.onnx --data DATA.yaml
torchrun --nproc_per_node 2 val.py --weights yolov8n.pt --data DATA.yaml
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence

from utils.config.parser import parse_config
from utils.config.settings import ValConfig
from utils.process.main import run_main


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_config(ValConfig, argv)
    from engine.commands.start import validate  # not needed by --help

    validate(config)


if __name__ == "__main__":
    run_main(main)
