"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """A mistake in the user's input: files, flags, YAML, devices, ports, disks.

    The message is one line that names what is wrong, where (file and line if there is one), and what to do.
    Entry scripts print it as ``error: <message>`` and exit with code 2; nothing else catches it.
    """


class PeerFailure(UserError):
    """Another process of the run failed and has printed why; this one ends without repeating it."""


class Stopped(Exception):
    """A signal asked the run to stop and it did, with what it had done saved; ``code`` is for the exit status."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
