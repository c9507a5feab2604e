"""The models that forerun knows by name, and what a user names as a model.

`embedded` is a small pair that ships with forerun. `forerun fetch` downloads `smollm2`, whose draft
and trained layers ship with forerun, and `qwen-coder`, whose draft is downloaded as well.
"""

from __future__ import annotations

from forerun.zoo.folders import ROLE_OF_TYPE, check_role, is_eagle3, settings_of
from forerun.zoo.known import (
    EMBEDDED,
    FOLDERS,
    MODELS,
    QWEN_CODER,
    SMOLLM2,
    WEIGHTS_FOLDER,
    Model,
    best_fetched,
    cached,
    companion,
    find,
    own_draft,
    require,
)
from forerun.zoo.source import HOT_FILE, ModelSource

__all__ = [
    "EMBEDDED",
    "FOLDERS",
    "HOT_FILE",
    "MODELS",
    "QWEN_CODER",
    "ROLE_OF_TYPE",
    "SMOLLM2",
    "WEIGHTS_FOLDER",
    "Model",
    "ModelSource",
    "best_fetched",
    "cached",
    "check_role",
    "companion",
    "find",
    "is_eagle3",
    "own_draft",
    "require",
    "settings_of",
]
