"""The command ``python -m engine.compare``; see engine/tools/compare.py."""

from __future__ import annotations

from engine.tools.compare import main
from utils.entrypoint import run_main

if __name__ == "__main__":
    run_main(main)
