"""What a folder holds, as its config.json says: a model, a trained layer of ours, an EAGLE-3 head.

Nothing here reads weights or needs torch, so that a wrong folder is refused at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The option that takes a trained layer, by the layer's `model_type`.
ROLE_OF_TYPE = {"forerun-pre-verifier": "pre-verifier", "forerun-hidden": "head"}
# Either setting marks a config.json as that of an EAGLE-3 head.
EAGLE3_SETTINGS = {"speculators_model_type", "draft_vocab_size"}
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
ALLOWED_HEADS = "--head takes a head of `forerun train lyanna`, or an EAGLE-3 head in safetensors"


def settings_of(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json; an empty dictionary if it is missing or broken."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def check_role(folder: Path, role: str) -> None:
    """Check that a folder can take a role: "target", "draft", "pre-verifier" or "head".

    Raises ValueError for a model that is given as a trained layer, for a trained layer that is
    given as a model, and for a trained layer of the other kind. A folder without a readable
    config.json passes, because loading it says more precisely what is wrong.
    """
    settings = settings_of(folder)
    if not settings:
        return
    is_theirs = bool(settings.keys() & EAGLE3_SETTINGS)
    actual = "head" if is_theirs else ROLE_OF_TYPE.get(str(settings.get("model_type")))
    wanted = role if role in ROLE_OF_TYPE.values() else None
    if actual != wanted:
        what = f"{actual}: --{actual}" if actual else "model: --target or --draft"
        raise ValueError(f"--{role} {str(folder)!r}: this is a {what}")


def is_eagle3(folder: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 head that somebody else published.

    There are two layouts. In that of speculators (0.1 to 0.9) config.json has
    `speculators_model_type`. In the original one (https://github.com/SafeAILab/EAGLE) it has
    `draft_vocab_size`, or an architecture with "eagle3" in its name.

    Raises ValueError for other drafters and for pickled weights, which may run code.
    """
    settings = settings_of(folder)
    if settings.get("model_type") in ROLE_OF_TYPE:
        return False
    name = f"the head {str(folder)!r}"
    kind = settings.get("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise ValueError(f"{name} is a model of the type {kind!r} of speculators: {ALLOWED_HEADS}")
    architectures = [str(architecture) for architecture in settings.get("architectures") or []]
    is_named = any("eagle3" in architecture.lower() for architecture in architectures)
    if not is_named and not settings.keys() & EAGLE3_SETTINGS:
        for architecture in architectures:
            # Folders of plain models are refused by `check_role`, with a message of its own.
            if not architecture.endswith("ForCausalLM"):
                raise ValueError(f"{name} is of the architecture {architecture!r}: {ALLOWED_HEADS}")
        return False
    _check_safetensors(folder, name)
    return True


def _check_safetensors(folder: Path, name: str) -> None:
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if files and not any(path.suffix == ".safetensors" for path in files):
        raise ValueError(
            f"{name} is an EAGLE-3 head with pickled weights ({files[0].name}), which may run "
            "code: convert them to model.safetensors"
        )
