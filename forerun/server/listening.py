"""The log and the socket, before the server imports or loads anything slow.

This module does not need torch.
"""

from __future__ import annotations

import logging
import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises ValueError if the port is taken, or if the address is not one of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = socket.create_server(address, family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}:{port}: {reason}") from None
    server.setblocking(False)
    return server


def set_up_log(level: str) -> None:
    """Write the logs of forerun and uvicorn to stderr; of uvicorn's, only warnings and errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("forerun", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("forerun").level))
