"""Finds free ports for the rendezvous of a benchmark's ranks."""

import contextlib
import random
import socket


def free_port() -> int:
    """Returns a free port below the range of outgoing connections, so that runs can go on side by side."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
