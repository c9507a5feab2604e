"""A Hugging Face causal LM with its cache, as the engine and drafters use it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)

from forerun.engine.draft import Draft
from forerun.engine.recent_states import first_kept
from forerun.engine.target import Capture, ChunkSize, Memory, Output, next_size
from forerun.model.batch import Inputs
from forerun.model.compat import warn_if_newer
from forerun.model.eager import EagerForward, lm_head
from forerun.model.fingerprint import fingerprint, same_model
from forerun.model.forward import DraftHead, Forward, FusedDraft
from forerun.model.kv_cache import KVCache
from forerun.model.prefix_store import Text
from forerun.model.prompts import ROW, PromptCache
from forerun.model.rows import Rows
from forerun.model.segments import layout_of
from forerun.model.support import check_model, context_of, window_of

if TYPE_CHECKING:
    from forerun.model.prompt_folder import PromptFolder

__all__ = ["CausalLM", "Rows", "context_of", "fingerprint", "same_model"]


class CausalLM(Rows):
    """Runs token trees of several sequences at once, with a preallocated KV cache.

    Prompts are run in a cache of one row, and then join as rows. Logits and hidden states are lists
    in the order of the ids. The constructor raises ValueError for models that cannot roll back or
    take tree masks (`forerun.model.support`).

    Attributes:
        backend: the forward of new tokens.
        context: the length of the longest sequence that the positions allow; None for no bound.
        fingerprint: identifies the model, whatever its dtype.
        prompts: the last prompt that was read on, and the prefix store.
        prefilled: number of prompt tokens that were run so far.
        hot: an LM head for the hot tokens only, which replaces the model's; or None.
        fused_draft: drafts whole chains in one call; or None.
    """

    def __init__(self, model: PreTrainedModel, backend: Forward | None = None) -> None:
        """Take over a model. `backend` replaces its own forward."""
        warn_if_newer()
        check_model(model)
        self.model = model.eval()
        self.backend: Forward = backend or EagerForward(model)
        # Kept, because transformers searches the parameters at each access.
        self.device = model.device
        self.dtype = self.backend.dtype
        self.config = model.config.get_text_config(decoder=True)
        self.context = context_of(self.config)
        self.vocab_size = int(self.config.vocab_size)
        self.fingerprint = fingerprint(model)
        self.hot: DraftHead | None = None
        self.fused_draft: FusedDraft | None = None
        self._sliding = _sliding_layers(self.config)
        self._position_bytes: list[int] = []  # [bytes] once known, shared by all copies
        self.cache = self._new_cache()
        self.prompts = PromptCache(self._new_cache(), 0)
        self._reading: list[PromptCache] = []  # of prompts that are not read to the end
        self.prefilled = 0

    def _new_cache(self) -> KVCache:
        """Return an empty cache for this model."""
        return KVCache(len(self._sliding), self._sliding, self.context)

    def fresh(self, prefix_bytes: int = 0) -> CausalLM:
        """Return a copy that shares the model but no sequences, prompts or draft buffers.

        `prefix_bytes`: the limit of its prefix store; 0 for no store.
        """
        other = copy.copy(self)
        other.cache = self._new_cache()
        other.prompts = PromptCache(self._new_cache(), prefix_bytes)
        other._reading = []
        other.prefilled = 0
        if self.fused_draft is not None:
            other.fused_draft = self.fused_draft.fresh()
            other.hot = other.fused_draft.hot
        elif self.hot is not None:
            other.hot = self.hot.fresh()
        return other

    def share_texts(self, other: CausalLM) -> None:
        """Use the prefix store of another copy of the same model in place of one's own."""
        self.prompts.store = other.prompts.store

    def keep_in(self, folder: PromptFolder, identity: str) -> None:
        """Keep texts in a folder too, and find texts there.

        `identity`: 32 hexadecimal digits, a digest of all that decides the bits of this model's
        keys, values and states, except for their layout. It must stay the same for the same bits.
        """
        layout = layout_of(self._probe().view(ROW, 1))
        digest = blake2b(f"{identity} {layout}".encode(), digest_size=16).hexdigest()
        self.prompts.shelf = folder.shelf(digest, layout, self._no_states)

    def _probe(self) -> KVCache:
        """Return a cache in which one token has run.

        No other way shows the sizes of the keys and values of every model.
        """
        probe = self.fresh()
        for _ in probe.prefill([0], 1):
            pass
        return probe.prompts.cache

    def draft_with(self, hot: DraftHead | None, fused_draft: FusedDraft | None) -> CausalLM:
        """Set these parts, and return the model."""
        self.hot = hot
        self.fused_draft = fused_draft
        return self

    def clock(self) -> float:
        """Return a time in seconds."""
        return perf_counter()

    @property
    def exact(self) -> Literal["bitwise", "rounding"]:
        """Return how exact logits are (`forerun.model.forward.Forward.exact`)."""
        return self.backend.exact

    @property
    def head(self) -> nn.Module:
        """Return the LM head. Raises ValueError for a model that names none."""
        return lm_head(self.model)

    @property
    def keeps_prefixes(self) -> bool:
        """Return whether texts are kept for later prompts, in memory or on disk."""
        return self.prompts.store is not None or self.prompts.shelf is not None

    def processors(self, config: GenerationConfig, prompt_length: int) -> LogitsProcessorList:
        """Return the logits processors that Hugging Face's `generate` would use, in its order."""
        self.model._prepare_special_tokens(config, True, device=self.device)
        processors: LogitsProcessorList = self.model._get_logits_processor(
            config,
            input_ids_seq_length=prompt_length,
            logits_processor=LogitsProcessorList(),
            device=self.device,
        )
        return processors

    # Memory.

    @property
    def position_bytes(self) -> int:
        """Return the bytes of one position of a row; run a token to find out if none was run."""
        if not self._position_bytes:
            count = self.cache.position_bytes or self.prompts.cache.position_bytes
            self._position_bytes.append(count or self._probe().position_bytes or 0)
        return self._position_bytes[0]

    def fits(self, rows: int, reserve: int, budget: int) -> bool:
        """Return whether `budget` bytes hold `rows` rows and one more of `reserve` positions."""
        return self.cache.fits(rows, reserve, budget, self.position_bytes)

    def memory(self) -> Memory:
        """Return the memory of keys and values, and what was saved by reuse."""
        store = self.prompts.store
        shelf = self.prompts.shelf
        hits = 0 if store is None else store.hit_tokens
        read = 0 if shelf is None else shelf.hit_tokens
        disk = 0 if shelf is None else shelf.folder.bytes
        return Memory(
            used=sum(self.cache.lengths) * (self.cache.position_bytes or 0),
            allocated=self.cache.allocated_bytes,
            hits=hits + read,
            read=read,
            disk=disk,
            kept=0 if store is None else store.bytes,
            kept_limit=0 if store is None else store.limit,
        )

    # Prompts.

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Sequence[int],
        chunk: ChunkSize,
        cache_salt: str = "",
        capture: Capture = "",
        on_logits: Callable[[Tensor], None] | None = None,
        reads: int | None = None,
    ) -> Iterator[int]:
        """Run a prompt, which may be empty, in the prompt cache.

        Yields the size of each chunk, at most `chunk` tokens, and 0 whenever a layer of a long text
        was checked, or copied from or to the prefix store. `join` then copies the prompt to
        rows, or moves a long one to the first. A prefix that was run before under the same salt,
        and that the last prompt, the prefix store or the shelf still holds, is not run again. With
        `on_logits` all tokens are run, and it gets the logits [n, V] of each chunk.

        Of the captured states those are kept that a head needs which reads the last `reads`
        positions (`RecentStates`). Earlier chunks are run without a capture.

        Prompts may be read in turns. What this class says of the last prompt is then about the one
        whose iterator has gone on last.
        """
        tokens = list(tokens)
        prompts = self._begin_reading()
        first = first_kept(len(tokens), reads)
        try:
            for _ in prompts.begin(tokens, cache_salt, capture, on_logits is None, reads):
                yield 0
                self.prompts = prompts
            count = len(prompts.tokens)
            while count < len(tokens):
                part = tokens[count : count + next_size(chunk)]
                count += len(part)
                inputs = Inputs([ROW], [range(len(part))], tokens=[part])
                wanted: Capture = capture if count > first else ""
                logits, hidden = self.backend(inputs, prompts.cache, on_logits is not None, wanted)
                if on_logits is not None:
                    assert logits is not None
                    on_logits(logits)
                prompts.append(part, hidden)
                self.prefilled += len(part)
                yield len(part)
                self.prompts = prompts
            for _ in prompts.end():
                yield 0
                self.prompts = prompts
        finally:
            self._reading = [other for other in self._reading if other is not prompts]

    def _begin_reading(self) -> PromptCache:
        """Return the cache of the last prompt, or a new one if that prompt is still being read."""
        if self.prompts in self._reading:
            beside = PromptCache(self._new_cache(), 0)
            beside.store = self.prompts.store
            beside.shelf = self.prompts.shelf
            self.prompts = beside
        self._reading.append(self.prompts)
        return self.prompts

    @property
    def prompt_read(self) -> int:
        """Return how many tokens of the last prompt are in the prompt cache."""
        return len(self.prompts.tokens)

    @property
    def prompt_hidden(self) -> Tensor | None:
        """Return the captured states [n, d] at the last prompt's last n positions, or None."""
        capture = self.prompts.capture
        hidden = self.prompts.hidden
        return self._no_states(capture) if capture and hidden is None else hidden

    def _no_states(self, capture: Capture) -> Tensor:
        """Return hidden states [0, d] of the width and dtype that a capture gives."""
        return torch.empty(0, self.width(capture), dtype=self.dtype, device=self.device)

    def width(self, capture: Capture) -> int:
        """Return d, the width of captured hidden states [n, d].

        Raises ValueError for the LM head's inputs if the model names no LM head.
        """
        size = int(self.config.hidden_size)
        if capture == "head":
            return int(getattr(self.head, "in_features", size))
        return size * len(capture)

    @torch.inference_mode()
    def join(self, id: int, reserve: int = 0) -> None:
        """Add a row for a sequence, with the prompt. Several rows may join after one `prefill`."""
        self.prompts.copy_to(self.cache, id, reserve)
        if self.hot is not None:
            self.hot.add_context_tokens(id, self.prompts.tokens)

    @torch.inference_mode()
    def save_prefix(
        self,
        id: int,
        tokens: Sequence[int],
        hidden: Tensor | None = None,
        cache_salt: str = "",
        capture: Capture = "",
    ) -> None:
        """Save a sequence's committed positions for later prompts with the same salt.

        Call it right before `drop`, because a long text is moved rather than copied.

        Args:
            id: the sequence.
            tokens: its text, which may go beyond these positions.
            hidden: [n, d] the captured states at the last n of these positions, or None.
            cache_salt: only prompts with this salt find the text.
            capture: what `hidden` are.
        """
        committed = self.cache.length(id)
        length = min(committed, len(tokens))  # entries after the end of a text are of no use
        if not self.keeps_prefixes or not length:
            return
        if hidden is not None:
            hidden = hidden[: max(0, len(hidden) - (committed - length))]
        text = Text(tokens[:length], hidden, cache_salt, capture)
        detach = partial(self.prompts.detach, self.cache, id, length)
        self.prompts.remember(
            text, self.cache.view(id, length), detach if self.cache.is_releasable else None
        )

    @torch.inference_mode()
    def forget_prompt(self) -> None:
        """Empty the prompt cache, unless its prompt is still being read. Its buffers stay."""
        if self.prompts not in self._reading:
            self.prompts.forget()

    def reset(self) -> None:
        """Forget all sequences and the last prompt. Buffers stay."""
        super().reset()
        self._reading = []
        self.forget_prompt()
        if self.hot is not None:
            self.hot.reset()

    def crop(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Shorten each sequence to its first `lengths[r]` positions."""
        for id, length in zip(ids, lengths, strict=True):
            self.prompts.crop(id, length)
        super().crop(ids, lengths)

    @torch.inference_mode()
    def drop(self, id: int) -> None:
        """Forget a sequence, if it has a row."""
        self.prompts.leave(self.cache, id)
        super().drop(id)
        if self.hot is not None:
            self.hot.drop(id)

    # Forwards.

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], drafts: Sequence[Draft], capture: Capture = "") -> Output:
        """Return logits and captured hidden states at every node of each sequence's tree.

        New keys and values are provisional until `commit`.
        """
        depths = [draft.depths for draft in drafts]
        tokens = [draft.tokens for draft in drafts]
        is_chains = all(draft.is_chain for draft in drafts)
        masks = None if is_chains else [draft.mask() for draft in drafts]
        inputs = self._inputs(ids, depths, masks, tokens)
        logits, hidden = self._run(inputs, capture)
        return Output(inputs.split(logits), inputs.split(hidden) if hidden is not None else None)

    @torch.inference_mode()
    def extend(self, ids: Sequence[int], chains: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run and commit a chain of tokens for each sequence; return logits [len(chain), V]."""
        inputs = self._inputs(ids, [range(len(chain)) for chain in chains], tokens=chains)
        logits, _ = self._run(inputs, "")
        self.cache.commit(ids, inputs.depths)
        return inputs.split(logits)

    @torch.inference_mode()
    def read(self, id: int, tokens: Sequence[int]) -> None:
        """Run and commit tokens of a sequence. No logits are computed."""
        inputs = self._inputs([id], [range(len(tokens))], tokens=[tokens])
        self.backend(inputs, self.cache, False, "")
        self.cache.commit([id], inputs.depths)

    @torch.inference_mode()
    def states(self, ids: Sequence[int], chains: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run and commit a chain of tokens for each sequence; return the LM head's inputs [N_r, d].

        No logits are computed.
        """
        inputs = self._inputs(ids, [range(len(chain)) for chain in chains], tokens=chains)
        _, hidden = self.backend(inputs, self.cache, False, "head")
        assert hidden is not None
        self.cache.commit(ids, inputs.depths)
        return inputs.split(hidden)

    def _run(self, inputs: Inputs, capture: Capture) -> tuple[Tensor, Tensor | None]:
        """Return logits [n, V] and captured states [n, d] of new entries of the cache."""
        if self.hot is None:
            logits, hidden = self.backend(inputs, self.cache, True, capture)
            assert logits is not None
            return logits, hidden
        ids = [self.cache.ids[row] for row in inputs.rows]
        for id, tokens in zip(ids, inputs.tokens or [], strict=True):
            self.hot.add_context_tokens(id, tokens)
        _, states = self.backend(inputs, self.cache, False, "head")
        assert states is not None
        return self.hot(inputs.split(states), ids), states if capture else None


def _sliding_layers(config: PreTrainedConfig) -> list[bool]:
    """Return whether the attention of each layer has a window."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return [kind == "sliding_attention" for kind in kinds]
    return [window_of(config) is not None] * config.num_hidden_layers
