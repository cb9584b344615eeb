"""Runs the commands of this folder, which end with one line for a mistake in their flags or files."""

from __future__ import annotations

import sys
from collections.abc import Callable

from utils.errors import ExplainedError


def run_benchmark(main: Callable[[], None]) -> None:
    """Runs ``main``. Raises SystemExit with one line for an error that explains itself.

    `utils.process.main.run_main` also sets environment variables that make our programs faster, and the peer's
    processes would inherit them.
    """
    try:
        main()
    except ExplainedError as error:
        sys.exit(f"error: {error}")
