"""The socket, which is opened before anything long begins."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ValueError if the address is not free or not this machine's."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.create_server(address, family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
    found.setblocking(False)
    return found
