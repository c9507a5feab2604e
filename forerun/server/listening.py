"""What the server opens before anything long begins: its log and its socket. Needs no torch."""

from __future__ import annotations

import logging
import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ValueError if the address is not free or not this machine's."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.create_server(address, family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
        ) from None
    found.setblocking(False)
    return found


def set_up_log(level: str) -> None:
    """Log our lines and uvicorn's on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("forerun", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("forerun").level))
