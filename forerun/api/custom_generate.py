"""`custom_generate`: transformers' own `generate` on forerun's loop.

It is used as `model.generate(..., custom_generate=forerun.custom_generate)`.
"""

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
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from forerun.api.choose import resolve
from forerun.api.decoder import Decoder
from forerun.api.requests import check_processors, encode, for_row
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
# The inputs of a model that are supported, beside token ids.
_INPUTS = {
    "attention_mask",
    "position_ids",
    *CACHE_NAMES,
    "use_cache",
    "cache_position",
    "logits_to_keep",
}
# Options of a generation config that other loops need, with the values that ask for nothing.
_UNSUPPORTED = (
    ("guidance_scale", (None, 1)),
    ("watermarking_config", (None,)),
    ("forced_eos_token_id", (None,)),
    ("encoder_repetition_penalty", (None, 1)),
    ("encoder_no_repeat_ngram_size", (None, 0)),
)
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


# transformers passes a function the inputs that its signature names, and those of the model again.
# So attention_mask must not be named, because it would be passed twice.
def custom_generate(  # noqa: PLR0913 - users give these by name, and each is documented here
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
    """Decode in place of transformers' own loop.

    transformers keeps `streamer`, `tokenizer` and `assistant_model` for itself: use
    `token_streamer`, StopStringCriteria and `draft`. Processors and criteria see rows one by one.
    Rows end at the model's context.

    The prepared models are kept on `model`, with the draft, until either has other weights. (Writes
    of a few numbers into `.data` go unnoticed.) Keys and values are not kept: each call reads its
    prompts anew, so adapters may be switched between calls.

    Args:
        model: the target, passed by transformers.
        input_ids: the prompts [B, n], padded on the left, passed by transformers.
        logits_processor: those of `generate`, passed by transformers.
        stopping_criteria: likewise.
        generation_config: likewise.
        draft: a smaller model with the same vocabulary.
        method: a name from `forerun.methods.METHODS` or its dataclass. Default: see
            `forerun.api.choose.resolve`.
        token_streamer: gets the prompt, then each token; for a single sequence.
        stats: a list that the Stats of each row are appended to.
        guard: see `forerun.EngineOptions`.
        pre_verifier: the trained layer of "pacer", a folder (read in every call) or the layer. If a
            method needs costs, they are measured in the first call and kept as the models are.
        head: what "lyanna" and methods like it draft with, a folder or the head; kept likewise.
        **model_kwargs: the model's other inputs, passed by transformers.

    Returns:
        ids [B * num_return_sequences, longest], padded on the right, or a GenerateDecoderOnlyOutput
        with nothing but these.

    Raises:
        ValueError: what the loop cannot do, or would do differently from transformers.
    """
    _check_supported(model, generation_config)
    padding = _padding(input_ids, model_kwargs)
    if token_streamer is not None and len(input_ids) > 1:
        raise ValueError(f"token_streamer takes a single sequence, not {len(input_ids)}")
    decoder = _decoder(model, draft, method, guard, pre_verifier, head)
    requests = _requests(
        input_ids, padding, decoder, logits_processor, stopping_criteria, generation_config
    )
    started_at = perf_counter()
    steps = _run(decoder, requests, input_ids, token_streamer)
    if stats is not None:
        seconds = perf_counter() - started_at
        stats += [summarise(taken, seconds) for taken in steps]
    sequences = _joined(input_ids, steps, generation_config._pad_token_tensor)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _check_supported(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Raise ValueError for what only transformers' own loop can do."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation mode {mode.value!r} is not supported; greedy search and sampling are"
        )
    for name, allowed in _UNSUPPORTED:
        if getattr(config, name, None) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)} is not supported")
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise ValueError(f"{name} is not supported; only sequences are returned")
    kind: Any = type(model)
    if model.prepare_inputs_for_generation != kind.prepare_inputs_for_generation.__get__(model):
        raise ValueError(
            "prepare_inputs_for_generation is replaced, as for prompt tuning; "
            "only token ids are read"
        )


