"""The embedded pair's recipe: sizes and lengths. Needs no torch, so that bad settings are refused at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PairRecipe:
    """Sizes and lengths of the embedded pair. The defaults made the bundled weights (`zoo/weights/results.json`)."""

    vocabulary: int = 4096
    context: int = 1024
    batch: int = 16  # windows of `window` tokens a step
    window: int = 512
    # Five heads of 64 without grouping: fits into the shape of any bigger Llama with 8 or more KV heads.
    target_width: int = 320
    target_layers: int = 8
    target_heads: int = 5
    target_mlp: int = 864
    target_steps: int = 2500  # of 8192 tokens
    # Shallow first, then at twice the depth, which costs twice the time a step. 0: it stays shallow.
    grown_steps: int = 1100  # of 8192 tokens
    # Two layers are the fewest that can copy from the context; width costs a CPU little.
    draft_width: int = 192
    draft_layers: int = 2
    draft_heads: int = 2
    draft_mlp: int = 512
    draft_steps: int = 1500  # of 8192 tokens, on the corpus alone
    own_sequences: int = 1536  # of 513 tokens
    distill_steps: int = 1600  # of 8192 tokens, half of them the target's own
    seed: int = 0
