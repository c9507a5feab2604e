"""A Hugging Face causal model with its cache. The only module that touches modelling code."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from forerun.engine.draft import Draft
from forerun.model.batch import Inputs, by_row
from forerun.model.compat import cache_argument, warn_if_newer
from forerun.model.fingerprint import fingerprint, same_model
from forerun.model.kv_cache import KVCache, Stored, are_numbers
from forerun.model.prefix_store import PrefixStore, common
from forerun.model.rows import LeanForward, Rows
from forerun.model.support import check_model, context_of
from forerun.sampling.probabilities import argmax_of
from forerun.sampling.sampler import Drafted, Drawing

__all__ = ["CausalLM", "LeanForward", "Rows", "context_of", "fingerprint", "same_model"]

_LOG = logging.getLogger("forerun")
_T = TypeVar("_T")
_PROMPT = 0  # the only sequence of a prompt cache


class CausalLM(Rows):
    """Runs token trees of several sequences at once against a preallocated KV cache.

    Prompts are run apart, in a cache of one row, and join the others when they are done. Logits and hidden states
    come as lists, in the order of the ids asked for.

    Raises ValueError at construction for models that cannot roll back or see a tree: encoder-decoders, recurrent
    or chunked layers, attention that takes no additive mask, modelling code without `position_ids`.

    Attributes:
        keeps_hidden: whether forwards leave in `hidden` what the LM head was given.
        keeps_prompt: whether `prefill` leaves it in `prompt_hidden`. Set it before any prompt is run.
        feature: "below" has both keep the states below the last decoder layer instead. Set it before any prompt is run.
        hidden: [N_r, d] of each sequence of the last such forward.
        recorded: runs forwards of a few tokens instead (`forerun.backends.recorded`), if anything does.
        hot: takes the LM head's place and leaves rare tokens out (`forerun.backends.hot`), if anything does.
        fused_draft: drafts in one call (`forerun.backends.native_chain`), if anything does.
        prefixes: KV of prompts and of finished sequences, None to keep none.
        prefilled: tokens of prompts that were run so far.
    """

    keeps_hidden = keeps_prompt = False
    feature = "head"
    hidden: list[Tensor] | None = None
    recorded: Any = None
    hot: Any = None
    fused_draft: Any = None
    _prompt_salt: str
    _prompt_tokens: list[int]  # what the prompt cache holds, and of it
    _prompt_hidden: list[Tensor]  # [n, d] in parts

    def __init__(self, model: PreTrainedModel, forward: LeanForward | None = None) -> None:
        """`forward` takes the place of the model's own where it is given; see forerun/runtime."""
        warn_if_newer()
        check_model(model)
        self._forward = forward
        self.model = model.eval()
        # transformers looks through the parameters at every asking.
        self.device, self.dtype = model.device, getattr(forward, "dtype", model.dtype)
        self.config = config = model.config.get_text_config(decoder=True)
        self.context = context_of(config)  # the longest sequence that the positions allow
        self.fingerprint = fingerprint(model)  # now, as packed weights no longer tell
        self._cache_name = cache_argument(model.forward) or ""
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if keeps else {}
        kinds = getattr(config, "layer_types", None) or []
        if not kinds or "sliding_attention" in kinds:
            self.window = getattr(config, "sliding_window", None)
        # With layer types the model takes one mask a type, without them one mask for all layers.
        self._mask_kinds = sorted(set(kinds)) if "sliding_attention" in kinds else None
        layers = config.num_hidden_layers
        self._sliding = [kind == "sliding_attention" for kind in kinds] or [self.window is not None] * layers
        self._position_bytes: list[int] = []  # one number once it is known, shared by all copies
        self._empty(0)

    def _empty(self, prefix_bytes: int) -> None:
        self.cache, self._prompt = (KVCache(len(self._sliding), self._sliding) for _ in range(2))
        self.prefixes = PrefixStore(prefix_bytes) if prefix_bytes else None
        self.hidden, self.prefilled = None, 0
        self.forget_prompt()

    def fresh(self, prefix_bytes: int = 0) -> CausalLM:
        """The same model with a cache of its own, and a store of so many bytes for prefixes."""
        other = copy.copy(self)
        other._empty(prefix_bytes)
        if self.recorded is not None:
            other.recorded = self.recorded.fresh()
        if self.hot is not None:
            other.hot = self.hot.fresh()
        if self.fused_draft is not None:
            other.fused_draft = self.fused_draft.fresh(other.hot)
        return other

    def clock(self) -> float:
        """Seconds, for what is decided by time. Processes that share a model have one clock."""
        return perf_counter()

    def agreed(self, found: _T) -> _T:
        """What was measured here, or by the first of the processes that share a model."""
        return found

    def unanimous(self, flag: bool) -> bool:
        """Whether all processes that share a model say so."""
        return flag

    @property
    def exact(self) -> str:
        """ "bitwise" where a token's logits have the same bits whatever is run beside it, else "rounding"."""
        return getattr(self._forward, "exact", "rounding")

    @property
    def pads(self) -> bool:
        """Whether forwards run as many tokens of each row as the widest one has."""
        return getattr(self._forward, "pads", True)

    @property
    def head(self) -> nn.Module:
        """The LM head; raises ValueError for a model that names none."""
        head = self.model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(self.model).__name__} has no readable features: it names no LM head")
        return head

    def last_layer(self) -> nn.Module:
        """The last decoder layer; raises ValueError for a model whose layers are not found."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.config.num_hidden_layers:
                return module[-1]
        raise ValueError(f"{type(self.model).__name__} has no readable features below its last layer: there is no list")

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

    # Memory.

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of a row. A token is run to find out where nothing has been."""
        if not self._position_bytes:
            found = self.cache.position_bytes or self._prompt.position_bytes
            if not found:
                probe = self.fresh()
                list(probe.prefill([0], 1))
                found = probe._prompt.position_bytes
            self._position_bytes.append(found or 0)
        return self._position_bytes[0]

    def fits(self, rows: int, reserve: int, budget: int | None) -> bool:
        """Whether the cache stays within `budget` bytes with one more row of `reserve` positions beside its first
        `rows`; always without a budget."""
        return budget is None or self.cache.fits(reserve, budget, self.position_bytes, rows)

    # Prompts.

    @torch.inference_mode()
    def prefill(
        self, tokens: Sequence[int], chunk: int, hear: Callable[[Tensor], None] | None = None, salt: str = ""
    ) -> Iterator[int]:
        """Runs a prompt, which may be empty, in a cache of its own. After each chunk of at most `chunk` tokens yields
        how many that were. `join` then copies it to rows. What the last prompt or the prefix store holds of it, under
        the same salt, is not run again, unless `hear` is to have the logits [n, V] of each chunk."""
        tokens, cache = list(tokens), self._prompt
        if _PROMPT not in cache:
            cache.add(_PROMPT, len(tokens))
        # In a chunk with a token that gives NaN, those before it get NaN too.
        known = self.unanimous(cache.mend(_PROMPT)) and hear is None and salt == self._prompt_salt
        held = common(self._prompt_tokens, tokens) if known else 0
        stored = None
        if self.prefixes is not None and hear is None:
            stored = self.prefixes.find(tokens, held, self.keeps_prompt, salt)
        if stored is not None:
            entry, held = stored
            cache.copy_in(_PROMPT, entry.stored, held)
            self._prompt_hidden = [] if entry.hidden is None else [entry.hidden[:held]]
        else:
            cache.crop_to([_PROMPT], [held])
            self._prompt_hidden = [self.prompt_hidden[:held]] if self.prompt_hidden is not None else []
        self._prompt_tokens, self._prompt_salt = tokens[:held], salt
        cache.reserve(1, len(tokens))
        while held < len(tokens):
            part = tokens[held : held + chunk]
            inputs = Inputs([0], [range(len(part))], tokens=[part])
            logits, hidden = self._run(inputs, cache, logits=hear is not None)
            if hear is not None:
                assert logits is not None
                hear(inputs.split(logits)[0])
            cache.commit([_PROMPT], [range(len(part))])
            self._prompt_tokens += part
            if hidden is not None:
                self._prompt_hidden += inputs.split(hidden)
            held += len(part)
            self.prefilled += len(part)
            yield len(part)
        if self.prefixes is not None and tokens:
            self._remember(tokens, cache.view(_PROMPT, held), self.prompt_hidden, salt)

    @property
    def prompt_read(self) -> int:
        """Tokens of the last prompt that `prefill` has got to."""
        return len(self._prompt_tokens)

    @property
    def prompt_hidden(self) -> Tensor | None:
        """[n, d] LM head's inputs over the prefilled prompt, or what `feature` says, where they are kept."""
        if not self.keeps_prompt:
            return None
        if len(self._prompt_hidden) != 1:
            size = self.config.hidden_size
            if self.feature == "head":
                size = getattr(self.head, "in_features", size)
            nothing = torch.empty(0, size, dtype=self.dtype, device=self.device)
            self._prompt_hidden = [torch.cat(self._prompt_hidden) if self._prompt_hidden else nothing]
        return self._prompt_hidden[0]

    @torch.inference_mode()
    def join(self, id: int, reserve: int = 0) -> None:
        """A row for a sequence, with a copy of the prefilled prompt. May be called several times behind one
        `prefill`."""
        length = self._prompt.length(_PROMPT)
        self.cache.add(id, max(reserve, length))
        if length:
            self.cache.copy_in(id, self._prompt.view(_PROMPT, length), length)
        if self.hot is not None:
            self.hot.meet(id, self._prompt_tokens)

    @torch.inference_mode()
    def park(self, id: int, tokens: Sequence[int], hidden: Tensor | None = None, salt: str = "") -> None:
        """Remembers a sequence's committed positions under `tokens`, which may go on behind them, where there is a
        store for prefixes: prompts of the same salt find them. `hidden` [n, d]: the LM head's inputs there. To be
        called before `drop`."""
        length = self.cache.length(id)
        if self.prefixes is not None and length:
            hidden = hidden[:length] if hidden is not None and len(hidden) >= length else None
            self._remember(tokens[:length], self.cache.view(id, length), hidden, salt)

    def _remember(self, tokens: Sequence[int], stored: Stored, hidden: Tensor | None, salt: str) -> None:
        """Puts a text into the store, unless some of it is no number."""
        assert self.prefixes is not None
        parts = [part for pair in stored if pair is not None for part in pair]
        if self.unanimous(are_numbers(parts if hidden is None else [*parts, hidden])):
            try:
                self.prefixes.put(tokens, stored, hidden, salt)
            except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is one
                _LOG.warning("a text is not kept for later prompts: %r", error)  # no fault of the request

    @torch.inference_mode()
    def forget_prompt(self) -> None:
        """Empties the prompt cache. Its buffers stay."""
        self._prompt.reset()
        self._prompt_tokens, self._prompt_hidden, self._prompt_salt = [], [], ""

    def reset(self) -> None:
        self.cache.reset()
        self.forget_prompt()
        if self.hot is not None:
            self.hot.reset()

    def drop(self, id: int) -> None:
        super().drop(id)
        if self.hot is not None:
            self.hot.drop(id)

    # Forwards.

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], drafts: Sequence[Draft]) -> list[Tensor]:
        """Logits [N_r, V] of every node of each sequence's tree. Nothing is kept until `commit`."""
        masks = None
        if not all(draft.is_chain for draft in drafts):
            masks = [draft.mask() for draft in drafts]
        return self._logits(
            self._inputs(ids, [draft.depths for draft in drafts], masks, [draft.tokens for draft in drafts])
        )

    @torch.inference_mode()
    def extend(self, ids: Sequence[int], chains: Sequence[Sequence[int]]) -> list[Tensor]:
        """Runs and commits a chain of tokens each; logits [len(chain), V]."""
        depths = [range(len(chain)) for chain in chains]
        logits = self._logits(self._inputs(ids, depths, tokens=chains))
        self.cache.commit(ids, depths)
        return logits

    def _logits(self, inputs: Inputs) -> list[Tensor]:
        logits, hidden = self._run(inputs, self.cache)
        assert logits is not None
        self.hidden = inputs.split(hidden) if hidden is not None else None
        return inputs.split(logits)

    @torch.inference_mode()
    def roll(
        self, ids: Sequence[int], chains: Sequence[Sequence[int]], count: int, vocab_size: int
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Runs and commits a chain of tokens each, none of them empty, then the argmax token behind it among the first
        `vocab_size`, then the one behind that: `count` forwards.

        These tokens [R, count], the last of which is not run; of each forward the logits [R, V] that gave them, and the
        LM head's inputs [R, d] where they are kept. Nothing is waited for between recorded forwards, so that a GPU is
        given the next one while it works at the last.
        """
        inputs = self._inputs(ids, [range(len(chain)) for chain in chains], tokens=chains)
        rows, one = inputs.rows, [range(1)] * len(ids)
        best, logits, hidden = [], [], []
        for _ in range(count):
            found, heard = self._run(inputs, self.cache)
            assert found is not None
            logits.append(inputs.last(found))
            if heard is not None:
                hidden.append(inputs.last(heard))
            best.append(argmax_of(logits[-1][:, :vocab_size]))
            self.cache.commit(ids, inputs.depths)
            inputs = Inputs(rows, one, given=by_row(best[-1], rows)[:, None])
        return torch.stack(best, 1), logits, hidden

    @property
    def has_chain(self) -> bool:
        """Whether `chain` may do anything."""
        return self.fused_draft is not None and not self.keeps_hidden

    @torch.inference_mode()
    def chain(
        self,
        id: int,
        pending: Sequence[int],
        most: int,
        least: float,
        product: float,
        ends: Collection[int],
        drawing: Drawing | None = None,
    ) -> Drafted | None:
        """Runs and commits tokens of a sequence, then drafts one token behind another: up to `most` tokens, ending with
        one that is less probable than `least`, or with which all are together less than `product`, or which is one of
        the `ends`. All but the last one are run and committed. None, with nothing done, where this model has no faster
        way for it than `roll`.

        Tokens are the argmax, or as `drawing` says. Then there are fewer where logits are not numbers. Those that were
        sampled by numbers come with the distributions [n, V] that they were sampled from, all with their
        probabilities."""
        if not self.has_chain:
            return None
        found: Drafted | None = self.fused_draft(self.cache, id, pending, most, least, product, ends, drawing)
        return found

    def _run(self, inputs: Inputs, cache: KVCache, logits: bool = True) -> tuple[Tensor | None, Tensor | None]:
        """Logits where they are wanted (else they may be of any positions), and the LM head's inputs, or what `feature`
        says, where these are kept; each as `Inputs.split` takes it."""
        if self.hot is not None and logits and cache is self.cache:
            for row, own in zip(inputs.rows, inputs.tokens or [[]] * len(inputs.rows), strict=True):
                self.hot.meet(cache.ids[row], own)
            _, states = self._states(inputs, cache, False, "head")
            assert states is not None
            found = self.hot(inputs.split(states), [cache.ids[row] for row in inputs.rows])
            return found, states if self.keeps_hidden else None
        keeps = self.keeps_hidden if cache is self.cache else self.keeps_prompt
        wanted = self.feature if keeps else ""
        if self.recorded is not None and cache is self.cache:  # shapes are of one cache
            found = self.recorded(inputs, cache, wanted)
            if found is not None:
                return found
        return self._states(inputs, cache, logits, wanted)

    def _states(self, inputs: Inputs, cache: KVCache, logits: bool, wanted: str) -> tuple[Tensor | None, Tensor | None]:
        """`_run` with the model's own head, and whatever states are wanted."""
        forward = self._forward
        if forward is not None:
            own = getattr(forward, "lay_out", None)
            batch = own(inputs, cache) if own is not None else self._lay_out(inputs, cache)
            return forward(batch, cache, logits, wanted)
        batch = self._lay_out(inputs, cache)
        given: dict[str, Any] = {} if logits or wanted else self._last_logits
        with self.hearing(wanted, one=not logits) as heard:
            output = self.model(
                input_ids=batch.ids,
                position_ids=batch.positions,
                attention_mask=batch.mask,
                use_cache=True,
                **{self._cache_name: cache},
                **given,
            )
        return output.logits, heard[0] if wanted else None

    @contextmanager
    def hearing(self, wanted: str = "head", one: bool = False) -> Iterator[list[Tensor]]:
        """Within it, forwards of the model by this thread leave in the list what the LM head was given [B, N, d], or
        for "below" what the last decoder layer was given; for "" nothing happens. With `one` the head is run at the
        last position only, so that logits of the others are never made."""
        heard: list[Tensor] = []
        if not wanted:
            yield heard
            return
        thread = threading.get_ident()

        def hear(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if threading.get_ident() != thread:
                return None
            if wanted == "head":
                heard.append(inputs[0])
            return (inputs[0][:, -1:], *inputs[1:]) if one else None

        def hear_below(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                heard.append(inputs[0] if inputs else named["hidden_states"])

        with ExitStack() as hooks:
            if wanted == "head" or one:
                hooks.callback(self.head.register_forward_pre_hook(hear).remove)
            if wanted == "below":
                hooks.callback(self.last_layer().register_forward_pre_hook(hear_below, with_kwargs=True).remove)
            yield heard
