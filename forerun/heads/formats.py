"""Which format a head's folder has. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from forerun.zoo import EAGLE3, ROLES, settings_of, weight_files

ALLOWED = "--head takes a head of `forerun train lyanna`, or an EAGLE-3 head in safetensors"


def is_eagle3(folder: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 head: in the format of speculators (0.1 to 0.9), whose config.json has
    `speculators_model_type`, or in the original layout (https://github.com/SafeAILab/EAGLE), whose config.json has
    architectures with EAGLE-3's name or `draft_vocab_size`.

    Raises ValueError for other drafters and for pickled weights.
    """
    settings, name = settings_of(folder), f"the head {str(folder)!r}"
    kind, names = settings.get("speculators_model_type"), [str(each) for each in settings.get("architectures") or []]
    if settings.get("model_type") in ROLES:
        return False
    if kind is not None and kind != "eagle3":
        raise ValueError(f"{name} is a model of the type {kind!r} of speculators: {ALLOWED}")
    if not settings.keys() & EAGLE3 and not any("eagle3" in each.lower() for each in names):
        if other := next((each for each in names if not each.endswith("ForCausalLM")), None):
            raise ValueError(f"{name} is of the architecture {other!r}: {ALLOWED}")
        return False
    files = weight_files(folder)
    if files and not any(path.suffix == ".safetensors" for path in files):
        raise ValueError(
            f"{name} is an EAGLE-3 head with pickled weights ({files[0].name}), which may run code: convert them to "
            "model.safetensors"
        )
    return True
