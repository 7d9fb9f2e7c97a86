"""Hands a file descriptor to other processes of the node, through a Unix socket that has no file."""

import contextlib
import os
import secrets
import socket
import struct
import threading
from dataclasses import dataclass

_TIMEOUT_S = 30
_CREDENTIALS = struct.Struct("3i")  # process, user and group


class DescriptorError(RuntimeError):
    """Says that a descriptor that another process offers has not arrived."""


@dataclass(frozen=True)
class DescriptorAddress:
    """Says where a process offers a descriptor; it can be pickled.

    Attributes:
        pid: The process that offers it.
        socket_name: The name of its abstract Unix socket.
    """

    pid: int
    socket_name: str

    def receive(self) -> int:
        """Return the descriptor as one of this process, which has to close it.

        Raises:
            DescriptorError: If it is not offered any more, or not to this process.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_TIMEOUT_S)
                connection.connect(f"\0{self.socket_name}")
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise DescriptorError(
                f"Process {self.pid} does not hand over its descriptor ({error}); both processes must be on one node, "
                "and in one network namespace."
            ) from error
        if not descriptors:
            raise DescriptorError(
                f"Process {self.pid} does not hand over its descriptor; both processes must be of one user."
            )
        return descriptors[0]


class DescriptorOffer:
    """Gives a descriptor to each process of the same user that asks, until it is closed.

    Args:
        descriptor: Is closed with the offer.

    Raises:
        OSError: This machine has no such sockets.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.address = DescriptorAddress(os.getpid(), f"nemo_offload_rl-{secrets.token_hex(16)}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address.socket_name}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="descriptor offer", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):  # the other side has ended
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
                    socket.send_fds(connection, [b"d"], [self._descriptor])

    def close(self) -> None:
        """End the offer; what others have taken stays theirs."""
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would leave the thread in accept
        self._thread.join()
        self._listener.close()
        os.close(self._descriptor)
