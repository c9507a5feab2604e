"""`model.generate(..., custom_generate=forerun.custom_generate)`: transformers' own generate on forerun's loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    QuantizedCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer

from forerun.api.decoder import Decoder
from forerun.api.requests import check_processors, encode, for_row
from forerun.api.resolve import resolve
from forerun.backends import is_as_made
from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.engine.stats import Stats, summarise
from forerun.heads.heads import HiddenDrafter
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import Method
from forerun.model.compat import CACHE_NAMES, user_cache
from forerun.sampling.sampler import Sampler

_KEPT = "_forerun_kept"  # the attribute of a target that its decoder is kept in
_INPUTS = {
    "attention_mask",
    "position_ids",
    *CACHE_NAMES,
    "use_cache",
    "cache_position",
    "logits_to_keep",
}


# transformers hands a function what its signature names, so attention_mask must not be: it would come twice.
def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft: PreTrainedModel | None = None,
    method: str | Method | None = None,
    token_streamer: BaseStreamer | None = None,
    stats: list[Stats] | None = None,
    guard: bool | None = None,
    pre_verifier: str | Path | PreVerifier | None = None,
    head: str | Path | HiddenDrafter | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode in place of transformers' own loop, as `model.generate(..., custom_generate=forerun.custom_generate)`.

    `streamer`, `tokenizer` and `assistant_model` never arrive: use `token_streamer`, StopStringCriteria and `draft`.
    Processors and criteria see rows one by one; rows end at the model's context. The prepared models are kept on
    `model`, with the draft, until either has other weights (writes into `.data` of a few numbers go unseen). Keys and
    values are not: each call reads its prompts anew, so adapters may be switched between calls.

    Args:
        draft: a smaller model with the same vocabulary.
        method: a name from `forerun.methods.METHODS` or its dataclass. Default: see `forerun.api.resolve.resolve`.
        token_streamer: gets the prompt, then each token; for a single sequence.
        stats: a list that the Stats of each row are appended to.
        guard: see `forerun.EngineOptions`.
        pre_verifier: the trained layer of "pacer", a folder (read in every call) or the layer. Costs
            that a method asks for are measured in the first call, and kept as the models are.
        head: what "lyanna" and methods like it draft with, a folder or the head; kept likewise.

    Returns:
        ids [B * num_return_sequences, longest], padded on the right, or GenerateDecoderOnlyOutput with them alone.

    Raises:
        ValueError: what the loop cannot do, or would not do as transformers does.
    """
    _check_supported(generation_config)
    kind: Any = type(model)
    if model.prepare_inputs_for_generation != kind.prepare_inputs_for_generation.__get__(model):
        raise ValueError(
            "prepare_inputs_for_generation is replaced, as for prompt tuning; only token ids are read"
        )
    padding = _padding(input_ids, model_kwargs)
    if token_streamer is not None and len(input_ids) > 1:
        raise ValueError(f"token_streamer takes a single sequence, not {len(input_ids)}")
    decoder = _decoder(model, draft, method, guard, pre_verifier, head)
    prompts = [row[count:] for row, count in zip(input_ids.tolist(), padding, strict=True)]
    context = decoder.target.context
    encode(prompts, None, context, decoder.target.vocab_size)

    # How transformers tells end tokens and length; the user's own take the place of the configuration's.
    eos = [c.eos_token_id for c in stopping_criteria if type(c) is EosTokenCriteria]
    lengths = [c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria]
    longest = min(lengths, default=generation_config.max_length)
    criteria = [
        c for c in stopping_criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
    ]
    pad = generation_config._pad_token_tensor
    check_processors(logits_processor)
    requests, limits = [], []
    for i, (prompt, count) in enumerate(zip(prompts, padding, strict=True)):
        front = input_ids[i : i + 1, :count]
        limits.append(max(longest - count, len(prompt) + 1) - len(prompt))
        requests.append(
            Request(
                tokens=prompt,
                max_new_tokens=limits[-1],
                sampler=_RowSampler(
                    greedy=not generation_config.do_sample,
                    processors=LogitsProcessorList(
                        [for_row(processor, i) for processor in logits_processor]
                    ),
                    front=front,
                ),
                eos=frozenset(int(token) for tokens in eos for token in tokens),
                criteria=StoppingCriteriaList([_RowCriteria(criteria, front)])
                if criteria
                else None,
                seed=int(torch.randint(2**62, (1,))) if generation_config.do_sample else None,
            )
        )
    rooms = {
        min(room, context - len(prompt) if context else room)
        for room, prompt in zip(limits, prompts, strict=True)
    }
    if pad is None and len(prompts) > 1 and (criteria or len(rooms) > 1):
        raise ValueError("rows may end at different lengths; set pad_token_id")

    steps: list[list[Step]] = [[] for _ in requests]
    begun = perf_counter()
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    try:
        for batch in decoder.session.add(requests):
            for index, step in batch:
                steps[index].append(step)
                if token_streamer is not None:
                    for token in step.tokens:
                        token_streamer.put(torch.tensor([token]))
    finally:
        decoder.close()  # drops keys and values: what is kept may refer to this copy
    if token_streamer is not None:
        token_streamer.end()
    if stats is not None:
        seconds = perf_counter() - begun
        stats += [summarise(taken, seconds) for taken in steps]

    outputs = [[token for step in taken for token in step.tokens] for taken in steps]
    width, filler = max(map(len, outputs)), 0 if pad is None else int(pad)
    outputs = [output + [filler] * (width - len(output)) for output in outputs]
    sequences = torch.cat([input_ids, input_ids.new_tensor(outputs)], dim=1)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _check_supported(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation mode {mode.value!r} is not supported; greedy search and sampling are"
        )
    for name, allowed in (
        ("guidance_scale", (None, 1)),
        ("watermarking_config", (None,)),
        ("forced_eos_token_id", (None,)),
        ("encoder_repetition_penalty", (None, 1)),
        ("encoder_no_repeat_ngram_size", (None, 0)),
    ):
        if getattr(config, name, None) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)} is not supported")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(f"{name} is not supported; only sequences are returned")


