"""The programs that are measured beside our methods: their names, their settings, their needs.

- `hf-ar`, `hf-lookup`, `hf-assisted`: transformers' own `generate` (`benchmarks.peers.hf`);
- `hf-forward/METHOD`: a method of ours on transformers' own forwards;
- `llama-cpp`, `llama-cpp-lookup`, `llama-cpp-draft`: llama.cpp on the same GGUF files
  (`benchmarks.peers.llama`).

This module imports no torch, so that a wrong name is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from forerun.bench.plan import Plan, Runner
from forerun.methods import METHODS, Method, is_method
from forerun.zoo import ModelSource

if TYPE_CHECKING:
    from forerun.bench.measure import Loaded, Run

HF_PLAIN = "hf-ar"
HF_LOOKUP = "hf-lookup"
ASSISTED = "hf-assisted"
FORWARD = "hf-forward"
LLAMA = "llama-cpp"
LLAMA_LOOKUP = "llama-cpp-lookup"
LLAMA_DRAFT = "llama-cpp-draft"
NAMES = (HF_PLAIN, HF_LOOKUP, ASSISTED, f"{FORWARD}/METHOD", LLAMA, LLAMA_LOOKUP, LLAMA_DRAFT)
SCHEDULES = ("heuristic", "heuristic_transient", "constant")
LOOKUP_TOKENS = 10  # of hf-lookup: the number in transformers' documentation
LLAMA_TOKENS = 3  # of llama-cpp-lookup and llama-cpp-draft
LLAMA_NGRAM = 3  # of llama-cpp-lookup
LLAMA_CONFIDENCE = 0.6  # of llama-cpp-draft: the default of node-llama-cpp


def expanded(names: Iterable[str]) -> list[str]:
    """Return the names of --methods; a bare `hf-assisted` stands for all three schedules."""
    methods: list[str] = []
    for name in names:
        if name == ASSISTED:
            methods += [f"{ASSISTED}/{schedule}" for schedule in SCHEDULES]
        else:
            methods.append(name)
    return methods


class Peers:
    """Makes the runners of one command, by their names.

    Runners of one kind share their models, which are loaded when the first of them is made.
    """

    def __init__(self) -> None:
        self.forward: dict[str, Method | Runner] = {}  # our methods on transformers' forwards
        self.loaded: dict[str, Any] = {}

    def __call__(self, name: str, ours: Callable[[str], Method]) -> Runner:
        """Return the runner of that name.

        Args:
            name: as in `NAMES`, perhaps with settings behind slashes.
            ours: returns a method of ours by its name.

        Raises:
            ValueError: no runner has that name, or it takes no such settings.
        """
        if is_llama(name):
            return Runner(
                lambda loaded: self._llama(loaded).run(name),
                peer_settings(name),
                needs_draft="draft" in llama_mode(name),
                knows=True,
            )
        if is_transformers(name):
            return Runner(
                lambda loaded: self._hf(loaded).run(name),
                peer_settings(name),
                needs_draft=name.startswith(ASSISTED),
                one_by_one=not takes_rows(name),
            )
        method_name = name.removeprefix(f"{FORWARD}/")
        if method_name == name or not is_method(method_name):
            raise ValueError(f"unknown method {name!r}; there are {', '.join((*METHODS, *NAMES))}")
        method = ours(method_name)
        self.forward[name] = method
        return Runner(
            lambda loaded: self._forward(loaded, name),
            asdict(method),
            needs_draft=method.needs_draft,
            any_tokenizer=method.any_tokenizer,
        )

    def _hf(self, loaded: Loaded) -> Any:
        from benchmarks.peers.hf import load_peers

        if "hf" not in self.loaded:
            assisted = any(name.startswith(ASSISTED) for name in loaded.plan.methods)
            self.loaded["hf"] = load_peers(loaded.plan, assisted)
        return self.loaded["hf"]

    def _llama(self, loaded: Loaded) -> Any:
        from benchmarks.peers.llama import load_llama

        if "llama" not in self.loaded:
            self.loaded["llama"] = load_llama(loaded)
        return self.loaded["llama"]

    def _forward(self, loaded: Loaded, name: str) -> Run:
        from benchmarks.peers.hf import load_on_their_forward
        from forerun.bench.measure import decoder_run

        if "forward" not in self.loaded:
            plan = replace(loaded.plan, methods=self.forward)
            self.loaded["forward"] = load_on_their_forward(plan, loaded.tokenizer)
        return decoder_run(self.loaded["forward"][name], loaded.plan.params())


def is_transformers(name: str) -> bool:
    """Return whether transformers' own `generate` decodes."""
    return name == HF_PLAIN or name.partition("/")[0] in (HF_LOOKUP, ASSISTED)


