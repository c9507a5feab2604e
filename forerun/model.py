"""A Hugging Face causal model with its cache. The only module that touches modelling code, and the only one that
knows of batches: it pads rows and builds their positions and masks; above it a sequence is a sequence."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedConfig, PreTrainedModel

from forerun.cache import KVCache
from forerun.draft import Draft

LeanForward = Callable[[Tensor, Tensor, KVCache, Tensor | None, bool, bool], tuple[Tensor, Tensor | None]]
# Rows of their own lengths, or [B, N] on the model's device; for a head over hidden states those [B, 1, d].
Ids = Sequence[Sequence[int]] | Tensor
# (tokens, depths, masks, cache, whether the LM head's input is wanted) as `CausalLM._run` has them -> logits and that
# input, None for what is left to the other forward; see `forerun.runtime.recorded`.
RecordedForward = Callable[
    [Ids, Sequence[Sequence[int]], Sequence[Tensor] | None, KVCache, bool], tuple[Tensor, Tensor | None] | None
]

_ATTENTION = {"full_attention", "sliding_attention"}


# Their attention does not follow from `position_ids` and the mask alone, or they are encoders that count positions in
# their own way or see what comes behind a token.
_OWN_POSITIONS = {"gpt_neo", "moshi"} | {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


def context_of(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a model's positions allow, None where its configuration names none.

    longrope ends where its short factors do: longer ones would change every position of a sequence, and drafts and
    other rows would decide when.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            limits.append(part.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit), default=None)


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """What tells a model from others, whatever its dtype: its shape and a few of its weights."""
    config = model.config.get_text_config(decoder=True)
    shape = {
        name: getattr(config, name, None) for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    }
    weights = [weight for _, weight in sorted(model.named_parameters()) if weight.numel() and not weight.is_meta]
    chosen = weights[:: max(1, len(weights) // 16)]
    places = [weight.detach().flatten()[weight.numel() // 3].float() for weight in chosen]
    return shape | {"weights": [round(float(place), 6) for place in places]}


def same_model(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two fingerprints are of one model, perhaps in two dtypes."""
    if {**one, "weights": None} != {**other, "weights": None} or len(one["weights"]) != len(other["weights"]):
        return False
    return all(abs(a - b) <= 0.01 * abs(a) + 1e-5 for a, b in zip(one["weights"], other["weights"], strict=True))


