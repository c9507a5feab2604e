"""Which format a head's folder has. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.zoo import ROLES, weight_files

ALLOWED = "--head takes a head of `forerun train lyanna`, or an EAGLE-3 head in safetensors"


def settings_of(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, or nothing if it is missing or broken, which loading reports."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_eagle3(folder: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 head: in the format of speculators (0.1 to 0.9), whose config.json has
    `speculators_model_type`, or in the original layout (https://github.com/SafeAILab/EAGLE), whose config.json has
    architectures with EAGLE-3's name or `draft_vocab_size`.

    Raises ValueError for other drafters and for pickled weights.
    """
    settings = settings_of(folder)
    kind = settings.get("speculators_model_type")
    names = [str(each) for each in settings.get("architectures") or []]
    if settings.get("model_type") in ROLES:
        return False
    if kind is not None and kind != "eagle3":
        raise ValueError(f"the head {str(folder)!r} is a model of the type {kind!r} of speculators: {ALLOWED}")
    if kind is None and "draft_vocab_size" not in settings and not any("eagle3" in name.lower() for name in names):
        if other := next((name for name in names if not name.endswith("ForCausalLM")), None):
            raise ValueError(f"the head {str(folder)!r} is of the architecture {other!r}: {ALLOWED}")
        return False
    files = weight_files(folder)
    if files and not any(path.suffix == ".safetensors" for path in files):
        raise ValueError(
            f"the head {str(folder)!r} is an EAGLE-3 head with pickled weights ({files[0].name}), which may run code: "
            "convert them to model.safetensors"
        )
    return True
