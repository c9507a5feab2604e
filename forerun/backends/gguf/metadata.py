"""The metadata of a GGUF file, which remember what was read of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.zoo.gguf_file import GgufFile

# Keys that change a model's text begin or end like this.
_BEGINNINGS = ("rope.", "attention.", "expert", "moe", "ssm.", "swiglu", "activation", "altup")
_ENDINGS = ("_scale", "softcapping", "_multiplier", "residual", "_every_n_layers")
# Factors that say nothing if they are 1.
_FACTORS = ("logit_scale", "residual_scale", "embedding_scale")
# Keys that say nothing beyond what is known, or that do not concern the text.
_HARMLESS = ("attention.causal", "rope.scaling.finetuned")


class Metadata:
    """Reads the keys that stand under an architecture's name.

    Attributes:
        file: the file.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._read: set[str] = set(_HARMLESS)

    def number(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a number above 0, or `default` if the file does not have it.

        Raises:
            ValueError: the number is missing and there is no default, or it is not finite, not
                above 0, or of another type.
        """
        self._read.add(key)
        return self.file.own(key, kind, default)

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return any value of a type, or `default` if the file does not have it.

        Raises:
            ValueError: the value is of another type.
        """
        self._read.add(key)
        return self.file.value(f"{self.file.architecture}.{key}", kind, default)

    def per_layer(self, key: str, layers: int) -> list[int] | None:
        """Return a value of each layer, or None if the file does not have it.

        A single number p stands for a period: each layer but every p-th has a 1.

        Raises:
            ValueError: there are more or fewer values than layers.
        """
        self._read.add(key)
        name = f"{self.file.architecture}.{key}"
        if name not in self.file.fields:
            return None
        values = self.file.fields[name].contents()
        if isinstance(values, int) and not isinstance(values, bool):
            return [int((index + 1) % max(values, 1) != 0) for index in range(layers)]
        if not isinstance(values, list) or len(values) != layers:
            raise self.file.error(f"{name} must have a value for each of {layers} layers")
        return [int(value) for value in values]

    def same_for_all(self, key: str, default: int | None = None) -> int:
        """Return a number above 0 that a file may give layer by layer.

        Raises:
            ValueError: `number` raises it, or layers differ.
        """
        name = f"{self.file.architecture}.{key}"
        if name in self.file.fields and isinstance(self.file.fields[name].contents(), list):
            self._read.add(key)
            values: Sequence[int] = self.file.value(name, list)
            if len(set(values)) != 1 or not isinstance(values[0], int) or values[0] < 1:
                raise self.file.error(f"{name} differs between layers, which is not supported")
            return values[0]
        return int(self.number(key, int, default))

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor."""
        return tensor in self.file.tensors

    def check_all_read(self) -> None:
        """Check that nothing was left unread that may change the model's text.

        Raises:
            ValueError: a key of rotation, attention, experts or factors is not supported for this
                architecture.
        """
        prefix = f"{self.file.architecture}."
        for name in sorted(self.file.fields):
            key = name.removeprefix(prefix)
            if key == name or key in self._read:
                continue
            if key.startswith(_BEGINNINGS) or key.endswith(_ENDINGS):
                value = self.file.fields[name].contents()
                # Writers give 0 for features that a model does not have.
                if value == 0 or (value == 1 and key in _FACTORS):
                    continue
                raise self.file.error(f"it has {name}, which is not supported")
