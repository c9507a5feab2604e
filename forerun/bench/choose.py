"""The methods of a run from what the command line gives. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from forerun.methods import METHODS, Method, is_method, method, parse_value
from forerun.zoo import resolve

ASSISTED = "hf-assisted"
SCHEDULES = ("heuristic", "heuristic_transient", "constant")
HF_LOOKUP = "hf-lookup"
PEERS = ("hf-ar", HF_LOOKUP, *(f"{ASSISTED}/{schedule}" for schedule in SCHEDULES))
FORWARD = "hf-forward"  # a method of ours, on transformers' own forwards
BATCHING, STATIC = "hf-batch", "static"  # under load alone
LLAMA, LLAMA_LOOKUP = "llama-cpp", "llama-cpp-lookup"
NAMES = (*METHODS, "hf-ar", HF_LOOKUP, ASSISTED, f"{FORWARD}/METHOD", LLAMA, LLAMA_LOOKUP, BATCHING, STATIC)
LOOKUP_TOKENS = 10  # of hf-lookup: what transformers' documentation uses
LLAMA_TOKENS, LLAMA_NGRAM = 2, 2  # of llama-cpp-lookup: what its documentation has for CPUs, and its default
DEFAULT_METHODS = ("ar", "sd", "suffix")


def parse_methods(
    names: Sequence[str], settings: Sequence[str], tune: str | None, tuned: dict[str, dict[str, Any]]
) -> dict[str, Method | None]:
    """The methods of --methods, --method-arg and --tune, `ar` always among them.

    `tuned` holds settings that take the place of a method's defaults, not of what is given. `static` is `ar` in static
    batches, static/NAME another method in them; hf-forward/NAME is a method of ours on transformers' own forwards.
    `hf-assisted` stands for all of transformers' schedules. What a peer's name may hold says `peer_settings`.
    """
    given: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, key, values = _setting("--method-arg", setting)
        given.setdefault(name, {})[key] = parse_value(name, key, values)
    if tune is not None:
        if names:
            raise ValueError("--tune chooses the methods itself; leave out --methods")
        name, key, values = _setting("--tune", tune)
        chosen: dict[str, Method | None] = {"ar": METHODS["ar"]()}
        for value in values.split(","):
            chosen[f"{name}.{key}={value}"] = method(name, **given.get(name, {}) | {key: parse_value(name, key, value)})
        return chosen
    wanted = [name for name in names or DEFAULT_METHODS if name]
    chosen = {}
    for name in wanted if "ar" in wanted else ["ar", *wanted]:
        if name == ASSISTED:
            chosen |= {peer: None for peer in PEERS if peer.startswith(ASSISTED)}
        elif name == BATCHING or is_transformers(name) or is_llama(name):
            peer_settings(name)  # raises for numbers that are none
            chosen[name] = None
        elif is_method(own := own_name(name)):
            chosen[name] = method(own, **tuned.get(own, {}) | given.get(own, {}))
        else:
            raise ValueError(f"unknown method {name!r}; there are {', '.join(NAMES)}")
    for name in given:
        if name not in map(own_name, chosen):
            raise ValueError(f"--method-arg {name}.{next(iter(given[name]))}: method {name!r} is not among --methods")
    return chosen


def own_name(name: str) -> str:
    """The method that is served in static batches, or on transformers' forwards, by this name, else the name itself."""
    return METHODS["ar"].name if name == STATIC else name.removeprefix(f"{STATIC}/").removeprefix(f"{FORWARD}/")


def on_their_forward(name: str) -> bool:
    """Whether a method of ours runs on transformers' own forwards."""
    return name.startswith(f"{FORWARD}/")


def is_transformers(name: str) -> bool:
    """Whether transformers' own `generate` decodes."""
    return name == "hf-ar" or name.partition("/")[0] in (HF_LOOKUP, ASSISTED)


def is_llama(name: str) -> bool:
    """Whether llama.cpp decodes, not transformers and not we."""
    return name == LLAMA or name.partition("/")[0] == LLAMA_LOOKUP


def peer_settings(name: str) -> dict[str, Any]:
    """What a peer's method is called with, beside what all are. Raises ValueError for numbers that it cannot take.

    llama-cpp-lookup/TOKENS/NGRAM and hf-lookup/TOKENS/NGRAM draft so many tokens behind the longest phrase of up to
    NGRAM tokens that has been there before. hf-assisted/SCHEDULE/TOKENS/THRESHOLD drafts so many tokens with a model,
    fewer where its probability of a token is below THRESHOLD, which adapts unless it is 0; without a schedule the
    number is constant, as is transformers' default. What is left out at the end is the program's own.
    """
    kind, *given = name.split("/")
    if kind in (LLAMA_LOOKUP, HF_LOOKUP):
        if len(given) > 2 or not all(map(_counts, given)):
            raise ValueError(f"{kind}/TOKENS/NGRAM takes two numbers of at least 1, not {name!r}")
        if kind == HF_LOOKUP:
            names = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
            return dict(zip(names, map(int, given), strict=False)) or {names[0]: LOOKUP_TOKENS}
        tokens, ngram, *_ = (*map(int, given), *(LLAMA_TOKENS, LLAMA_NGRAM)[len(given) :])
        return {"num_pred_tokens": tokens, "max_ngram_size": ngram}
    return _assisted(name, given) if kind == ASSISTED else {}


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


def takes_rows(name: str) -> bool:
    """Whether a method decodes a batch at once: transformers refuses batches for some of its own."""
    return not name.startswith(("hf-lookup", ASSISTED))


def check_llama(name: str, target: str, batch: int, device: str | None) -> None:
    """Raises ValueError where llama.cpp cannot decode beside us: it needs a file of its own and its package."""
    if batch > 1:  # its server decodes several; one after another would make it look slow
        raise ValueError(f"method {name!r} decodes one prompt at a time here: leave it out or set --batch 1")
    if device is not None and device != "cpu":
        raise ValueError(f"method {name!r} runs on the CPU: leave it out or set --device cpu, not {device}")
    from forerun.gguf import find

    if find(resolve(target, "target")) is None:
        raise ValueError(f"method {name!r} needs a GGUF file as --target, not {target!r}")
    if find_spec("llama_cpp") is None:
        raise ValueError(f"method {name!r} needs 'pip install llama-cpp-python', which compiles llama.cpp")


def _setting(option: str, text: str) -> tuple[str, str, str]:
    left, equals, value = text.partition("=")
    name, dot, key = left.rpartition(".")
    if not (equals and dot and name and key and value):
        raise ValueError(f"{option} takes METHOD.NAME=VALUE, not {text!r}")
    if not is_method(name):
        raise ValueError(f"{option} {left}: {name!r} is no method with settings; there are {', '.join(METHODS)}")
    return name, key, value
