"""Converts the weights of a checkpoint, even of another program, to safetensors or to a checkpoint of this program.

python -m tools.weights yolov8n.pt yolov8n.safetensors
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence

from utils.config.tool_settings import WeightsConfig
from utils.logger import configure_logging, get_logger
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("weights", _convert, argv)


def _convert(config: WeightsConfig) -> None:
    from tools.weights.convert_weights import convert  # imports torch, once the flags are known to be valid

    configure_logging(True)
    get_logger().info("%s", convert(config.source, config.target, offline=config.offline))


if __name__ == "__main__":
    run_main(main)
