"""Renders the demo data set and writes it to a folder: python -m tools.demo OUT"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.interrupts import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence
from pathlib import Path

from data.source.demo import ensure_demo
from utils.config.flags import parser_of
from utils.logger import configure_logging
from utils.process.entrypoint import run_main


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("demo", "Writes the demo data set to a folder.")
    parser.add_argument("out", metavar="OUT", type=Path, help="an empty or new folder")
    options = parser.parse_args(argv)
    configure_logging(True)
    print(ensure_demo(options.out))


if __name__ == "__main__":
    run_main(main)
