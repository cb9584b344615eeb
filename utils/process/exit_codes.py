"""Exit codes of all commands. docs/distributed.md explains them to users."""

from __future__ import annotations

CHECK_FAILED = 1  # a result failed its check, or tools.check found issues
USER_ERROR = 2  # a user mistake, or a machine limit; also argparse's code
BUG = 70  # EX_SOFTWARE of sysexits.h; not Python's 1, so that findings differ from a traceback
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: a signal stopped a training run, which can be resumed
INTERRUPTED = 130  # Ctrl-C, as in shells
PIPE_CLOSED = 141  # the reader of standard output is gone, as in shells