def _padding(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Return the tokens of padding before each row of ids [B, n]. Raises ValueError for inputs of other kinds."""
    for name, value in model_kwargs.items():
        if name not in _INPUTS and value is not None:
            raise ValueError(f"{name} is not supported; only token ids and an attention mask are")
    name, cache = user_cache(model_kwargs)
    if cache is not None and (isinstance(cache, QuantizedCache) or cache.get_seq_length()):
        raise ValueError(
            f"{name} must be empty and not quantized: forerun fills a cache of its own"
        )
    mask = model_kwargs.get("attention_mask")
    seen = torch.ones_like(input_ids) if mask is None else mask.bool().long()
    if (
        seen.shape != input_ids.shape
        or bool((seen[:, :-1] > seen[:, 1:]).any())
        or not bool(seen[:, -1].all())
    ):
        raise ValueError(
            "attention_mask may have zeros on the left of a row alone: pad with padding_side='left'"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        implied = (seen.cumsum(-1) - 1).clamp(min=0)
        if positions.shape[1:] != implied.shape[1:] or bool(((positions - implied) * seen).any()):
            raise ValueError("position_ids must count the tokens that attention_mask shows, from 0")
    return (seen == 0).sum(-1).tolist()


class _Kept:
    """A decoder and what it was made of. Copies and pickles of its target lack it: it belongs to the original."""

    def __init__(
        self, decoder: Decoder, model: PreTrainedModel, draft: PreTrainedModel | None
    ) -> None:
        self.decoder, self.model, self.draft = decoder, model, draft
        self.state = self._state()
        self.head: str | Path | HiddenDrafter | None = None  # what that of the decoder was made of

    def _state(self) -> list[Any]:
        """Return what changes with weights, modules, hooks and attention implementations. Modules and not their ids,
        which other modules may get."""
        found: list[Any] = []
        for model in (self.model, self.draft):
            if model is not None:
                as_made = is_as_made(model)
                found += [model.config._attn_implementation, as_made, *model.modules()]
                for weight in model.parameters():
                    found += [weight.data_ptr(), 0 if weight.is_inference() else weight._version]
                    if as_made and weight.device.type == "cpu":
                        # There may be copies, and PEFT merges adapters into `.data`, which no version tells.
                        found += weight.detach().flatten()[:: weight.numel() // 16 + 1].tolist()
        return found

    def fits(self, model: PreTrainedModel, draft: PreTrainedModel | None) -> bool:
        """Whether it was made of these models (None: of whatever draft) and of the weights that they have now."""
        return self.model is model and draft in (None, self.draft) and self.state == self._state()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _decoder(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    method: str | Method | None,
    guard: bool | None,
    pre_verifier: str | Path | PreVerifier | None,
    head: str | Path | HiddenDrafter | None,
) -> Decoder:
    """Return a decoder of what is kept on the model if that still fits, or of what is prepared now.

    On the model, so that it goes with it: a weak dictionary would hold a target by its own decoder.
    """
    if draft is not None and not isinstance(draft, PreTrainedModel):
        raise ValueError(f"draft must be a loaded transformers model, not {draft!r}")
    for part in (model, draft):
        if part is not None and part.training:
            raise ValueError(
                f"{type(part).__name__} is in training mode, with dropout in its output; call eval()"
            )
    chosen = resolve(model, draft, method, pre_verifier=pre_verifier, head=head).method
    needed = draft if chosen.needs_draft else None
    kept: _Kept | None = vars(model).get(_KEPT)
    if kept is None or not kept.fits(model, needed):
        kept = vars(model)[_KEPT] = None  # two copies of the weights are enough
        decoder = Decoder(model, None, needed, chosen, guard, pre_verifier=pre_verifier, head=head)
        kept = vars(model)[_KEPT] = _Kept(decoder, model, needed)
        kept.head = head
        return decoder
    changes: dict[str, Any] = {"method": chosen, "guard": guard}
    if chosen.layer is not None:
        changes["pre_verifier"] = pre_verifier
    known = kept.decoder.head
    if chosen.head is not None and (head != kept.head or known is None):
        changes["head"] = kept.head = head
    kept.decoder = kept.decoder.replace(**changes)
    return kept.decoder


@dataclass(frozen=True)
class _RowSampler(Sampler):
    """Its processors see a row as in transformers' batch, with the padding [1, n] before it, on the prompt's device."""

    front: Tensor = field(kw_only=True)

    def scores(self, logits: Tensor, prefix: Callable[[int], list[int]]) -> Tensor:
        padding = self.front[0].tolist()
        return super().scores(logits.to(self.front.device), lambda node: padding + prefix(node))


class _RowCriteria(StoppingCriteria):
    """Its criteria see a row in the same way."""

    def __init__(self, criteria: list[StoppingCriteria], front: Tensor) -> None:
        self.criteria, self.front = StoppingCriteriaList(criteria), front

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """[1] bool for token ids [1, n]."""
        ids = torch.cat([self.front, input_ids.to(self.front.device)], dim=1)
        return self.criteria(ids, scores, **kwargs).to(input_ids.device)  # type: ignore[arg-type]