def _requests(
    input_ids: Tensor,
    padding: list[int],
    decoder: Decoder,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> list[Request]:
    """Return a request for each row of ids [B, n], whose padding has these lengths."""
    prompts = [row[count:] for row, count in zip(input_ids.tolist(), padding, strict=True)]
    context = decoder.target.context
    encode(prompts, None, context, decoder.target.vocab_size)  # raises for what cannot be decoded

    # transformers tells end tokens and length by criteria, and the user's own replace those of the
    # configuration.
    ends: set[int] = set()
    lengths: list[int] = []
    others: list[StoppingCriteria] = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.update(int(token) for token in criterion.eos_token_id)
        elif type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        else:
            others.append(criterion)
    longest = min(lengths, default=config.max_length)
    check_processors(processors)
    requests = []
    rooms = set()
    for row, (prompt, count) in enumerate(zip(prompts, padding, strict=True)):
        front = input_ids[row : row + 1, :count]
        room = max(longest - count, len(prompt) + 1) - len(prompt)
        rooms.add(min(room, context - len(prompt)) if context else room)
        row_processors = LogitsProcessorList([for_row(item, row) for item in processors])
        row_criteria = StoppingCriteriaList([_RowCriteria(others, front)]) if others else None
        request = Request(
            tokens=prompt,
            max_new_tokens=room,
            sampler=_RowSampler(
                greedy=not config.do_sample, processors=row_processors, front=front
            ),
            eos=frozenset(ends),
            criteria=row_criteria,
            seed=int(torch.randint(2**62, (1,))) if config.do_sample else None,
        )
        requests.append(request)
    if config._pad_token_tensor is None and len(prompts) > 1 and (others or len(rooms) > 1):
        raise ValueError("rows may end at different lengths; set pad_token_id")
    return requests


def _run(
    decoder: Decoder,
    requests: list[Request],
    input_ids: Tensor,
    token_streamer: BaseStreamer | None,
) -> list[list[Step]]:
    """Decode requests and return the steps of each. The streamer gets the tokens as they come."""
    steps: list[list[Step]] = [[] for _ in requests]
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
    return steps


def _joined(input_ids: Tensor, steps: list[list[Step]], pad: Tensor | None) -> Tensor:
    """Return ids [B, n] with the output of each row, padded on the right."""
    outputs = [_tokens(taken) for taken in steps]
    width = max(map(len, outputs))
    filler = 0 if pad is None else int(pad)
    padded = [output + [filler] * (width - len(output)) for output in outputs]
    return torch.cat([input_ids, input_ids.new_tensor(padded)], dim=1)


def _tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def _padding(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Return the number of padding tokens before each row of ids [B, n].

    Raises ValueError for other inputs than token ids with padding on the left.
    """
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
    if seen.shape != input_ids.shape or not _is_padded_left(seen):
        raise ValueError(
            "attention_mask may have zeros on the left of a row alone: pad with padding_side='left'"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        implied = (seen.cumsum(-1) - 1).clamp(min=0)
        if positions.shape[1:] != implied.shape[1:] or bool(((positions - implied) * seen).any()):
            raise ValueError("position_ids must count the tokens that attention_mask shows, from 0")
    counts: list[int] = (seen == 0).sum(-1).tolist()
    return counts


def _is_padded_left(seen: Tensor) -> bool:
    """Return whether each row of a mask [B, n] is zeros, then at least one 1 to the end."""
    falls = seen[:, :-1] > seen[:, 1:]
    return not bool(falls.any()) and bool(seen[:, -1].all())


class _Kept:
    """A decoder and the models that it was made of.

    Copies and pickles of its target lack it, because it belongs to the original.
    """

    def __init__(
        self,
        decoder: Decoder,
        model: PreTrainedModel,
        draft: PreTrainedModel | None,
        head: str | Path | HiddenDrafter | None,
    ) -> None:
        self.decoder = decoder
        self.model = model
        self.draft = draft
        self.head = head  # what the decoder's head was made of
        self.state = self._state()

    def _state(self) -> list[Any]:
        """Return what changes with weights, modules, hooks and attention implementations.

        It holds modules and not their ids, because other modules may get the ids of deleted ones.
        """
        state: list[Any] = []
        for model in (self.model, self.draft):
            if model is None:
                continue
            as_made = is_as_made(model)
            state += [model.config._attn_implementation, as_made, *model.modules()]
            for weight in model.parameters():
                state += [weight.data_ptr(), 0 if weight.is_inference() else weight._version]
                if as_made and weight.device.type == "cpu":
                    # There may be copies of the weights, and PEFT merges adapters into `.data`,
                    # which does not change the version. So some of the numbers are compared.
                    state += weight.detach().flatten()[:: weight.numel() // 16 + 1].tolist()
        return state

    def fits(self, model: PreTrainedModel, draft: PreTrainedModel | None) -> bool:
        """Return whether the decoder was made of these models with the weights that they have now.

        Without a draft, it may have been made with any draft.
        """
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
    """Return the decoder that is kept on the model if it still fits, else a new one.

    It is kept on the model so that it is deleted with it. A dictionary with weak keys would not do,
    because the decoder refers to its target.
    """
    if draft is not None and not isinstance(draft, PreTrainedModel):
        raise ValueError(f"draft must be a loaded transformers model, not {draft!r}")
    for part in (model, draft):
        if part is not None and part.training:
            raise ValueError(
                f"{type(part).__name__} is in training mode, with dropout in its output; "
                "call eval()"
            )
    chosen = resolve(model, draft, method, pre_verifier=pre_verifier, head=head).method
    needed = draft if chosen.needs_draft else None
    kept: _Kept | None = vars(model).get(_KEPT)
    if kept is None or not kept.fits(model, needed):
        # The old one goes first, because two copies of the weights are enough.
        kept = None
        vars(model)[_KEPT] = None
        decoder = Decoder(model, None, needed, chosen, guard, pre_verifier=pre_verifier, head=head)
        vars(model)[_KEPT] = _Kept(decoder, model, needed, head)
        return decoder
    changes: dict[str, Any] = {"method": chosen, "guard": guard}
    if chosen.layer is not None:
        changes["pre_verifier"] = pre_verifier
    if chosen.head is not None and (head != kept.head or kept.decoder.head is None):
        kept.head = head
        changes["head"] = head
    kept.decoder = kept.decoder.replace(**changes)
    return kept.decoder


@dataclass(frozen=True)
class _RowSampler(Sampler):
    """A sampler whose processors see a row as it is in transformers' batch.

    That is with the padding [1, n] before it, on the prompt's device.
    """

    front: Tensor = field(kw_only=True)

    def scores(self, logits: Tensor, prefix: Callable[[int], list[int]]) -> Tensor:
        padding = self.front[0].tolist()
        return super().scores(logits.to(self.front.device), lambda node: padding + prefix(node))


class _RowCriteria(StoppingCriteria):
    """Criteria that see a row as `_RowSampler`'s processors do."""

    def __init__(self, criteria: list[StoppingCriteria], front: Tensor) -> None:
        self.criteria = StoppingCriteriaList(criteria)
        self.front = front

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return [1] bool for token ids [1, n]."""
        ids = torch.cat([self.front, input_ids.to(self.front.device)], dim=1)
        return self.criteria(ids, scores, **kwargs).to(input_ids.device)
