"""The command ``python -m data.check``. It may run a model, so its code is in engine/tools/check."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    command = Path(__file__).parents[2] / "engine" / "tools" / "check" / "command.py"
    runpy.run_path(str(command), run_name="__main__")
