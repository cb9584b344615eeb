"""Writes the demo data set to a folder: ``python -m data.demo OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

from data.demo.dataset import ensure_demo
from utils.errors import UserError
from utils.logger import configure_logging


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m data.demo OUT")
    configure_logging(True)
    try:
        print(ensure_demo(Path(sys.argv[1])))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
