"""What other servers' APIs ask about the model that is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from forerun.api.decoder import Decoder
from forerun.backends.facts import facts_of
from forerun.backends.stored import StoredEmbedding, StoredLinear
from forerun.text.chat import has_template
from forerun.text.infill import infill_form
from forerun.text.thinking import has_marks, thinking_switch
from forerun.text.tools import NO_PARSER, checked_choice, checked_tools, tools_for

# How GGUF names torch's formats.
_FORMATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SAMPLE_TOOL = {"type": "function", "function": {"name": "sample"}}


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a decoder's target. Each is found when it is asked for.

    Attributes:
        decoder: the decoder.
        parser: the form of tool calls, as in `Settings.tool_parser`.
    """

    decoder: Decoder
    parser: str | None = None

    @property
    def path(self) -> str:
        """The file or folder of the model, or its id on the hub; "" if it was made in memory."""
        return str(self.decoder.target.model.config.name_or_path)

    @property
    def container(self) -> str:
        """The kind of the model's files: "gguf" or "safetensors"."""
        return "gguf" if self.path.lower().endswith(".gguf") else "safetensors"

    @property
    def family(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.decoder.target.config.model_type)

    @property
    def context(self) -> int | None:
        """The most tokens of a text; None for no bound."""
        return self.decoder.target.context

    def token(self, kind: str) -> str:
        """Return the text of a token that a tokenizer names, such as "eos_token"; "" without it."""
        tokenizer = self.decoder.tokenizer
        named = tokenizer.special_tokens_map if tokenizer is not None else {}
        return str(named.get(kind, ""))

    @property
    def template(self) -> str:
        """The chat template; "" without one."""
        tokenizer = self.decoder.tokenizer
        if tokenizer is None or not has_template(tokenizer):
            return ""
        template = tokenizer.chat_template
        return str(template.get("default", "") if isinstance(template, dict) else template)

    @cached_property
    def _weights(self) -> dict[str, Any]:
        return facts_of(self.decoder.target)

    @property
    def weight_format(self) -> str:
        """The format of most weights, such as "Q4_K" or "F32"."""
        name = str(self._weights["weights"])
        return _FORMATS.get(name, name)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights in memory."""
        return sum(self._weights["weight_bytes"].values())

    @property
    def is_on_gpu(self) -> bool:
        """Whether the weights are in the memory of a GPU."""
        return self.decoder.target.device.type != "cpu"

    @cached_property
    def parameters(self) -> int:
        """The number of weights and biases. Weights that two layers share count once."""
        model = self.decoder.target.model
        tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
        stored = (_stored_weights(module) for module in model.modules() if module is not tied)
        return sum(stored) + sum(parameter.numel() for parameter in model.parameters())

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that stay the same for the same weights in the same format.

        They are a digest of the model's fingerprint, because one of its files would take long.
        """
        identity = [self.decoder.target.fingerprint, self._weights["weight_bytes"]]
        return sha256(json.dumps(identity, default=str).encode()).hexdigest()

    @property
    def changed_at(self) -> datetime | None:
        """When the model's file or folder was last changed; None if there is none."""
        path = Path(self.path)
        if not self.path or not path.exists():
            return None
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)

    @property
    def calls_tools(self) -> bool:
        """Whether requests may have tools."""
        tokenizer = self.decoder.tokenizer
        if not has_template(tokenizer) or self.parser == NO_PARSER:
            return False
        tools = checked_tools([_SAMPLE_TOOL])
        try:
            tools_for(tools, checked_choice(None, tools), tokenizer, parser=self.parser)
        except ValueError:  # the form of its calls is not known
            return False
        return True

    @property
    def fills_in(self) -> bool:
        """Whether the model can write what stands between two texts."""
        tokenizer = self.decoder.tokenizer
        return tokenizer is not None and infill_form(tokenizer) is not None

    @property
    def thinks(self) -> bool:
        """Whether the chat template knows of thoughts."""
        template = self.template
        return has_marks(template) or thinking_switch(template) is not None


def _stored_weights(module: nn.Module) -> int:
    """Return the number of weights that are stored in few bits, which are no parameters of torch.

    Biases beside them count too.
    """
    if not isinstance(module, StoredLinear | StoredEmbedding):
        return 0
    count = module.stored.out * module.stored.inputs
    if isinstance(module, StoredLinear) and module.bias is not None:
        count += module.bias.numel()
    return count