def is_llama(name: str) -> bool:
    """Return whether llama.cpp decodes."""
    return name.partition("/")[0] in (LLAMA, LLAMA_LOOKUP, LLAMA_DRAFT)


def takes_rows(name: str) -> bool:
    """Return whether a method of transformers decodes a batch at once; some refuse batches."""
    return not name.startswith((HF_LOOKUP, ASSISTED))


def peer_settings(name: str) -> dict[str, Any]:
    """Return the settings in a peer's name, as the peer's program calls them.

    - `llama-cpp-lookup/TOKENS/NGRAM` and `hf-lookup/TOKENS/NGRAM` draft TOKENS tokens after the
      longest phrase of up to NGRAM tokens that occurred before.
    - `llama-cpp-draft/TOKENS/CONFIDENCE` drafts up to TOKENS tokens with the draft model, until its
      probability of a token is below CONFIDENCE.
    - `hf-assisted/SCHEDULE/TOKENS/THRESHOLD` drafts TOKENS tokens with a model, fewer where its
      probability of a token is below THRESHOLD. The threshold adapts unless it is 0. Without a
      schedule the number is constant, as by transformers' default.

    Settings that are left out at the end have the program's own values.

    Raises:
        ValueError: the peer cannot take these settings.
    """
    kind, *given = name.split("/")
    if kind == LLAMA_DRAFT:
        return _draft_settings(given)
    if kind == LLAMA_LOOKUP:
        return _llama_lookup_settings(name, given)
    if kind == HF_LOOKUP:
        return _hf_lookup_settings(name, given)
    if kind == ASSISTED:
        return _assisted_settings(name, given)
    return {}


def llama_mode(name: str) -> dict[str, Any]:
    """Return how llama.cpp drafts for a method.

    It is {"draft": settings}, {"lookup": settings}, or {} for plain decoding.
    """
    settings = peer_settings(name)
    if not settings:
        return {}
    return {"draft" if name.startswith(LLAMA_DRAFT) else "lookup": settings}


def _draft_settings(given: list[str]) -> dict[str, Any]:
    if len(given) > 2 or not all(map(_counts, given[:1])) or not all(map(_shares, given[1:])):
        raise ValueError(
            f"{LLAMA_DRAFT}/TOKENS/CONFIDENCE takes a number of at least 1 and one from 0 to "
            "below 1"
        )
    tokens = given[0] if given else LLAMA_TOKENS
    confidence = given[1] if len(given) > 1 else LLAMA_CONFIDENCE
    return {"maxTokens": int(tokens), "minConfidence": float(confidence)}


def _llama_lookup_settings(name: str, given: list[str]) -> dict[str, Any]:
    _check_lookup(name, given)
    tokens = int(given[0]) if given else LLAMA_TOKENS
    ngram = int(given[1]) if len(given) > 1 else LLAMA_NGRAM
    return {
        "predictionLength": {"min": 1, "max": tokens},
        "patternLength": {"min": 1, "max": ngram},
    }


