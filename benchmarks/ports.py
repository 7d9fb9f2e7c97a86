"""Finds ports for the rendezvous of a benchmark's ranks."""

import contextlib
import random
import socket


def free_port() -> int:
    """A free port, below those of outgoing connections: runs may go on side by side."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
