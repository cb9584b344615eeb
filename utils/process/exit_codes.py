"""Exit codes of all commands. docs/distributed.md explains them to users."""

from __future__ import annotations

CHECK_FAILED = 1  # a result did not pass its check, or tools.check has found issues
USER_ERROR = 2  # a mistake of the user, or a limit of the machine; also argparse's
BUG = 70  # EX_SOFTWARE of sysexits.h: not 1, which Python uses, so that findings differ from a traceback
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: a signal has stopped a training, which can be resumed
INTERRUPTED = 130  # Ctrl-C, as in shells
PIPE_CLOSED = 141  # the reader of standard output is gone, as in shells
