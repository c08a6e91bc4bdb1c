"""Handing the real standard output from the supervisor of a run to its ranks.

The launcher between them writes lines of its own to standard output, which go to a file. So the supervisor
listens on a socket in Linux's abstract namespace, and sends its standard output as an open file to each rank
that connects.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading

CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end of a socket


def serve_stdout() -> str:
    """Send standard output to processes of this user that ask for it. Return the name of the socket."""
    name = f"emo-{os.getpid()}-{secrets.token_hex(8)}"
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{name}")
    server.listen(64)

    def serve() -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
                    if CREDENTIALS.unpack(peer)[1] == os.getuid():
                        socket.send_fds(connection, [b"1"], [1])

    threading.Thread(target=serve, name="stdout", daemon=True).start()
    return name


def receive_stdout(name: str) -> int | None:
    """Return a descriptor of the supervisor's standard output; None if the supervisor is gone."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(f"\0{name}")
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        return descriptors[0] if descriptors else None
    return None
