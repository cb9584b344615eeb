"""Free TCP ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket

from utils.errors import UserError


def free_port() -> int:
    """Finds a free TCP port, preferably below Linux's ephemeral ports, which another connection could take first."""
    generator = random.SystemRandom()  # not seeded: runs that start at the same time need different ports
    candidates = [generator.randrange(20_000, 32_000) for _ in range(20)]
    for port in [*candidates, 0]:  # 0: any
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise UserError("no TCP port of this machine is free")
