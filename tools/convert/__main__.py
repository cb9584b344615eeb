"""Converts the export of an annotation tool to COCO JSON, ready for training.

python -m tools.convert EXPORT out.json               # a folder or file of CVAT, LabelMe, CSV or Hugging Face
python -m tools.convert EXPORT out.json --from csv

Writes out.json, or one file per split (out-train.json, ...), and out.yaml for --data. The images stay where they are.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence
from pathlib import Path

from utils.config.tool_settings import ConvertConfig
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("convert", _convert, argv)


def _convert(config: ConvertConfig) -> None:
    if not Path(config.source).exists():
        raise UserError(f"{config.source}: no such file or folder")
    from tools.convert.to_coco import convert  # imports NumPy and OpenCV, which --help does without

    configure_logging(True)
    for line in convert(Path(config.source), Path(config.out), config.from_, max_bad=config.max_bad):
        get_logger().info("%s", line)


if __name__ == "__main__":
    run_main(main)
