"""The Python interface: `load` a target with a method, then `generate` or `stream`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, overload

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode

from forerun import methods, profiles
from forerun.costs import Costs
from forerun.decode import Generation, Step, decode
from forerun.drafters.guard import Guarded, Pace
from forerun.drafters.phrases import PhrasePool
from forerun.lengths.oracle import Truth
from forerun.loading import (
    DeviceMap,
    Prompt,
    check_draft_tokenizer,
    check_vocabularies,
    encode,
    load_head,
    load_model,
    load_pre_verifier,
    load_tokenizer,
)
from forerun.methods import AR, Method, Parts
from forerun.metrics import Stats, summarise
from forerun.model import CausalLM
from forerun.nn.hidden import HiddenDrafter
from forerun.nn.pre_verifier import PreVerifier
from forerun.params import SamplingParams
from forerun.runtime import prepare
from forerun.runtime.costs import head_costs, measure_costs
from forerun.runtime.hidden import HiddenLM
from forerun.sampling import Sampler
from forerun.text import SplitStopCriteria, TextStream
from forerun.zoo import EMBEDDED, FOLDER, bundled_head

_NO_DRAFT = "method {!r} needs a draft model: give a draft"


@dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    Attributes:
        text: the output alone, cut before a stop string; empty without a tokenizer.
        tokens: output token ids, the end token included.
        origins: where each token came from: draft, lookup, correction or bonus.
        finish_reason: "stop" (end token, stop string or criterion) or "length".
        stats: tau, alpha, tokens/s and the counts behind them. Its seconds are those of the whole call.
        steps: the record of every target forward.
    """

    text: str
    tokens: list[int]
    origins: list[str]
    finish_reason: str
    stats: Stats
    steps: list[Step]


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream.

    Attributes:
        index: which prompt it belongs to.
        text: new text; empty where a stop string may be in the making.
        pieces: the same text as (text, origin of its token).
        step: the target forward behind it, with the tokens committed.
        finish_reason: set on the last chunk of a prompt.
    """

    index: int
    text: str
    pieces: list[tuple[str, str]]
    step: Step
    finish_reason: str | None


class Decoder:
    """A target, perhaps a draft, and a method. Every call has caches of its own, so streams may be interleaved."""

    def __init__(
        self,
        target: PreTrainedModel | CausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft: PreTrainedModel | CausalLM | None = None,
        method: Method | None = None,
        guard: bool | None = None,
        sampling_method: Method | None = None,
        pre_verifier: str | Path | PreVerifier | None = None,
        head: str | Path | HiddenDrafter | HiddenLM | None = None,
    ) -> None:
        """Models get the fastest forward there is for them (`forerun.runtime.prepare`), which keeps copies of
        weights: make a new Decoder when they have changed. A CausalLM is taken as it is, as is a HiddenLM;
        `CausalLM(model)` runs transformers' own forward. `guard` is that of `load`. `sampling_method` takes the place
        of `method` where tokens are drawn.

        Raises ValueError for models that cannot run drafts and for pairs that do not fit together.
        """
        self.target = target if isinstance(target, CausalLM) else prepare(target)
        self.draft = prepare(draft) if isinstance(draft, PreTrainedModel) else draft
        if self.draft is not None and self.draft.device != self.target.device:
            raise ValueError(
                f"the draft is on {self.draft.device} and the target on {self.target.device}; put them on one"
            )
        self.tokenizer, self.guard = tokenizer, guard
        self._paces: dict[tuple[Method, bool], Pace] = {}  # drawing costs and accepts otherwise than greedy decoding
        self.pools: dict[tuple[int, int], PhrasePool] = {}  # phrases that outlive a call
        self.truth = Truth()  # stays empty unless the method is an oracle
        self.method = (
            method
            if method is not None
            else methods.method(methods.default_method(draft is not None, pre_verifier is not None))
        )
        self.sampling_method = sampling_method
        self.costs: Costs | None = None  # measured when a method first asks for them
        self.clocked = False  # whether they were, so that they are others in every process
        for each in (self.method, sampling_method):
            if each is not None and each.needs_draft and self.draft is None:
                raise ValueError(_NO_DRAFT.format(each.name))
        if self.draft is not None:
            check_vocabularies(self.target.vocab_size, self.draft.vocab_size, tokenizer)
        self.pre_verifier: PreVerifier | None = None
        for each in (self.method, sampling_method):
            if each is not None and each.layer is not None:
                self.pre_verifier = self.layer_for(each, self.pre_verifier or pre_verifier)
        self.head: HiddenLM | None = None
        for each in (self.method, sampling_method):
            if each is not None and each.head is not None:
                self.head = self.head_for(each, head)

    def layer_for(self, method: Method, pre_verifier: str | Path | PreVerifier | None) -> PreVerifier | None:
        """The trained layer that a method of this decoder needs, if any; raises ValueError where it is not given or
        does not fit."""
        if method.layer is None:
            return None
        if pre_verifier is None:
            raise ValueError(
                f"method {method.name!r} needs a pre-verifier: train one with `forerun train pre-verifier`"
            )
        assert self.draft is not None
        return load_pre_verifier(pre_verifier, self.target, self.draft, method.kind)

    def head_for(self, method: Method, head: str | Path | HiddenDrafter | HiddenLM | None) -> HiddenLM | None:
        """The head that a method drafts with, if any; raises ValueError where it is not given or does not fit."""
        if method.head is None:
            return None
        if head is None:
            command = "forerun train lyanna" + ("" if method.head == "lyanna" else f" --kind {method.head}")
            raise ValueError(f"method {method.name!r} needs a head: train one with `{command}`")
        if isinstance(head, HiddenLM):
            if head.kind != method.head:
                raise ValueError(f"the head is of the kind {head.kind!r}; the method needs {method.head!r}")
            return head
        return HiddenLM(load_head(head, self.target, method.head), self.target)

    def read_phrases(self, path: str | Path) -> None:
        """Begins with the phrases of a file that `save_phrases` wrote; they are for greedy decoding.

        Raises ValueError for a file that is none, is damaged or belongs to another vocabulary, and where the method has
        no use for phrases of that form.
        """
        pool = PhrasePool.load(path, self.target.vocab_size)
        shape = pool.span, pool.most
        if shape != self._phrases():
            raise ValueError(
                f"the phrases in {path} have {shape[0]} tokens, {shape[1]} for each token at most; method "
                f"{self.method.name!r} is set to {self._phrases()}: see ngram and guesses"
            )
        self.pools[shape] = pool

    def save_phrases(self, path: str | Path) -> None:
        """Writes what the method has gathered, for `read_phrases`: whole or not at all."""
        shape = self._phrases()
        self.pools.get(shape, PhrasePool(*shape)).save(path, self.target.vocab_size)

    def _phrases(self) -> tuple[int, int]:
        shape = self.method.phrases
        if shape is None or not getattr(self.method, "warm", False):
            raise ValueError(f"method {self.method.name!r} does not keep phrases between calls: see warm")
        return shape

    def method_for(self, greedy: bool) -> Method:
        """What decodes: greedy output and drawn output may have methods of their own."""
        return self.method if greedy or self.sampling_method is None else self.sampling_method

    @overload
    def generate(
        self,
        prompts: str | list[int] | Tensor,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **options: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | GenerationConfig | None = None,
        *,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **options: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Generates to the end; a Completion for one prompt, a list of them for several.

        Args:
            prompts: text or token ids, one or many. A batch is decoded together; its rows finish on their own.
            params: SamplingParams (greedy by default) or a transformers GenerationConfig.
            logits_processor: more of transformers' processors, behind those of `params`. They are called for drafted
                tokens too, so they must depend on nothing but their arguments.
            stopping_criteria: more of transformers' criteria, asked behind every token of each row by itself.
            **options: fields of SamplingParams, given singly.

        Raises:
            ValueError: empty prompts, prompts that fill the context, settings that are unknown or out of range.
        """
        single, rows = encode(prompts, self.tokenizer, self.target.context, self.target.vocab_size)
        begun = perf_counter()
        params = _params(params, options)
        seqs, texts = self._start(rows, params, logits_processor, stopping_criteria)
        steps: list[list[Step]] = [[] for _ in seqs]
        for batch in self._decode(seqs, _is_seeded(params)):
            for step in batch:
                steps[step.index].append(step)
        seconds = perf_counter() - begun
        completions = []
        for seq, text, taken in zip(seqs, texts, steps, strict=True):
            origins = [origin for step in taken for origin in step.origins]
            if text is not None:
                text.push(seq.output, origins, finished=True)
            assert seq.finish_reason is not None
            completions.append(
                Completion(
                    text=text.text if text is not None else "",
                    tokens=seq.output,
                    origins=origins,
                    finish_reason=seq.finish_reason,
                    stats=summarise(taken, seconds),
                    steps=taken,
                )
            )
        return completions[0] if single else completions

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | GenerationConfig | None = None,
        *,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, as chunks: one a target forward and prompt, as they come. Checks its arguments at once."""
        _, rows = encode(prompts, self.tokenizer, self.target.context, self.target.vocab_size)
        params = _params(params, options)
        seqs, texts = self._start(rows, params, logits_processor, stopping_criteria)

        def chunks() -> Iterator[Chunk]:
            for batch in self._decode(seqs, _is_seeded(params)):
                for step in batch:
                    reason, text = seqs[step.index].finish_reason, texts[step.index]
                    pieces = text.push(step.tokens, step.origins, reason is not None) if text is not None else []
                    yield Chunk(step.index, "".join(piece for piece, _ in pieces), pieces, step, reason)

        return chunks()

    def measure(self, method: Method) -> None:
        """Measures the costs that a method reckons with, where they are not known yet."""
        if not method.needs_costs:
            return
        if self.costs is None:
            self.costs, self.clocked = measure_costs(self.target, self.draft, layer=self.pre_verifier), True
        if method.head is not None and self.head is not None and not self.costs.head:
            self.costs, self.clocked = replace(self.costs, head=head_costs(self.head)), True

    def _decode(self, seqs: list[Generation], seeded: bool) -> Iterator[list[Step]]:
        """`seeded`: draws are to be the same in every run, so no clock may decide when drafts use up random numbers."""
        target, draft = self.target.fresh(), self.draft.fresh() if self.draft is not None else None
        greedy = seqs[0].sampler.greedy
        method = self.method_for(greedy)
        if greedy or not seeded:
            self.measure(method)
        costs = None if seeded and not greedy and self.clocked else self.costs
        pools = self.pools if greedy else None  # phrases of other calls would change where drafts use up random numbers
        rows = len(seqs) if greedy else 1
        drafter = method.build(Parts(target, draft, self.pre_verifier, costs, self.truth, pools, self.head, rows))
        guard = self.guard if self.guard is not None else greedy or not seeded
        if guard and not isinstance(method, AR):
            drafter = Guarded(drafter, self._paces.setdefault((method, greedy), Pace()))
        return decode(target, drafter, seqs)

    def _start(
        self,
        rows: list[list[int]],
        params: SamplingParams | GenerationConfig,
        processors: LogitsProcessorList | None,
        criteria: StoppingCriteriaList | None,
    ) -> tuple[list[Generation], list[TextStream | None]]:
        config, seed, ignore_eos = self._generation_config(params)
        ends = [] if ignore_eos or config.eos_token_id is None else config.eos_token_id
        eos = frozenset([ends] if isinstance(ends, int) else ends)
        stop = [config.stop_strings] if isinstance(config.stop_strings, str) else list(config.stop_strings or ())
        criteria = StoppingCriteriaList(criteria or [])
        if stop:
            if self.tokenizer is None:
                raise ValueError("stop strings need a tokenizer; give tokenizer=...")
            criteria.append(StopStringCriteria(self.tokenizer, stop))
        if config.max_time is not None:
            criteria.append(MaxTimeCriteria(config.max_time))
        if seed is None and config.do_sample:
            seed = int(torch.randint(2**31, (1,)))
        split = [text for text in stop if not text.isascii()]
        seqs, texts = [], []
        sampler = None
        for i, row in enumerate(rows):
            # One for all rows where prompts do not matter, so that rows can be sampled together.
            if sampler is None or not sampler.prefix_free:
                sampler = Sampler(not config.do_sample, self.target.processors(config, len(row), processors))
            limit = len(row) + config.max_new_tokens if config.max_new_tokens is not None else config.max_length
            if limit <= len(row):
                raise ValueError(f"max_length {limit} leaves no room behind the {len(row)} tokens of prompt {i}")
            own = StoppingCriteriaList(criteria)
            if split and self.tokenizer is not None:
                own.append(SplitStopCriteria(self.tokenizer, len(row), split))
            generator = None
            if config.do_sample:
                assert seed is not None
                generator = torch.Generator(self.target.device).manual_seed(seed + i)
            seqs.append(
                Generation(
                    tokens=list(row),
                    limit=min(limit, self.target.context or limit),
                    sampler=sampler,
                    eos=eos,
                    criteria=own,
                    generator=generator,
                    index=i,
                )
            )
            texts.append(TextStream(self.tokenizer, row, stop) if self.tokenizer is not None else None)
        return seqs, texts

    def _generation_config(
        self, params: SamplingParams | GenerationConfig
    ) -> tuple[GenerationConfig, int | None, bool]:
        """Everything as a transformers GenerationConfig, with the seed and whether end tokens are ignored."""
        if isinstance(params, SamplingParams):
            sampling = {
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p or None,
            }
            config = GenerationConfig(
                max_new_tokens=params.max_new_tokens,
                do_sample=params.temperature > 0,
                repetition_penalty=params.repetition_penalty,
                stop_strings=list(params.stop) or None,
                eos_token_id=self.target.model.generation_config.eos_token_id,
                pad_token_id=self.target.model.generation_config.pad_token_id,
                **(sampling if params.temperature > 0 else {}),
            )
            return config, params.seed, params.ignore_eos
        config, unused = self.target.model._prepare_generation_config(params)
        if unused:
            raise ValueError(f"these are not generation settings: {sorted(unused)}")
        check_supported(config)
        if config.max_new_tokens is None and params.max_length is None:
            config.max_new_tokens = SamplingParams().max_new_tokens
        return config, None, False


def bundled_layer(*chosen: Method | None) -> Path | None:
    """The folder of the trained layer that comes with the embedded pair for the first of the methods that needs one."""
    return next((FOLDER / each.layer for each in chosen if each is not None and each.layer is not None), None)


def check_supported(config: GenerationConfig, copies: bool = False) -> None:
    """Raises ValueError for what the loop cannot do; with `copies`, several sequences a prompt are fine."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value!r} is not supported; greedy search and sampling are")
    for name, allowed in (
        ("num_return_sequences", (None, 1)),
        ("guidance_scale", (None, 1)),
        ("watermarking_config", (None,)),
        ("forced_eos_token_id", (None,)),
        ("encoder_repetition_penalty", (None, 1)),
        ("encoder_no_repeat_ngram_size", (None, 0)),
    ):
        if copies and name == "num_return_sequences":
            continue
        if getattr(config, name, None) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)} is not supported")