def _hf_lookup_settings(name: str, given: list[str]) -> dict[str, Any]:
    _check_lookup(name, given)
    settings = {"prompt_lookup_num_tokens": int(given[0]) if given else LOOKUP_TOKENS}
    if len(given) > 1:
        settings["max_matching_ngram_size"] = int(given[1])
    return settings


def _check_lookup(name: str, given: list[str]) -> None:
    if len(given) > 2 or not all(map(_counts, given)):
        kind = name.partition("/")[0]
        raise ValueError(f"{kind}/TOKENS/NGRAM takes two numbers of at least 1, not {name!r}")


def _assisted_settings(name: str, given: list[str]) -> dict[str, Any]:
    has_schedule = bool(given) and given[0] in SCHEDULES
    schedule = given[0] if has_schedule else "constant"
    numbers = given[1:] if has_schedule else given
    if len(numbers) > 2 or not all(map(_counts, numbers[:1])) or not all(map(_shares, numbers[1:])):
        raise ValueError(
            f"{ASSISTED}/SCHEDULE/TOKENS/THRESHOLD takes one of {', '.join(SCHEDULES)}, a number "
            f"of at least 1 and one from 0 to below 1, not {name!r}"
        )
    settings: dict[str, Any] = {"num_assistant_tokens_schedule": schedule}
    if numbers:
        settings["num_assistant_tokens"] = int(numbers[0])
    if len(numbers) > 1:
        settings["assistant_confidence_threshold"] = float(numbers[1])
    return settings


def _counts(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _shares(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and float(text) < 1


def checked(plan: Plan) -> Plan:
    """Return the plan with the changes that its peers ask for.

    With `hf-ar` all greedy outputs are compared with transformers' plain ones. With an assistant
    all prompts must fit the draft's context, because transformers' assistant does not stop at its
    end, as our drafts do.

    Raises:
        ValueError: llama.cpp cannot decode here, or an assistant has a vocabulary of another size.
    """
    for name in filter(is_llama, plan.methods):
        check_llama(name, plan.target, plan.draft, plan.batch, plan.device)
    if HF_PLAIN in plan.methods:
        plan = replace(plan, reference=HF_PLAIN)
    if plan.draft is not None and any(name.startswith(ASSISTED) for name in plan.methods):
        plan = replace(plan, context=_assistant_context(plan, plan.draft))
    return plan


def _assistant_context(plan: Plan, draft_source: str) -> int | None:
    """Return the context of the draft. Raises ValueError for a vocabulary of another size."""
    from forerun.api.loading import load_config
    from forerun.model.causal_lm import context_of

    trust = plan.trust_remote_code
    target = load_config(plan.target, "target", trust_remote_code=trust)
    draft = load_config(draft_source, "draft", trust_remote_code=trust)
    # Transformers would refuse them after loading. Our own drafts may have padding.
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"{ASSISTED} needs vocabularies of one size; the draft's has {draft.vocab_size} "
            f"entries, the target's {target.vocab_size}"
        )
    return context_of(draft)


def check_llama(name: str, target: str, draft: str | None, batch: int, device: str | None) -> None:
    """Check that llama.cpp can decode beside us.

    Raises:
        ValueError: it cannot read the files, or it would run on another device or in batches.
    """
    # Its server decodes several prompts together. One after another would make it look slow.
    if batch > 1:
        raise ValueError(
            f"method {name!r} decodes one prompt at a time here: leave it out or set --batch 1"
        )
    if device is not None and device != "cpu":
        raise ValueError(
            f"method {name!r} runs on the CPU: leave it out or set --device cpu, not {device}"
        )
    needed = {"target": target}
    if "draft" in llama_mode(name):
        needed["draft"] = draft
    for part, given in needed.items():
        source = ModelSource.parse(given, part)
        source.check()
        if source.gguf is None:
            raise ValueError(f"method {name!r} needs a GGUF file as --{part}, not {given!r}")
