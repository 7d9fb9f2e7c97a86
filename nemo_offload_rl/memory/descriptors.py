"""Passes a file descriptor to other processes on the node through an abstract Unix socket (one without a file)."""

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
    """Raised when this process cannot receive a descriptor that another process offers."""


@dataclass(frozen=True)
class DescriptorAddress:
    """Identifies the process and the socket that offer a descriptor; it can be pickled.

    Attributes:
        pid: The process that offers the descriptor.
        socket_name: The name of its abstract Unix socket.
    """

    pid: int
    socket_name: str

    def receive(self) -> int:
        """Receive the descriptor into this process; the caller has to close it.

        Raises:
            DescriptorError: If the descriptor is no longer offered, or not to this process's user.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_TIMEOUT_S)
                connection.connect(f"\0{self.socket_name}")
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise DescriptorError(
                f"Cannot receive a file descriptor from process {self.pid} ({error}); both processes must be on one "
                "node, and in one network namespace."
            ) from error
        if not descriptors:
            raise DescriptorError(
                f"Process {self.pid} did not send its file descriptor; both processes must belong to the same user."
            )
        return descriptors[0]


class DescriptorOffer:
    """Sends a descriptor to each process of the same user that connects, until the offer is closed.

    Args:
        descriptor: The descriptor to send; `close` closes it, too, and so does an error of the constructor.

    Raises:
        OSError: This machine has no abstract Unix sockets.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.address = DescriptorAddress(os.getpid(), f"nemo_offload_rl-{secrets.token_hex(16)}")
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.bind(f"\0{self.address.socket_name}")
            self._listener.listen()
            self._thread = threading.Thread(target=self._serve, name="descriptor offer", daemon=True)
            self._thread.start()
            undo.pop_all()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was closed
                return
            with connection, contextlib.suppress(OSError):  # the peer has disconnected
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
                    socket.send_fds(connection, [b"d"], [self._descriptor])

    def close(self) -> None:
        """End the offer; descriptors that other processes have received stay open."""
        self._listener.shutdown(socket.SHUT_RDWR)  # close() alone would leave the thread blocked in accept()
        self._thread.join()
        self._listener.close()
        os.close(self._descriptor)
