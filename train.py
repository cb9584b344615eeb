"""Trains a detector: ``python train.py --data DATA.yaml --weights yolox_s``, or under torchrun on several devices."""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence

from utils.config.parser import parse_command
from utils.config.settings import TrainConfig
from utils.process.main import run_main


def main(argv: Sequence[str] | None = None) -> None:
    command = parse_command(TrainConfig, argv)
    from engine.commands.start import train  # not needed by --help

    train(command)


if __name__ == "__main__":
    run_main(main)
