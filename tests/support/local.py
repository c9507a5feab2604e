"""How clients connect to servers on this machine."""

from __future__ import annotations

from typing import Any

# Without proxies of the environment, and without certificates, because each client would take 14 ms
# to read those of the system.
LOCAL: dict[str, Any] = {"trust_env": False, "verify": False}
