"""The sizes of big models that small ones can be given (`forerun.bench.shapes`). Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes by their names in transformers' configurations."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int = 128

    @property
    def layer_weights(self) -> int:
        """Numbers in a layer, but for its norms."""
        heads = self.num_attention_heads + self.num_key_value_heads
        return self.hidden_size * (2 * heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def weights(self) -> int:
        """Numbers that a forward reads: all but the embeddings and norms."""
        return self.num_hidden_layers * self.layer_weights + self.hidden_size * self.vocab_size


# From the configurations that were published with these models.
SHAPES = {
    "llama-2-7b": ModelShape(4096, 32, 32, 32, 11008, 32000),
    "llama-2-13b": ModelShape(5120, 40, 40, 40, 13824, 32000),
    "deepseek-coder-33b": ModelShape(7168, 62, 56, 8, 19200, 32256),
    "llama-3-8b": ModelShape(4096, 32, 32, 8, 14336, 128256),
    "llama-3-70b": ModelShape(8192, 80, 64, 8, 28672, 128256),
    "deepseek-coder-1.3b": ModelShape(2048, 24, 16, 16, 5504, 32256),
    "qwen2.5-0.5b": ModelShape(
        896, 24, 14, 7, 4864, 32256, 64
    ),  # 2 key/value heads of its own: too few for a trained one
    "llama-160m": ModelShape(768, 12, 12, 12, 3072, 32000, 64),
    "llama-68m": ModelShape(768, 2, 12, 12, 3072, 32000, 64),
}
