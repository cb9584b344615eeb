"""Exports a checkpoint to other file formats, and compares the files with the checkpoint.

python export.py --weights runs/train/exp/best.pt --format onnx openvino
python export.py --weights yolov8n.pt --data DATA.yaml --layout end2end --half
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence

from utils.config.settings import ExportConfig
from utils.process.child import write_result
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("export", _export, argv)


def _export(config: ExportConfig) -> None:
    from engine.commands.export import export  # imports torch, once the flags are known to be valid

    write_result(files=[str(path) for path in export(config)])


if __name__ == "__main__":
    run_main(main)
