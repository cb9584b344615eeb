"""The command ``python -m data.check``. It may run a model, so its code is in engine/tools/check."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    package = __spec__.name.removesuffix("data.check.__main__")  # "" in a clone, "lockstep." when installed
    runpy.run_module(f"{package}engine.tools.check", run_name="__main__", alter_sys=True)
