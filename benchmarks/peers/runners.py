"""What is measured beside our methods: their names, what each is called with, and what it needs. Imports no torch.

- hf-ar, hf-lookup, hf-assisted: transformers' own `generate` (`benchmarks.peers.hf`);
- hf-forward/METHOD: a method of ours on transformers' own forwards;
- llama-cpp, llama-cpp-lookup, llama-cpp-draft: llama.cpp on the same GGUF files (`benchmarks.peers.llama`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from forerun.bench.plan import Plan, Runner
from forerun.methods import METHODS, Method, is_method
from forerun.zoo import locate

if TYPE_CHECKING:
    from forerun.bench.measure import Loaded, Run

ASSISTED, HF_LOOKUP, FORWARD = "hf-assisted", "hf-lookup", "hf-forward"
SCHEDULES = ("heuristic", "heuristic_transient", "constant")
LLAMA, LLAMA_LOOKUP, LLAMA_DRAFT = "llama-cpp", "llama-cpp-lookup", "llama-cpp-draft"
NAMES = ("hf-ar", HF_LOOKUP, ASSISTED, f"{FORWARD}/METHOD", LLAMA, LLAMA_LOOKUP, LLAMA_DRAFT)
LOOKUP_TOKENS = 10  # of hf-lookup: what transformers' documentation uses
LLAMA_TOKENS, LLAMA_NGRAM = 3, 3  # of llama-cpp-lookup, and the tokens of llama-cpp-draft
LLAMA_CONFIDENCE = 0.6  # of llama-cpp-draft: the default of node-llama-cpp


def expanded(names: Iterable[str]) -> list[str]:
    """The names of --methods, with all of transformers' schedules where `hf-assisted` stands alone."""
    found: list[str] = []
    for name in names:
        found += (
            [f"{ASSISTED}/{schedule}" for schedule in SCHEDULES] if name == ASSISTED else [name]
        )
    return found


class Peers:
    """The runners of a command, by their names. Models that several of them share are loaded once."""

    def __init__(self) -> None:
        self.forward: dict[str, Method | Runner] = {}  # ours on transformers' forwards
        self.loaded: dict[str, Any] = {}

    def __call__(self, name: str, ours: Callable[[str], Method]) -> Runner:
        """Raises ValueError for a name that is no runner's, and for settings in it that are none."""
        if is_llama(name):
            needs_draft = "draft" in llama_mode(name)
            return Runner(
                lambda loaded: self._llama(loaded).run(name),
                peer_settings(name),
                needs_draft=needs_draft,
                knows=True,
            )
        if is_transformers(name):
            assisted = name.startswith(ASSISTED)
            return Runner(
                lambda loaded: self._hf(loaded).run(name),
                peer_settings(name),
                needs_draft=assisted,
                one_by_one=not takes_rows(name),
            )
        own = name.removeprefix(f"{FORWARD}/")
        if own == name or not is_method(own):
            raise ValueError(f"unknown method {name!r}; there are {', '.join((*METHODS, *NAMES))}")
        self.forward[name] = method = ours(own)
        return Runner(
            lambda loaded: self._forward(loaded, name),
            asdict(method),
            needs_draft=method.needs_draft,
            any_tokenizer=method.any_tokenizer,
        )

    def _hf(self, loaded: Loaded) -> Any:
        from benchmarks.peers.hf import load_peers

        if "hf" not in self.loaded:
            self.loaded["hf"] = load_peers(
                loaded.plan, any(name.startswith(ASSISTED) for name in loaded.plan.methods)
            )
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
    """Whether transformers' own `generate` decodes."""
    return name == "hf-ar" or name.partition("/")[0] in (HF_LOOKUP, ASSISTED)


def is_llama(name: str) -> bool:
    """Whether llama.cpp decodes, not transformers and not we."""
    return name.partition("/")[0] in (LLAMA, LLAMA_LOOKUP, LLAMA_DRAFT)


def takes_rows(name: str) -> bool:
    """Whether a method decodes a batch at once: transformers refuses batches for some of its own."""
    return not name.startswith((HF_LOOKUP, ASSISTED))


