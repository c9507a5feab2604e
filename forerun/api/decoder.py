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

from forerun.api.build import build_engine, corrected, measured
from forerun.api.choose import resolve
from forerun.api.completion import Call, Chunk
from forerun.api.layers import layers_for
from forerun.api.loading import check_vocabularies
from forerun.api.options import EngineOptions
from forerun.api.requests import Prompt, encode, merged, requests
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
from forerun.planning.corrected_costs import CorrectedCosts
from forerun.planning.cost_model import Costs
from forerun.planning.guard import Guard
from forerun.sampling.params import SamplingParams
from forerun.sampling.thoughts import AnswerMarks
from forerun.text.chat import chat_prompt, turn_ends
from forerun.text.stop_strings import TextStream
from forerun.text.tools import (
    NO_TOOLS,
    Tools,
    answer_form,
    checked_choice,
    checked_tools,
    tools_for,
)
from forerun.text.vocabularies import Translation
from forerun.zoo import ModelSource

Pools = dict[tuple[int, int], Pool]


@dataclass
class _State:
    """What a decoder makes when it is first needed.

    Attributes:
        costs: what forwards cost, measured when a method first needs it.
        corrected: the same, as steps correct it; None without a guard, because it reads a clock.
        session: the session in use, or None.
        lock: held while either is made.
    """

    costs: Costs | None
    corrected: CorrectedCosts | None = None
    session: Session | None = None
    lock: Lock = field(default_factory=Lock)