class Rows:
    """Rows of their own lengths in one cache: how they are padded, and the positions and masks that follow.

    Attributes:
        device, dtype: of the model.
        cache: of its keys and values.
        window: how far its attention sees back, None for everything.
    """

    device: torch.device
    dtype: torch.dtype
    cache: KVCache
    window: int | None = None
    _mask_kinds: list[str] | None = None

    @torch.inference_mode()
    def commit(self, paths: list[list[int]]) -> None:
        """Keeps a path of nodes of each row's last draft."""
        self.cache.commit(paths)

    def crop(self, lengths: list[int]) -> None:
        """Shortens each row to its first `lengths[r]` positions."""
        self.cache.crop_to(lengths)

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Drops all rows but these."""
        self.cache.keep(rows)

    def _layout(
        self, counts: Sequence[int], depths: Sequence[Sequence[int]], masks: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor | dict[str, Tensor] | None]:
        """Positions [B, N] and the attention mask, None for causal, of rows of `counts[r]` new tokens that are padded
        to N; `masks[r]` [N_r, P + N_r] says which of them see which, and which of the P that were kept last, P being
        the same in all rows. None: causal."""
        cache, new = self.cache, max(counts)
        cache.begin(self.device, new)
        if cache.uniform and masks is None and min(counts) == new:  # the common case, made cheap
            start = cache.lengths[0]
            return torch.arange(start, start + new, device=self.device).expand(len(counts), new), None
        positions = torch.tensor(
            [
                # Padding takes a position that has been there: `start` may lie behind the model's last one.
                [start + depth for depth in row] + [max(start - 1, 0)] * (new - len(row))
                for row, start in zip(depths, cache.lengths, strict=True)
            ],
            device=self.device,
        )
        # Rows of equal starts with chains behind them are what the model's own causal mask is for: padding
        # stands behind everything that is read.
        if masks is None and cache.uniform:
            return positions, None
        return positions, self._additive_mask(positions, masks, new)

    def _additive_mask(self, positions: Tensor, masks: Sequence[Tensor] | None, new: int) -> Tensor | dict[str, Tensor]:
        """Mask [B, 1, N, longest + N] (0 seen, lowest float unseen), one a layer type where they differ.

        Additive because boolean masks are silently wrong under eager attention.
        """
        rows, longest, device = len(positions), max(self.cache.lengths), positions.device
        lowest = torch.finfo(self.dtype).min
        back = masks[0].shape[1] - masks[0].shape[0] if masks is not None else 0
        if rows == 1 and masks is not None and self.window is None:  # the common case, made cheap
            mask = torch.zeros(new, longest + new, dtype=self.dtype, device=device)
            mask[:, longest - back :].masked_fill_(~masks[0].to(device), lowest)
            return mask[None, None]
        lengths = torch.tensor(self.cache.lengths, device=device)
        slots, added = torch.arange(longest + new, device=device), torch.arange(new, device=device)
        columns = (lengths[:, None] + added)[:, None].expand(rows, new, new)
        if masks is None:
            seen = slots <= columns[:, 0, :, None]
        else:
            inner = torch.eye(new, back + new, dtype=torch.bool).repeat(rows, 1, 1)
            for row, mask in enumerate(masks):
                inner[row, : len(mask), : mask.shape[1]] = mask
            seen = (slots < lengths[:, None] - back)[:, None].repeat(1, new, 1)
            told = torch.arange(-back, new, device=device)
            seen.scatter_(2, (lengths[:, None] + told)[:, None].expand(rows, new, back + new), inner.to(device))

        def additive(visible: Tensor) -> Tensor:
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=device)
            return mask.masked_fill_(~visible, lowest)[:, None]

        if self.window is None:
            return additive(seen)
        key_positions = torch.arange(longest + new, device=device).repeat(rows, 1)
        key_positions.scatter_(1, columns[:, 0], positions)
        near = positions[:, :, None] - key_positions[:, None, :] < self.window
        if self._mask_kinds is None:
            return additive(seen & near)
        both = {"full_attention": seen, "sliding_attention": seen & near}
        return {kind: additive(both[kind]) for kind in self._mask_kinds}


class CausalLM(Rows):
    """Runs token trees for several rows at once against a preallocated KV cache.

    Raises ValueError at construction for models that cannot roll back or see a tree: encoder-decoders, recurrent
    or chunked layers, attention that takes no additive mask, modelling code without `position_ids`.

    Attributes:
        keeps_hidden: whether forwards leave in `hidden` what the LM head was given.
        hidden: [B, N, d] of the last such forward's padded rows, or of the prompts behind a `start`.
        recorded: what runs forwards of a few tokens behind others instead (`forerun.runtime.recorded`), if anything.
    """

    keeps_hidden = False
    hidden: Tensor | None = None
    recorded: RecordedForward | None = None

    def __init__(self, model: PreTrainedModel, forward: LeanForward | None = None) -> None:
        """`forward` takes the place of the model's own where it is given; see forerun/runtime."""
        self._forward = forward
        self.model = model.eval()
        self.device, self.dtype = model.device, model.dtype  # transformers looks through the parameters at every asking
        self.config = config = model.config.get_text_config(decoder=True)
        name = type(model).__name__
        accepted = inspect.signature(model.forward).parameters
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{name} is an encoder-decoder; a decoder-only model is needed")
        if getattr(model, "_is_stateful", False) or not kinds <= _ATTENTION:
            raise ValueError(f"{name} has layers that cannot roll back: {sorted(kinds - _ATTENTION) or 'recurrent'}")
        if getattr(config, "alibi", False) or config.model_type in _OWN_POSITIONS:
            raise ValueError(
                f"{name} takes positions from its cache or counts them in its own way (ALiBi, local attention, "
                "encoders as decoders): drafts and batches would change what it says"
            )
        if "position_ids" not in accepted or "past_key_values" not in accepted:
            raise ValueError(f"{name}.forward takes no position_ids and past_key_values; it cannot run drafts")
        if model.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"attention implementation {model.config._attn_implementation!r} takes no tree masks; "
                'load the model with attn_implementation="sdpa" or "eager"'
            )
        self.fingerprint = fingerprint(model)  # now, as packed weights no longer tell
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.window: int | None = getattr(config, "sliding_window", None)
        if "sliding_attention" not in kinds and getattr(config, "layer_types", None):
            self.window = None
        # With layer types the model takes one mask a type, without them one mask for all layers.
        self._mask_kinds = sorted(kinds) if "sliding_attention" in kinds else None
        self.cache = KVCache(config.num_hidden_layers, 0)

    def fresh(self) -> CausalLM:
        """The same model with a cache of its own, so that two generations can be under way."""
        return copy.copy(self)  # `start` makes the cache

    @property
    def context(self) -> int | None:
        """The longest sequence that the positions allow (`context_of`)."""
        return context_of(self.config)

    @property
    def head(self) -> nn.Module:
        """The LM head; raises ValueError for a model that names none."""
        head = self.model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(self.model).__name__} has no readable features: it names no LM head")
        return head

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def processors(
        self, config: GenerationConfig, prompt_length: int, extra: LogitsProcessorList | None = None
    ) -> LogitsProcessorList:
        """Hugging Face's own logits processors for a generation config and the user's `extra` ones, in the order
        in which its `generate` applies them."""
        self.model._prepare_special_tokens(config, True, device=self.device)
        return self.model._get_logits_processor(
            config,
            input_ids_seq_length=prompt_length,
            logits_processor=LogitsProcessorList(extra or []),
            device=self.device,
        )

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forgets everything and runs the prompts, one a row, which may be empty and of different lengths."""
        self.hidden = None
        layer_types = getattr(self.config, "layer_types", None) or []
        sliding = [kind == "sliding_attention" for kind in layer_types] or [self.window is not None] * len(
            self.cache.layers
        )
        self.cache = KVCache(self.config.num_hidden_layers, len(prompts), sliding)
        if any(prompts):
            self._run(prompts, [range(len(prompt)) for prompt in prompts], None, last_only=True)
            self.cache.commit([list(range(len(prompt))) for prompt in prompts])

    def forward(self, drafts: Sequence[Draft | None]) -> list[Tensor]:
        """Logits [N_r, V] of every node of each row's tree, of none where that is None. Nothing is kept until
        `commit`."""
        masks = None
        if not all(draft is None or draft.is_chain for draft in drafts):
            masks = [draft.mask() if draft is not None else torch.zeros(0, 0) for draft in drafts]
        tokens = [draft.tokens if draft is not None else [] for draft in drafts]
        logits = self._run(tokens, [draft.depths if draft is not None else [] for draft in drafts], masks)
        return [row[: len(own)] for row, own in zip(logits, tokens, strict=True)]

    def extend(self, chains: Sequence[Sequence[int]]) -> list[Tensor]:
        """Runs and commits a chain of tokens a row; logits [len(chain), V] of each."""
        logits = self._run(chains, [range(len(chain)) for chain in chains], None)
        self.cache.commit([list(range(len(chain))) for chain in chains])
        return [row[: len(chain)] for row, chain in zip(logits, chains, strict=True)]

    @torch.inference_mode()
    def roll(
        self, chains: Sequence[Sequence[int]], count: int, vocab_size: int
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Runs and commits a chain of tokens a row, then the likeliest token behind it that is below `vocab_size`, then
        the one behind that: `count` forwards.

        These tokens [B, count], the last of which is not run; of each forward the logits [B, V] that gave them, and the
        LM head's inputs [B, d] where they are kept. Nothing is waited for between recorded forwards, so that a GPU is
        given the next one while it works at the last. Rows with an empty chain stay as they are, and what is said of
        them means nothing.
        """
        ids: Ids = chains
        depths: list[range] = [range(len(chain)) for chain in chains]
        best, logits, hidden = [], [], []
        for _ in range(count):
            found = self._run(ids, depths, None)
            ends = [max(len(row), 1) - 1 for row in depths]
            # A GPU waits for numbers of rows to come from the host, but not for a slice.
            last: Any = (slice(None), ends[0]) if len(set(ends)) == 1 else (range(len(ends)), ends)
            logits.append(found[last])
            if self.hidden is not None:
                hidden.append(self.hidden[last])
            best.append(logits[-1][:, :vocab_size].argmax(-1))
            self.cache.commit([list(row) for row in depths])
            ids, depths = best[-1][:, None], [row[:1] for row in depths]
        return torch.stack(best, 1), logits, hidden

    @torch.inference_mode()
    def _run(
        self,
        tokens: Ids,
        depths: Sequence[Sequence[int]],
        masks: Sequence[Tensor] | None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [B, N, V] of padded rows; `masks[r]` [N_r, N_r] says which new tokens see which, None: causal."""
        counts = [len(row) for row in depths]
        new = max(counts)
        if self.recorded is not None and not last_only:
            found = self.recorded(tokens, depths, masks, self.cache, self.keeps_hidden)
            if found is not None:
                logits, self.hidden = found
                return logits
        ids = tokens
        if not isinstance(ids, Tensor):
            ids = torch.tensor([[*row, *[0] * (new - len(row))] for row in ids], device=self.device)
        positions, attention = self._layout(counts, depths, masks)
        if self._forward is not None:
            assert not isinstance(attention, dict)
            logits, hidden = self._forward(ids, positions, self.cache, attention, last_only, self.keeps_hidden)
            self.hidden = hidden
            return logits
        with self.hearing(self.keeps_hidden):
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=attention,
                past_key_values=self.cache,
                use_cache=True,
                **(self._last_logits if last_only and not self.keeps_hidden else {}),
            )
        return output.logits

    @contextmanager
    def hearing(self, wanted: bool = True) -> Iterator[None]:
        """Within it, forwards of the model leave in `hidden` what the LM head was given."""
        if not wanted:
            yield
            return

        def hear(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.hidden = inputs[0]

        handle = self.head.register_forward_pre_hook(hear)
        try:
            yield
        finally:
            handle.remove()
