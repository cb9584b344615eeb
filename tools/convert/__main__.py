"""Writes COCO JSON of any data set that --data reads, or of Hugging Face, ready for training.

python -m tools.convert DATA out.json

Writes out.json, or one file per split (out-train.json, ...), and out.yaml for --data. The images stay where they are.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence
from pathlib import Path

from utils.config.tool_settings import ConvertConfig
from utils.logger import configure_logging, get_logger
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("convert", _convert, argv)


def _convert(config: ConvertConfig) -> None:
    from tools.convert.write_coco import convert  # imports NumPy and OpenCV, which --help does without

    configure_logging(True)
    get_logger().info("%s", convert(config.source, Path(config.out), max_bad=config.max_bad))


if __name__ == "__main__":
    run_main(main)