@dataclass(frozen=True, eq=False, init=False)
class Decoder:
    """A target, perhaps a draft, and a method. It does not change: `replace` returns another one.

    All calls, from one thread or from many, share one engine. Their sequences are decoded in one
    batch, and each gets the output that it would get alone. An exception in a call's processor or
    criterion ends that call only.
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

    def __init__(  # noqa: PLR0913 - users give these by name, and each is documented here
        self,
        target: PreTrainedModel | CausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft: PreTrainedModel | CausalLM | None = None,
        method: Method | None = None,
        guard: bool | None = None,
        sampling_method: Method | None = None,
        pre_verifier: str | Path | PreVerifier | ModelSource | None = None,
        head: str | Path | HiddenDrafter | HiddenLM | ModelSource | None = None,
        *,
        costs: Costs | None = None,
        translation: Translation | None = None,
        **options: Any,
    ) -> None:
        """Prepare models for decoding.

        Each model gets the fastest forward that forerun has for it (`forerun.backends.prepare`).
        That forward keeps copies of the weights, so make a new Decoder when weights, modules or
        hooks have changed. Adapters that were there from the start may be switched and merged
        between calls, because keys and values of ended calls are not reused if a model has layers
        of packages other than torch and transformers. A CausalLM and a HiddenLM are used as they
        are; `CausalLM(model)` runs transformers' own forward.

        Args:
            target: the model whose output is decoded.
            tokenizer: the target's; needed for text.
            draft: a smaller model that proposes tokens.
            method: default: see `forerun.api.choose.resolve`.
            guard: see `forerun.EngineOptions`.
            sampling_method: the method for tokens that are sampled, instead of `method`.
            pre_verifier: the trained layer of "pacer", a folder or the layer.
            head: what "lyanna" and methods like it draft with, a folder or the head.
            costs: what forwards cost. If it is not given, it is measured when a method first needs
                it.
            translation: how a draft with another tokenizer drafts
                (`forerun.api.loading.translation_for`).
            **options: fields of `forerun.EngineOptions`.

        Raises:
            ValueError: models that cannot run drafts, pairs that do not fit together, and a
                `prompt_cache` that others may write to.
        """
        target_lm = target if isinstance(target, CausalLM) else prepare(target)
        draft_lm = prepare_draft(draft, None, None) if isinstance(draft, PreTrainedModel) else draft
        if draft_lm is not None and draft_lm.device != target_lm.device:
            raise ValueError(
                f"the draft is on {draft_lm.device} and the target on {target_lm.device}; "
                "put both on one device"
            )
        layer_source = _source(pre_verifier, "pre-verifier")
        head_source = _source(head, "head")
        parts: dict[str, Any] = {"pre_verifier": layer_source, "head": head_source}
        chosen = resolve(None, draft_lm, method, **parts).method
        methods = [chosen]
        if sampling_method is not None:
            methods.append(resolve(None, draft_lm, sampling_method, **parts).method)
        if translation is not None:
            _check_tokenizers(methods)
        layer, hidden = layers_for(methods, target_lm, draft_lm, layer_source, head_source)
        if draft_lm is not None and translation is None:
            check_vocabularies(target_lm.vocab_size, draft_lm.vocab_size, tokenizer)
        engine_options = EngineOptions(guard=guard, **options)
        if engine_options.prompt_cache is not None:
            # It is refused now, and not with the first request.
            private_folder(Path(engine_options.prompt_cache).expanduser())
        vars(self).update(  # because the dataclass is frozen
            target=target_lm,
            tokenizer=tokenizer,
            draft=draft_lm,
            method=chosen,
            sampling_method=methods[1] if sampling_method is not None else None,
            pre_verifier=layer,
            head=hidden,
            options=engine_options,
            translation=translation,
            pools={} if engine_options.share_outputs else None,
            _trackers={},
            _state=_State(costs),
            _is_adapted=has_foreign_layers(target_lm.model),
        )

    def __repr__(self) -> str:
        shown = []
        for part, model in (("target", self.target), ("draft", self.draft)):
            if model is not None:
                name = model.model.config.name_or_path or type(model.model).__name__
                short_name = "/".join(Path(name).parts[-2:])
                shown.append(f"{part} {short_name} in {facts_of(model)['weights']}")
        sampling = ""
        if self.sampling_method is not None:
            sampling = f" ({self.sampling_method.name} if sampled)"
        return f"Decoder({', '.join(shown)}, method {self.method.name}{sampling})"

    def replace(self, **changes: Any) -> Decoder:
        """Return a decoder of the same models with other arguments of the constructor.

        It continues with this decoder's phrases and outputs, measured costs and speeds. If the
        method changes, it is the method for sampling too unless `sampling_method` is given.
        """
        names = ["target", "tokenizer", "draft", "method", "sampling_method", "pre_verifier"]
        names += ["head", "translation", "costs"]
        arguments = {name: getattr(self, name) for name in names} | vars(self.options)
        if "method" in changes:
            arguments["sampling_method"] = None
        if "head" in changes and changes["head"] is not self.head and self.costs is not None:
            arguments["costs"] = replace(self.costs, head={})
        decoder = Decoder(**arguments | changes)
        if decoder.options.share_outputs and self.pools is not None:
            vars(decoder)["pools"] = self.pools
        vars(decoder)["_trackers"] = self._trackers
        return decoder

    # Decoding.

    def generate(self, prompts: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """Generate to the end. Return a Completion for one prompt, a list of them for several.

        Args:
            prompts: text or token ids, one prompt or many. Rows of a batch end independently.
            params: how to generate; greedy by default.
            logits_processor: a LogitsProcessorList, called after the processors of `params`. It is
                called for drafted tokens too, so it must depend on nothing but its arguments.
            stopping_criteria: a StoppingCriteriaList, called after every token for each row
                separately, with the processed scores [1, V] that gave the token.
            progress: called while the target reads a prompt, with the number of tokens read so far
                and the number of all its tokens.
            **options: fields of SamplingParams, given singly.

        Raises:
            ValueError: empty prompts, prompts that fill the context, settings that are unknown or
                out of range.
            Exception: what a processor or criterion raises.
        """
        return self._call(prompts, params, **options).complete(self.session)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Generate as `generate` does, and yield chunks as they come.

        There is one chunk for each prompt and target forward. The arguments are checked at once.
        Dropping the stream, or an exception in it, ends its sequences.
        """
        return self._call(prompts, params, **options).stream(self.session)

    def chat(self, messages: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """Answer a conversation. Return a Completion, or a list of them for several conversations.

        An answer ends at the model's end tokens, and at the one that the chat template writes after
        an answer.

        Args:
            messages: a list of {"role", "content"}, or a list of such lists; see
                `forerun.text.chat.checked`.
            params: as in `generate`.
            system: a system prompt, for conversations that do not begin with one.
            template_args: more names for the chat template, such as {"enable_thinking": False}.
            tools: functions that the model may call, in OpenAI's form (`forerun.text.tools`).
            tool_choice: which of them it must call, in OpenAI's form.
            **options: other options of `generate`.

        Raises:
            ValueError: what `forerun.text.chat.chat_prompt`, `forerun.text.tools.tools_for` and
                `generate` refuse.
        """
        return self._chat(messages, params, **options).complete(self.session)

    def stream_chat(
        self, messages: Any, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """Answer as `chat` does, and yield chunks as `stream` does.

        The arguments are checked at once.
        """
        return self._chat(messages, params, **options).stream(self.session)

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Request:
        """Return a request for `session` or its engine, from the arguments of `generate`."""
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
        """Return the requests of a call, for an answer that also ends at `ends`."""
        started_at = perf_counter()
        tokenizer = self.tokenizer
        single, rows = encode(prompts, tokenizer, self.target.context, self.target.vocab_size)
        params = merged(params, options)
        if tools.grammar is not None:
            params = replace(params, response_format=tools.grammar)
        asked = requests(
            rows,
            params,
            self.target,
            tokenizer,
            logits_processor,
            stopping_criteria,
            AnswerMarks(ends),
        )
        if progress is not None:
            asked = [replace(request, progress=progress) for request in asked]
        texts: list[TextStream | None] = [None for _ in rows]
        if tokenizer is not None:
            texts = [
                TextStream(tokenizer, row, params.stop, tools.shown, params.min_new_tokens)
                for row in rows
            ]
        streams = [tools.stream() for _ in rows]
        readers = [stream for stream in streams if stream is not None]
        return Call(asked, texts, single, started_at, readers)

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
        """Return the requests of one conversation or of several."""
        checked = checked_tools(tools or [])
        form = options.get("response_format", params.response_format if params else None)
        choice = checked_choice(tool_choice, checked)
        answer = answer_form(form, choice, checked)
        use = tools_for(checked, choice, self.tokenizer, answer=answer)
        first = messages[0] if isinstance(messages, list | tuple) and messages else None
        is_single = not isinstance(first, list | tuple)
        conversations = [messages] if is_single else messages
        rows = [
            chat_prompt(self.tokenizer, conversation, system, use.given, **template_args or {})
            for conversation in conversations
        ]
        call = self._call(rows, params, use, turn_ends(self.tokenizer), **options)
        return replace(call, is_single=is_single)

    # The engine.

    def method_for(self, greedy: bool) -> Method:
        """Return the method for greedy or for sampled output, which may differ."""
        return self.method if greedy or self.sampling_method is None else self.sampling_method

    @property
    def costs(self) -> Costs | None:
        """What forwards cost, if it was given or a method has needed it."""
        return self._state.costs

    def info(self) -> dict[str, Any]:
        """Return the method with its settings, and facts of each model.

        The facts of a model are the format of its weights, with bytes, the kernel that multiplies
        with them, and `exact`: "bitwise" if a token's logits have the same bits whether it is
        verified or decoded alone, "rounding" if they may differ by rounding.
        """
        models = {"target": self.target, "draft": self.draft}
        return {
            "method": self.method.name,
            "settings": asdict(self.method),
            **{part: facts_of(model) for part, model in models.items() if model is not None},
        }

    @property
    def session(self) -> Session:
        """The engine and its callers.

        A new session follows after `close`, and for each call to a model with layers of other
        packages. Calls that are under way keep their session.
        """
        state = self._state
        with state.lock:
            # Adapters are switched without a trace, so what they left in a cache must serve no
            # later call. A draft's adapters do not matter, because keys of another adapter cost
            # accepted tokens but never give a wrong one.
            if state.session is None or (self._is_adapted and state.session.was_used):
                state.session = None  # first, so that its buffers are free
                methods = [each for each in (self.method, self.sampling_method) if each is not None]
                names = ("target", "draft", "pre_verifier", "costs", "pools", "head", "translation")
                parts = Parts(**{name: getattr(self, name) for name in names})
                state.costs = measured(methods, parts)
                if self.options.guard is not False:
                    state.corrected = corrected(state.costs, state.corrected)
                parts = replace(parts, costs=state.costs, corrected=state.corrected)
                state.session = Session(build_engine(methods, parts, self.options, self._trackers))
            return state.session

    @property
    def engine(self) -> Engine:
        """The engine that all calls share, for callers who add requests and take steps themselves.

        Take steps in one thread, and while no call of `generate` or `stream` is under way. Keys and
        values stay in the engine for later requests, so `close` it after switching an adapter, and
        take the new one.
        """
        return self.session.engine

    def close(self) -> None:
        """Drop the engine with its buffers; the next call makes a new one."""
        self._state.session = None


def _source(given: Any, role: str) -> ModelSource | None:
    return None if given is None else ModelSource.parse(given, role)


def _check_tokenizers(methods: list[Method]) -> None:
    """Raise ValueError for a method that cannot draft with another tokenizer than the target's."""
    for method in methods:
        if method.needs_draft and not method.any_tokenizer:
            raise ValueError(f"method {method.name!r} needs a draft with the target's tokenizer")
