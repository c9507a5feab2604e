"""What tells a machine, as far as rounding goes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from functools import cache
from pathlib import Path

import torch


def machine() -> str:
    """Differs between machines, builds of torch and numbers of threads."""
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA")
    facts = [processor(), torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), isa]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@cache
def processor() -> str:
    """The processor's name and what instructions it has."""
    path = Path("/proc/cpuinfo")
    if not os.access(path, os.R_OK):
        return f"{platform.machine()} {platform.processor()}"
    lines = path.read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model", "flags", "Features", "CPU")))
