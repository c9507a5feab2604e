"""The architectures that forerun knows: a file each.

"Add an architecture" in the documentation says how to write one, here or in another package.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from forerun.backends.architectures.architecture import Architecture
from forerun.backends.architectures.cohere2 import COHERE2
from forerun.backends.architectures.ernie4_5 import ERNIE4_5
from forerun.backends.architectures.exaone4 import EXAONE4
from forerun.backends.architectures.gemma2 import GEMMA2
from forerun.backends.architectures.gemma3 import GEMMA3
from forerun.backends.architectures.glm4 import GLM4
from forerun.backends.architectures.gpt_oss import GPT_OSS
from forerun.backends.architectures.granite import GRANITE
from forerun.backends.architectures.granitemoe import GRANITEMOE
from forerun.backends.architectures.hunyuan_dense import HUNYUAN_DENSE
from forerun.backends.architectures.llama import LLAMA
from forerun.backends.architectures.mistral3 import MISTRAL3
from forerun.backends.architectures.olmo2 import OLMO2
from forerun.backends.architectures.phi3 import PHI3
from forerun.backends.architectures.qwen2 import QWEN2
from forerun.backends.architectures.qwen2moe import QWEN2MOE
from forerun.backends.architectures.qwen3 import QWEN3
from forerun.backends.architectures.qwen3moe import QWEN3MOE
from forerun.backends.architectures.seed_oss import SEED_OSS
from forerun.backends.architectures.smollm3 import SMOLLM3
from forerun.backends.architectures.starcoder2 import STARCODER2

_KNOWN: dict[str, Architecture] = {}


def register(architecture: Architecture) -> None:
    """Add an architecture, in place of an earlier one of the same name."""
    _KNOWN[architecture.name] = architecture


def names() -> tuple[str, ...]:
    """Return the names of all architectures in GGUF files."""
    return tuple(_KNOWN)


def of_file(name: str) -> Architecture | None:
    """Return the architecture that GGUF files call so, or None."""
    return _KNOWN.get(name)


def of_model(model: PreTrainedModel) -> Architecture | None:
    """Return the architecture of a model of transformers' own class, or None."""
    kind = type(model)
    if not kind.__module__.startswith("transformers.models."):
        return None
    for architecture in _KNOWN.values():
        if kind.__name__ in architecture.classes:
            return architecture
    return None


for _architecture in (
    LLAMA,
    QWEN2,
    QWEN3,
    SMOLLM3,
    GEMMA3,
    GEMMA2,
    PHI3,
    GRANITE,
    OLMO2,
    GLM4,
    EXAONE4,
    COHERE2,
    STARCODER2,
    MISTRAL3,
    SEED_OSS,
    ERNIE4_5,
    HUNYUAN_DENSE,
    QWEN3MOE,
    QWEN2MOE,
    GRANITEMOE,
    GPT_OSS,
):
    register(_architecture)
