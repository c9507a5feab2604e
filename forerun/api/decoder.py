"""`Decoder`: a target with a method, for callers who want text and not an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import is_
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, overload

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from forerun.api.loading import Prompt, check_vocabularies, encode, load_head, load_pre_verifier
from forerun.api.requests import merged, requests, stop_strings
from forerun.api.resolve import resolve
from forerun.backends import has_foreign_layers, prepare
from forerun.backends.costs import head_costs, measure_costs
from forerun.backends.facts import facts_of
from forerun.backends.heads import HiddenLM
from forerun.backends.hot import prepare_draft
from forerun.engine.costs import Costs
from forerun.engine.engine import Drafter, Engine, Step
from forerun.engine.sequence import Request
from forerun.engine.session import Run, Session
from forerun.engine.stats import Stats, summarise
from forerun.heads.heads import HiddenDrafter
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import AR, Method, Parts
from forerun.methods.guard import Guarded, SpeedTracker
from forerun.methods.pools import PhrasePool, SuffixMemory
from forerun.methods.split import Split
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt, turn_ends
from forerun.text.stop_strings import TextStream
from forerun.text.vocabularies import Translation


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
    """A target, perhaps a draft, and a method.

    All calls, from one thread or from many, share one engine: their sequences stand in one batch, and each gets what it
    would get alone. An exception in a call's processor or criterion ends that call only.

    Attributes:
        progress: called while the target reads a prompt, with the tokens read and how many there are; None for nobody.
    """

    progress: Callable[[int, int], None] | None = None

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
        *,
        max_rows: int = 64,
        max_queue: int | None = None,
        kv_memory: int | None = None,
        prefix_bytes: int = 2**28,
        share_outputs: bool = True,
        costs: Costs | None = None,
        translation: Translation | None = None,
    ) -> None:
        """Models get the fastest forward there is for them (`forerun.backends.prepare`), which keeps copies of weights:
        make a new Decoder when a model has changed, in weights, modules or hooks. Adapters that were there may be
        switched and merged between calls: where layers are of other packages than torch and transformers, keys and
        values of ended calls are not used again. A CausalLM is taken as it is, as is a HiddenLM; `CausalLM(model)` runs
        transformers' own forward.

        Args:
            sampling_method: takes the place of `method` where tokens are sampled.
            guard, max_rows, max_queue, kv_memory, prefix_bytes, share_outputs: see `forerun.EngineOptions`.
            costs: of forwards; measured when a method first needs them, if they are not given.
            translation: how a draft with another tokenizer drafts (`forerun.api.loading.translation_for`).

        Raises:
            ValueError: models that cannot run drafts, and pairs that do not fit together.
        """
        self.target = target if isinstance(target, CausalLM) else prepare(target)
        self.draft = prepare_draft(draft, None, None) if isinstance(draft, PreTrainedModel) else draft
        if self.draft is not None and self.draft.device != self.target.device:
            raise ValueError(
                f"the draft is on {self.draft.device} and the target on {self.target.device}; put them on one"
            )
        self.tokenizer, self.guard, self.translation = tokenizer, guard, translation
        self.max_rows, self.max_queue, self.kv_memory, self.prefix_bytes = max_rows, max_queue, kv_memory, prefix_bytes
        self._paces: dict[
            tuple[Method, bool], SpeedTracker
        ] = {}  # sampling costs and accepts otherwise than greedy decoding
        self.pools: dict[tuple[int, int], PhrasePool | SuffixMemory] | None = {} if share_outputs else None
        given: dict[str, Any] = {"pre_verifier": pre_verifier, "head": head}
        self.method = resolve(None, draft, method, **given).method
        self.sampling_method = resolve(None, draft, sampling_method, **given).method if sampling_method else None
        self.costs = costs  # measured when a method first asks for them
        self._made: tuple[Session, list[Any], list[Any]] | None = None  # the driver in use, and what it was made of
        self._making = Lock()
        for each in (self.method, self.sampling_method):
            if each is not None:
                self.check_draft(each)
        if self.draft is not None and translation is None:
            check_vocabularies(self.target.vocab_size, self.draft.vocab_size, tokenizer)
        self.pre_verifier: PreVerifier | None = None
        for each in (self.method, self.sampling_method):
            if each is not None and each.layer is not None:
                self.pre_verifier = self.layer_for(each, self.pre_verifier or pre_verifier)
        self.head: HiddenLM | None = None
        for each in (self.method, self.sampling_method):
            if each is not None and each.head is not None:
                self.head = self.head_for(each, head)

    def check_draft(self, method: Method) -> None:
        """Raises ValueError where a method cannot do with the draft that is there."""
        if method.needs_draft and self.draft is None:
            raise ValueError(f"method {method.name!r} needs a draft model: give a draft")
        if method.needs_draft and self.translation is not None and not method.any_tokenizer:
            raise ValueError(f"method {method.name!r} needs a draft with the target's tokenizer")

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
        """Begins with the phrases of a file that `save_phrases` wrote, or the earlier outputs; they are for greedy
        decoding, outputs for sampling as well.

        Raises ValueError for a file that is none, is damaged or belongs to another vocabulary, and where the method has
        no use for phrases of that form.
        """
        wanted, pools = self._phrases()
        pool = (PhrasePool if wanted[0] else SuffixMemory).load(path, self.target.vocab_size)
        if pool.shape != wanted:
            found = f"the phrases in {path} have {pool.shape[0]} tokens, {pool.shape[1]} for each token at most"
            set_to, see = str(wanted), "ngram and guesses"
            if isinstance(pool, SuffixMemory):
                found, set_to, see = f"the outputs in {path} have {pool.most} tokens at most", str(wanted[1]), "memory"
            raise ValueError(f"{found}; method {self.method.name!r} is set to {set_to}: see {see}")
        pools[wanted] = pool
        self.close()  # an engine that is there goes on with what it has

    def save_phrases(self, path: str | Path) -> None:
        """Writes what the method has gathered, for `read_phrases`: whole or not at all."""
        shape, pools = self._phrases()
        empty = PhrasePool(*shape) if shape[0] else SuffixMemory(shape[1])
        pools.get(shape, empty).save(path, self.target.vocab_size)

    def _phrases(self) -> tuple[tuple[int, int], dict[tuple[int, int], PhrasePool | SuffixMemory]]:
        shape, pools = self.method.phrases, self.pools
        if shape is None or pools is None or not self.method.warm:
            raise ValueError(f"method {self.method.name!r} does not keep phrases between calls: see warm")
        return shape, pools

    def method_for(self, greedy: bool) -> Method:
        """What decodes: greedy and sampled output may have methods of their own."""
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
            prompts: text or token ids, one or many. Rows of a batch finish on their own.
            params: SamplingParams (greedy by default) or a transformers GenerationConfig.
            logits_processor: more of transformers' processors, behind those of `params`. They are called for drafted
                tokens too, so they must depend on nothing but their arguments.
            stopping_criteria: more of transformers' criteria, asked behind every token of each row by itself, with the
                processed scores [1, V] that gave the token.
            **options: fields of SamplingParams, given singly.

        Raises:
            ValueError: empty prompts, prompts that fill the context, settings that are unknown or out of range.
            Exception: what a processor or criterion raises.
        """
        begun = perf_counter()
        single, asked, params = self._requests(prompts, params, logits_processor, stopping_criteria, options)
        completions = self._completions(asked, params, begun)
        return completions[0] if single else completions

    def _completions(
        self, asked: list[Request], params: SamplingParams | GenerationConfig, begun: float
    ) -> list[Completion]:
        steps = self.driver().add(asked).collect()
        seconds = perf_counter() - begun
        completions = []
        for request, taken in zip(asked, steps, strict=True):
            tokens = [token for step in taken for token in step.tokens]
            origins = [origin for step in taken for origin in step.origins]
            text = self._text(request, params)
            if text is not None:
                text.push(tokens, origins, finished=True)
            reason = taken[-1].finish_reason
            assert reason is not None
            completions.append(
                Completion(
                    text=text.text if text is not None else "",
                    tokens=tokens,
                    origins=origins,
                    finish_reason=reason,
                    stats=summarise(taken, seconds),
                    steps=taken,
                )
            )
        return completions

    def _stream(self, asked: list[Request], params: SamplingParams | GenerationConfig) -> Iterator[Chunk]:
        texts = [self._text(request, params) for request in asked]
        return _chunks(self.driver().add(asked), texts)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | GenerationConfig | None = None,
        *,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, as chunks: one a target forward and prompt, as they come. Checks its arguments at once.

        Letting go of the stream, or an exception in it, ends its sequences.
        """
        _, asked, params = self._requests(prompts, params, logits_processor, stopping_criteria, options)
        return self._stream(asked, params)

    def chat(
        self,
        messages: Any,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        system: str | None = None,
        template_args: dict[str, Any] | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **options: Any,
    ) -> Any:
        """The answer to a conversation, a Completion; for a list of conversations a list of them.

        It ends at the model's end tokens and at the one that the chat template writes behind an answer.

        Args:
            messages: a list of {"role", "content"}, or a list of such lists; see `forerun.text.chat.checked`.
            system: a system prompt, for conversations that do not begin with one.
            template_args: more names for the chat template, such as {"enable_thinking": False}.
            params, logits_processor, stopping_criteria, **options: as `generate` takes them.

        Raises:
            ValueError: what `forerun.text.chat.chat_prompt` and `generate` refuse.
        """
        begun = perf_counter()
        more = logits_processor, stopping_criteria, options
        single, asked, params = self._turns(messages, system, template_args, params, *more)
        completions = self._completions(asked, params, begun)
        return completions[0] if single else completions

    def stream_chat(
        self,
        messages: Any,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        system: str | None = None,
        template_args: dict[str, Any] | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Like `chat`, as chunks, as `stream` gives them. Checks its arguments at once."""
        more = logits_processor, stopping_criteria, options
        _, asked, params = self._turns(messages, system, template_args, params, *more)
        return self._stream(asked, params)

    def _turns(
        self, messages: Any, system: str | None, template_args: dict[str, Any] | None, *args: Any
    ) -> tuple[bool, list[Request], SamplingParams | GenerationConfig]:
        """`_requests` of one conversation or of several, ending where a turn does."""
        single = not (isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple))
        many = [messages] if single else messages
        rows = [chat_prompt(self.tokenizer, each, system, **template_args or {}) for each in many]
        _, asked, params = self._requests(rows, *args)
        if not (isinstance(params, SamplingParams) and params.ignore_eos):
            ends = turn_ends(self.tokenizer)
            asked = [replace(each, eos=each.eos | ends) for each in asked]
        return single, asked, params

    def request(
        self, prompt: Prompt, params: SamplingParams | GenerationConfig | None = None, **options: Any
    ) -> Request:
        """A request for `engine`, from what `generate` takes."""
        return self._requests(prompt, params, None, None, options)[1][0]

    def _requests(
        self,
        prompts: Any,
        params: SamplingParams | GenerationConfig | None,
        processors: LogitsProcessorList | None,
        criteria: StoppingCriteriaList | None,
        options: dict[str, Any],
    ) -> tuple[bool, list[Request], SamplingParams | GenerationConfig]:
        single, rows = encode(prompts, self.tokenizer, self.target.context, self.target.vocab_size)
        params = merged(params, options)
        asked = requests(rows, params, self.target, self.tokenizer, processors, criteria)
        if self.progress is not None:
            asked = [replace(each, progress=self.progress) for each in asked]
        return single, asked, params

    def _text(self, request: Request, params: SamplingParams | GenerationConfig) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(self.tokenizer, request.tokens, stop_strings(params))

    def measure(self, method: Method) -> None:
        """Measures the costs that a method reckons with, where they are not known yet."""
        if not method.needs_costs:
            return
        if self.costs is None:
            self.costs = self.target.agreed(measure_costs(self.target, self.draft, layer=self.pre_verifier))
        if method.head is not None and self.head is not None and not self.costs.head:
            self.costs = replace(self.costs, head=self.target.agreed(head_costs(self.head)))

    def info(self) -> dict[str, Any]:
        """The method with its settings, and of each model what its weights are stored as, with bytes, the kernel that
        multiplies with them, and `exact`: "bitwise" where a token's logits have the same bits whether it is verified
        or decoded alone, "rounding" where they may differ by rounding."""
        models = {"target": self.target, "draft": self.draft}
        return {
            "method": self.method.name,
            "settings": asdict(self.method),
            **{part: facts_of(model) for part, model in models.items() if model is not None},
        }

    @property
    def engine(self) -> Engine:
        """The engine that all calls share, for who adds requests and takes steps himself: in one thread, and with no
        call of `generate` or `stream` under way. Keys and values stay in it for later requests: take another one,
        after `close`, when an adapter was switched."""
        return self.driver().engine

    def driver(self) -> Session:
        """The engine and its callers. Another one is made when a setting has changed, and for each call to a model with
        layers of other packages; calls that are under way go on with theirs."""
        tried = [self.method, *([self.sampling_method] if self.sampling_method is not None else [])]
        with self._making:
            for each in tried:
                self.measure(each)
            # Adapters are switched without a trace, so what they left in a cache serves no later call. A draft's are
            # not asked about: keys of another adapter cost accepted tokens, never a wrong one.
            foreign = has_foreign_layers(self.target.model)
            settings = [*tried, self.guard, foreign]
            parts = [self.costs, self.pre_verifier, self.head, self.pools]  # held, so that ids stay theirs
            made = self._made
            same = made is not None and made[1] == settings and all(map(is_, made[2], parts))
            if made is not None and same and not (foreign and made[0].was_used):
                return made[0]
            self.close()
            driver = Session(
                Engine(
                    self.target.fresh(self.prefix_bytes),
                    self._drafter(tried),
                    max_rows=self.max_rows,
                    max_queue=self.max_queue,
                    kv_memory=self.kv_memory,
                )
            )
            self._made = driver, settings, parts
            return driver

    def close(self) -> None:
        """Lets go of the engine with its buffers; the next call makes a new one."""
        self._made = None

    def _drafter(self, tried: list[Method]) -> Drafter:
        """What drafts by these methods: one for all sequences, or one for greedy ones and one for sampled ones."""
        drafters, clock = [], self.target.clock
        for method in tried:
            parts = Parts(
                target=self.target,
                draft=self.draft.fresh(self.prefix_bytes) if self.draft is not None else None,
                pre_verifier=self.pre_verifier,
                costs=self.costs,
                pools=self.pools,
                head=self.head,
                guarded=None if self.guard is False else lambda drafter: Guarded(drafter, SpeedTracker(clock)),
                translation=self.translation,
            )
            drafters.append(method.build(parts))
        drafter = drafters[0] if len(drafters) == 1 else Split(*drafters)
        if self.guard is False or all(isinstance(method, AR) for method in tried):
            return drafter
        paces = [
            self._paces.setdefault((self.method_for(greedy), greedy), SpeedTracker(clock)) for greedy in (True, False)
        ]
        return Guarded(drafter, *paces)


def _chunks(run: Run, texts: list[TextStream | None]) -> Iterator[Chunk]:
    try:
        for batch in run:
            for index, step in batch:
                text = texts[index]
                pieces = text.push(step.tokens, step.origins, step.finish_reason is not None) if text else []
                yield Chunk(index, "".join(piece for piece, _ in pieces), pieces, step, step.finish_reason)
    finally:
        run.close()
