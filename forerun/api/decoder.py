"""`Decoder`: a target with a method, for callers who want text and not an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from forerun.api.build import build_engine, measured
from forerun.api.completion import Call, Chunk
from forerun.api.layers import layers_for
from forerun.api.loading import check_vocabularies
from forerun.api.options import EngineOptions
from forerun.api.requests import Prompt, encode, merged, requests
from forerun.api.resolve import resolve
from forerun.backends import has_foreign_layers, prepare
from forerun.backends.facts import facts_of
from forerun.backends.heads import HiddenLM
from forerun.backends.hot import prepare_draft
from forerun.drafters.pools import Pool
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.engine.session import Session
from forerun.files import private_folder
from forerun.heads.heads import HiddenDrafter
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import Method, Parts
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs
from forerun.planning.guard import Guard
from forerun.sampling.params import SamplingParams
from forerun.sampling.response_format import form_of
from forerun.text.chat import chat_prompt, turn_ends
from forerun.text.stop_strings import TextStream
from forerun.text.tools import NO_TOOLS, Tools, checked_choice, checked_tools, tools_for
from forerun.text.vocabularies import Translation

Pools = dict[tuple[int, int], Pool]


@dataclass
class _State:
    """What a decoder makes when it is first needed.

    Attributes:
        costs: measured when a method first needs them.
        session: the one in use.
    """

    costs: Costs | None
    session: Session | None = None
    lock: Lock = field(default_factory=Lock)


@dataclass(frozen=True, eq=False, init=False)
class Decoder:
    """A target, perhaps a draft, and a method. It does not change: `replace` returns another one.

    All calls, from one thread or from many, share one engine: their sequences stand in one batch, and each gets what it
    would get alone. An exception in a call's processor or criterion ends that call only.
    """

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase | None
    draft: CausalLM | None
    method: Method
    sampling_method: Method | None
    pre_verifier: PreVerifier | None
    head: HiddenLM | None
    options: EngineOptions
    translation: Translation | None
    pools: Pools | None  # phrases and outputs of earlier requests
    _trackers: dict[tuple[Method, bool], Guard]
    _state: _State
    _is_adapted: bool

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
        costs: Costs | None = None,
        translation: Translation | None = None,
        **options: Any,
    ) -> None:
        """Models get the fastest forward there is for them (`forerun.backends.prepare`), which keeps copies of weights:
        make a new Decoder when a model has changed, in weights, modules or hooks. Adapters that were there may be
        switched and merged between calls: where layers are of other packages than torch and transformers, keys and
        values of ended calls are not used again. A CausalLM is taken as it is, as is a HiddenLM; `CausalLM(model)` runs
        transformers' own forward.

        Args:
            sampling_method: takes the place of `method` where tokens are sampled.
            costs: of forwards; measured when a method first needs them, if they are not given.
            translation: how a draft with another tokenizer drafts (`forerun.api.loading.translation_for`).
            guard, **options: see `forerun.EngineOptions`.

        Raises:
            ValueError: models that cannot run drafts, and pairs that do not fit together; a `prompt_cache` that is not
                the user's alone to write.
        """
        lm = target if isinstance(target, CausalLM) else prepare(target)
        draft_lm = prepare_draft(draft, None, None) if isinstance(draft, PreTrainedModel) else draft
        if draft_lm is not None and draft_lm.device != lm.device:
            raise ValueError(
                f"the draft is on {draft_lm.device} and the target on {lm.device}; put them on one"
            )
        parts: dict[str, Any] = {"pre_verifier": pre_verifier, "head": head}
        chosen = resolve(None, draft_lm, method, **parts).method
        sampling = (
            resolve(None, draft_lm, sampling_method, **parts).method
            if sampling_method is not None
            else None
        )
        both = [each for each in (chosen, sampling) if each is not None]
        for each in both:
            if each.needs_draft and translation is not None and not each.any_tokenizer:
                raise ValueError(f"method {each.name!r} needs a draft with the target's tokenizer")
        layer, hidden = layers_for(both, lm, draft_lm, pre_verifier, head)
        if draft_lm is not None and translation is None:
            check_vocabularies(lm.vocab_size, draft_lm.vocab_size, tokenizer)
        engine = EngineOptions(guard=guard, **options)
        if engine.prompt_cache is not None:
            private_folder(
                Path(engine.prompt_cache).expanduser()
            )  # refused now, and not with the first request
        vars(self).update(  # frozen from here on
            target=lm,
            tokenizer=tokenizer,
            draft=draft_lm,
            method=chosen,
            sampling_method=sampling,
            pre_verifier=layer,
            head=hidden,
            options=engine,
            translation=translation,
            pools={} if engine.share_outputs else None,
            _trackers={},
            _state=_State(costs),
            _is_adapted=has_foreign_layers(lm.model),
        )

    def __repr__(self) -> str:
        shown = []
        for part, model in (("target", self.target), ("draft", self.draft)):
            if model is not None:
                name = model.model.config.name_or_path or type(model.model).__name__
                shown.append(
                    f"{part} {'/'.join(Path(name).parts[-2:])} in {facts_of(model)['weights']}"
                )
        sampling = (
            f" ({self.sampling_method.name} if sampled)" if self.sampling_method is not None else ""
        )
        return f"Decoder({', '.join(shown)}, method {self.method.name}{sampling})"

    def replace(self, **changes: Any) -> Decoder:
        """Return a decoder of the same models with other arguments of the constructor.

        It goes on with this one's phrases and outputs, and with its measured costs and speeds. Where the method
        changes, it is that of sampling as well unless `sampling_method` is given.
        """
        names = (
            "target",
            "tokenizer",
            "draft",
            "method",
            "sampling_method",
            "pre_verifier",
            "head",
            "translation",
        )
        given = (
            {name: getattr(self, name) for name in names}
            | vars(self.options)
            | {"costs": self.costs}
        )
        if "method" in changes:
            given["sampling_method"] = None
        if "head" in changes and changes["head"] is not self.head and self.costs is not None:
            given["costs"] = replace(self.costs, head={})
        made = Decoder(**given | changes)
        if made.options.share_outputs and self.pools is not None:
            vars(made)["pools"] = self.pools
        vars(made)["_trackers"] = self._trackers
        return made

    # Decoding.

    def generate(self, prompts: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """Generate to the end; a Completion for one prompt, a list of them for several.

        Args:
            prompts: text or token ids, one or many. Rows of a batch finish on their own.
            params: greedy by default.
            logits_processor: a LogitsProcessorList, called after the processors of `params`. They are called for
                drafted tokens too, so they must depend on nothing but their arguments.
            stopping_criteria: a StoppingCriteriaList, asked after every token of each row by itself, with the processed
                scores [1, V] that gave the token.
            progress: called while the target reads a prompt, with the tokens read and how many there are.
            **options: fields of SamplingParams, given singly.

        Raises:
            ValueError: empty prompts, prompts that fill the context, settings that are unknown or out of range.
            Exception: what a processor or criterion raises.
        """
        return self._call(prompts, params, **options).complete(self.session)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, as chunks: one a target forward and prompt, as they come. Checks its arguments at once.

        Letting go of the stream, or an exception in it, ends its sequences.
        """
        return self._call(prompts, params, **options).stream(self.session)

    def chat(self, messages: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """Return the answer to a conversation, a Completion; for a list of conversations a list of them.

        It ends at the model's end tokens and at the one that the chat template writes after an answer.

        Args:
            messages: a list of {"role", "content"}, or a list of such lists; see `forerun.text.chat.checked`.
            system: a system prompt, for conversations that do not begin with one.
            template_args: more names for the chat template, such as {"enable_thinking": False}.
            tools, tool_choice: functions that the model may call, as OpenAI has them: see `forerun.text.tools`.
            params, **options: as `generate` takes them, beside these.

        Raises:
            ValueError: what `forerun.text.chat.chat_prompt`, `forerun.text.tools.tools_for` and `generate` refuse.
        """
        return self._chat(messages, params, **options).complete(self.session)

    def stream_chat(
        self, messages: Any, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """Like `chat`, as chunks, as `stream` gives them. Checks its arguments at once."""
        return self._chat(messages, params, **options).stream(self.session)

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Request:
        """Return a request for `session` or its engine, from what `generate` takes."""
        return self._call(prompt, params, **options).requests[0]

    def _call(
        self,
        prompts: Any,
        params: SamplingParams | None,
        tools: Tools = NO_TOOLS,
        ends: frozenset[int] = frozenset(),
        /,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Call:
        begun = perf_counter()
        single, rows = encode(prompts, self.tokenizer, self.target.context, self.target.vocab_size)
        params, tokenizer = merged(params, options), self.tokenizer
        if tools.form is not None and form_of(params.response_format) is not None:
            raise ValueError(
                "response_format cannot be given beside tools, unless tool_choice is none"
            )
        if tools.grammar is not None:
            params = replace(params, response_format=tools.grammar)
        asked = requests(rows, params, self.target, tokenizer, logits_processor, stopping_criteria)
        if not params.ignore_eos:
            asked = [replace(each, eos=each.eos | ends) for each in asked]
        if progress is not None:
            asked = [replace(each, progress=progress) for each in asked]
        texts = [
            TextStream(tokenizer, row, params.stop, tools.shown) if tokenizer is not None else None
            for row in rows
        ]
        return Call(asked, texts, single, begun, [each for _ in rows if (each := tools.stream())])

    def _chat(
        self,
        messages: Any,
        params: SamplingParams | None,
        system: str | None = None,
        template_args: dict[str, Any] | None = None,
        tools: Any = None,
        tool_choice: Any = None,
        **options: Any,
    ) -> Call:
        checked = checked_tools(tools or [])
        use = tools_for(checked, checked_choice(tool_choice, checked), True, self.tokenizer)
        single = not (
            isinstance(messages, list | tuple)
            and messages
            and isinstance(messages[0], list | tuple)
        )
        many = [messages] if single else messages
        rows = [
            chat_prompt(self.tokenizer, each, system, use.given, **template_args or {})
            for each in many
        ]
        return replace(
            self._call(rows, params, use, turn_ends(self.tokenizer), **options), is_single=single
        )

    # The engine.

    def method_for(self, greedy: bool) -> Method:
        """Return what decodes: greedy and sampled output may have methods of their own."""
        return self.method if greedy or self.sampling_method is None else self.sampling_method

    @property
    def costs(self) -> Costs | None:
        """What forwards cost, if a method has needed it or it was given."""
        return self._state.costs

    def info(self) -> dict[str, Any]:
        """Return the method with its settings, and of each model what its weights are stored as, with bytes, the kernel
        that multiplies with them, and `exact`: "bitwise" where a token's logits have the same bits whether it is
        verified or decoded alone, "rounding" where they may differ by rounding."""
        models = {"target": self.target, "draft": self.draft}
        return {
            "method": self.method.name,
            "settings": asdict(self.method),
            **{part: facts_of(model) for part, model in models.items() if model is not None},
        }

    @property
    def session(self) -> Session:
        """The engine and its callers; another one after `close`, and for each call to a model with layers of other
        packages. Calls that are under way go on with theirs."""
        state = self._state
        with state.lock:
            # Adapters are switched without a trace, so what they left in a cache serves no later call. A draft's are
            # not asked about: keys of another adapter cost accepted tokens, never a wrong one.
            if state.session is None or (self._is_adapted and state.session.was_used):
                state.session = None  # first, so that its buffers are free
                methods = [each for each in (self.method, self.sampling_method) if each is not None]
                names = ("target", "draft", "pre_verifier", "costs", "pools", "head", "translation")
                parts = Parts(**{name: getattr(self, name) for name in names})
                state.costs = measured(methods, parts)
                parts = replace(parts, costs=state.costs)
                state.session = Session(build_engine(methods, parts, self.options, self._trackers))
            return state.session

    @property
    def engine(self) -> Engine:
        """The engine that all calls share, for callers who add requests and take steps themselves: in one thread, and
        with no call of `generate` or `stream` under way. Keys and values stay in it for later requests: take another
        one, after `close`, when an adapter was switched."""
        return self.session.engine

    def close(self) -> None:
        """Let go of the engine with its buffers; the next call makes a new one."""
        self._state.session = None
