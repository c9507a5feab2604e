"""The server's log. Needs no torch, as its first line comes before the model."""

from __future__ import annotations

import logging


def set_up_log(level: str) -> None:
    """Log our lines and uvicorn's on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("forerun", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("forerun").level))