def _is_seeded(params: SamplingParams | GenerationConfig) -> bool:
    # A GenerationConfig has no seed of its own: as in transformers, torch's says what is drawn.
    return isinstance(params, GenerationConfig) or params.seed is not None


def _params(
    params: SamplingParams | GenerationConfig | None, options: dict[str, Any]
) -> SamplingParams | GenerationConfig:
    if params is None:
        params = SamplingParams()
    if isinstance(params, GenerationConfig):
        if options:
            raise ValueError(f"options {sorted(options)} cannot be given beside a GenerationConfig; set them in it")
        return params
    unknown = sorted(set(options) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; there are {', '.join(SamplingParams.__dataclass_fields__)}")
    return replace(params, **options)


def load(
    target: str | Path | PreTrainedModel = EMBEDDED,
    *,
    draft: str | Path | PreTrainedModel | None = None,
    method: str | Method | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
    fast: bool = True,
    graphs: bool = False,
    guard: bool | None = None,
    pre_verifier: str | Path | PreVerifier | None = None,
    phrases: str | Path | None = None,
    head: str | Path | HiddenDrafter | None = None,
    **options: Any,
) -> Decoder:
    """Loads a target, and a draft if there is one, for decoding by `method`.

    Args:
        target: hub id, folder or model; "embedded" is the pair that comes with the package.
        draft: likewise; with the embedded target its own draft is the default.
        method: a name from `forerun.methods.METHODS` or its dataclass. Default, where no settings are given either:
            what `forerun tune` chose for these models on this device, with this dtype and number of threads, for greedy
            decoding and for sampling. Else "pacer-ouroboros" with a draft and its pre-verifier, "sd" with a draft, and
            "lookup" without. Models that are given as objects, `device_map` and fast=False have no such profiles.
        tokenizer: the target's own by default; needed for text.
        dtype: as in transformers. Default: float32 on a CPU, what the checkpoint has elsewhere.
        device: default: cuda if there is one.
        device_map: instead of device, as in transformers, for target and draft; needs the package accelerate.
        trust_remote_code: passed on to transformers.
        graphs: record forwards of a few tokens as CUDA graphs, for plain Llamas on a GPU; takes memory and some seconds
            at first. Raises ValueError elsewhere.
        fast: False runs transformers' own forwards, without packed weights or lean copies (see forerun/runtime).
        pre_verifier: the trained layer of "pacer" or "specdec++", a folder or the layer; those of the embedded pair are
            there. Raises ValueError where it belongs to other models.
        head: what "lyanna" and others like it draft with, a folder or the head; the embedded target's is there. Raises
            ValueError where it belongs to another model.
        phrases: a file of phrases for methods that draft by them, see `Decoder.read_phrases`.
        guard: leave drafts out while they do not pay (see forerun/drafters/guard.py). Which steps those are depends on
            the time they take, and with sampling so does what is drawn. Default: for greedy decoding, and for sampling
            with SamplingParams that have no seed. True: always; False: never.
        **options: the method's settings, such as gamma=6.

    Raises:
        ValueError: an unknown method or setting, a model that cannot be loaded or decoded, a draft with another
            tokenizer or vocabulary. Tokenizers are compared before weights are loaded. A draft folder without one is
            taken at its word; embeddings of different sizes must then, as ever, differ by padding alone. A profile
            that is damaged.
    """
    if draft is None and isinstance(target, str) and target == EMBEDDED:
        draft = EMBEDDED
    layered = pre_verifier is not None or target == draft == EMBEDDED
    chosen = methods.method(method or methods.default_method(draft is not None, layered, options), **options)
    if chosen.needs_draft and draft is None:
        raise ValueError(_NO_DRAFT.format(chosen.name))
    unnamed = method is None and not options
    costs, drawing = None, None
    named = [isinstance(source, str | Path) for source in (target, draft) if source is not None]
    if all(named) and fast and device_map is None and (unnamed or chosen.needs_costs):
        profile = profiles.find(target, draft, device, dtype)  # type: ignore[arg-type]
        costs = profile.costs if profile is not None else None
        if profile is not None and unnamed:
            drawing = profile.sampling.build() if profile.sampling else chosen
            chosen = profile.greedy.build() if profile.greedy else chosen
            tried = [each for each in (profile.greedy, profile.sampling) if each is not None]
            pre_verifier = pre_verifier or next((each.pre_verifier for each in tried if each.pre_verifier), None)
            head = head or next((each.head for each in tried if each.head), None)
        if costs is None and target == draft == EMBEDDED:
            costs = profiles.embedded_costs()
    if pre_verifier is None and target == draft == EMBEDDED:
        pre_verifier = bundled_layer(chosen, drawing)
    if head is None:
        head = bundled_head(target, chosen.head or (drawing.head if drawing is not None else None))
    drafting = chosen.needs_draft or (drawing is not None and drawing.needs_draft)
    if tokenizer is None and isinstance(target, str | Path):
        tokenizer = target
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    if tokenizer is not None and drafting and isinstance(draft, str | Path):
        check_draft_tokenizer(tokenizer, draft, trust_remote_code=trust_remote_code)
    how: dict[str, Any] = {"dtype": dtype, "device": device, "device_map": device_map}
    how["trust_remote_code"] = trust_remote_code

    def ready(source: str | Path | PreTrainedModel, part: str) -> CausalLM:
        model = load_model(source, part, **how)
        # A model that nobody else holds need not survive the packing of its weights.
        return prepare(model, fast, isinstance(source, str | Path), graphs)

    decoder = Decoder(
        ready(target, "target"),
        tokenizer,
        ready(draft, "draft") if draft is not None and drafting else None,
        chosen,
        guard,
        drawing,
        pre_verifier,
        head,
    )
    decoder.costs = costs
    if phrases is not None:
        decoder.read_phrases(phrases)
    return decoder