def peer_settings(name: str) -> dict[str, Any]:
    """What a peer's method is called with, beside what all are. Raises ValueError for numbers that it cannot take.

    llama-cpp-lookup/TOKENS/NGRAM and hf-lookup/TOKENS/NGRAM draft so many tokens behind the longest phrase of up to
    NGRAM tokens that has been there before. hf-assisted/SCHEDULE/TOKENS/THRESHOLD drafts so many tokens with a model,
    fewer where its probability of a token is below THRESHOLD, which adapts unless it is 0; without a schedule the
    number is constant, as is transformers' default. What is left out at the end is the program's own.
    """
    kind, *given = name.split("/")
    if kind == LLAMA_DRAFT:
        if len(given) > 2 or not all(map(_counts, given[:1])) or not all(map(_shares, given[1:])):
            raise ValueError(
                f"{kind}/TOKENS/CONFIDENCE takes a number of at least 1 and one from 0 to below 1"
            )
        tokens, confidence = (*given, *(LLAMA_TOKENS, LLAMA_CONFIDENCE)[len(given) :])
        return {"maxTokens": int(tokens), "minConfidence": float(confidence)}
    if kind in (LLAMA_LOOKUP, HF_LOOKUP):
        if len(given) > 2 or not all(map(_counts, given)):
            raise ValueError(f"{kind}/TOKENS/NGRAM takes two numbers of at least 1, not {name!r}")
        if kind == HF_LOOKUP:
            names = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
            return dict(zip(names, map(int, given), strict=False)) or {names[0]: LOOKUP_TOKENS}
        tokens, ngram, *_ = (*map(int, given), *(LLAMA_TOKENS, LLAMA_NGRAM)[len(given) :])
        return {
            "predictionLength": {"min": 1, "max": tokens},
            "patternLength": {"min": 1, "max": ngram},
        }
    return _assisted(name, given) if kind == ASSISTED else {}


def llama_mode(name: str) -> dict[str, Any]:
    """Return how llama.cpp drafts for a method: {"draft": settings}, {"lookup": settings}, or {} for plain decoding."""
    settings = peer_settings(name)
    return {"draft" if name.startswith(LLAMA_DRAFT) else "lookup": settings} if settings else {}


def _assisted(name: str, given: list[str]) -> dict[str, Any]:
    schedule, *numbers = given if given and given[0] in SCHEDULES else ["constant", *given]
    if len(numbers) > 2 or not all(map(_counts, numbers[:1])) or not all(map(_shares, numbers[1:])):
        raise ValueError(
            f"{ASSISTED}/SCHEDULE/TOKENS/THRESHOLD takes one of {', '.join(SCHEDULES)}, a number of at least 1 and one "
            f"from 0 to below 1, not {name!r}"
        )
    settings: dict[str, Any] = {"num_assistant_tokens_schedule": schedule}
    if numbers:
        settings["num_assistant_tokens"] = int(numbers[0])
    if numbers[1:]:
        settings["assistant_confidence_threshold"] = float(numbers[1])
    return settings


def _counts(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _shares(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and float(text) < 1


def checked(plan: Plan) -> Plan:
    """The plan, with what its peers ask for: greedy outputs are compared with transformers' where it decodes plainly,
    and prompts fit the draft's context where transformers' assistant drafts, which does not stop there as ours does.

    Raises ValueError where llama.cpp cannot decode, and for an assistant whose vocabulary has another size.
    """
    for name in filter(is_llama, plan.methods):
        check_llama(name, plan.target, plan.draft, plan.batch, plan.device)
    if "hf-ar" in plan.methods:
        plan = replace(plan, reference="hf-ar")
    if plan.draft is not None and any(name.startswith(ASSISTED) for name in plan.methods):
        from forerun.api.loading import load_config
        from forerun.model.causal_lm import context_of

        target, draft = (
            load_config(source, part, trust_remote_code=plan.trust_remote_code)
            for source, part in ((plan.target, "target"), (plan.draft, "draft"))
        )
        if (
            draft.vocab_size != target.vocab_size
        ):  # transformers refuses them after loading, ours allow padding
            raise ValueError(
                f"{ASSISTED} needs vocabularies of one size; the draft's has {draft.vocab_size} entries, the target's "
                f"{target.vocab_size}"
            )
        plan = replace(plan, context=context_of(draft))
    return plan


def check_llama(name: str, target: str, draft: str | None, batch: int, device: str | None) -> None:
    """Raise ValueError if llama.cpp cannot decode beside us: it needs files that it can read."""
    if batch > 1:  # its server decodes several; one after another would make it look slow
        raise ValueError(
            f"method {name!r} decodes one prompt at a time here: leave it out or set --batch 1"
        )
    if device is not None and device != "cpu":
        raise ValueError(
            f"method {name!r} runs on the CPU: leave it out or set --device cpu, not {device}"
        )
    from forerun.zoo.gguf_file import find

    if find(locate(target, "target")) is None:
        raise ValueError(f"method {name!r} needs a GGUF file as --target, not {target!r}")
    if "draft" in llama_mode(name) and (draft is None or find(locate(draft, "draft")) is None):
        raise ValueError(f"method {name!r} needs a GGUF file as --draft, not {draft!r}")
