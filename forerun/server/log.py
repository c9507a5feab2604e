"""The server's log. Needs no torch, as its first line comes before the model."""

from __future__ import annotations

import json
import logging
from typing import Any


def set_up_log(level: str, as_json: bool) -> None:
    """Log our lines and uvicorn's on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("forerun", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("forerun").level))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname}
        line |= getattr(record, "line", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
