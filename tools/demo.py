"""Renders the demo data set and writes it to a folder: python -m tools.demo OUT"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence
from pathlib import Path

from utils.config.tool_settings import DemoConfig
from utils.logger import configure_logging
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("demo", _write_demo, argv)


def _write_demo(config: DemoConfig) -> None:
    from data.demo import ensure_demo  # imports OpenCV, which --help does without

    configure_logging(True)
    print(ensure_demo(Path(config.out)))


if __name__ == "__main__":
    run_main(main)
