"""Salts: a request finds nothing that requests with another salt have left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving import Live, live, make_decoder, post
from toys import noisy_copy, tiny

from forerun import Decoder
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.methods import method
from forerun.model.causal_lm import CausalLM
from forerun.model.prefix_store import PrefixStore
from forerun.scale.messages import SentRequest, rebuild

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(5, 65))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as found:
        yield found


def ran(engine: Engine) -> list[int]:
    """Tokens of prompts that target and draft have run, and the hits of their stores."""
    models = [engine.target, engine.drafter.model]  # type: ignore[attr-defined]
    return [number for each in models for number in (each.prefilled, each.prefixes.hits)]


def spent(server: Live, path: str, body: dict[str, Any]) -> list[int]:
    before = ran(server.worker.engine)
    found = post(server, path, {"max_tokens": 8, "temperature": 0, "ignore_eos": True} | body)
    assert found.status_code == 200, found.text
    return [now - then for now, then in zip(ran(server.worker.engine), before, strict=True)]


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_requests_share_with_those_of_their_salt_only(server: Live, path: str) -> None:
    chat = [{"role": "user", "content": "the cat sat on the mat " * 5}]
    body: dict[str, Any] = {"messages": chat} if path == CHAT else {"prompt": PROMPT}
    whole = spent(server, path, body)
    assert min(whole[0], whole[2]) > 30 and whole[1::2] == [0, 0]
    for salt in ("one", "other", "One"):
        assert spent(server, path, body | {"cache_salt": salt}) == whole
        for again in (salt, "one", None):
            assert spent(server, path, body | {"cache_salt": again}) == [0, 1, 0, 1]


def test_what_was_answered_is_shared_in_the_same_way(server: Live) -> None:
    prompt = [each + 100 for each in PROMPT]
    answer = make_decoder().generate(prompt, max_new_tokens=20, ignore_eos=True).tokens
    spent(server, PLAIN, {"prompt": prompt, "max_tokens": 20, "cache_salt": "one", "forerun": True})
    turn = {"prompt": [*prompt, *answer, 7, 8, 9]}
    assert spent(server, PLAIN, turn | {"cache_salt": "other"})[0] == len(turn["prompt"]) - 1
    assert spent(server, PLAIN, turn | {"cache_salt": "one"})[0] < 6


def test_the_prompt_cache_is_one_salts_too() -> None:
    """Without a store the prompt before is known all the same."""
    lm = CausalLM(tiny("llama"))
    for salt, wanted in (("one", 9), ("one", 0), ("other", 9), ("", 9), ("", 0), ("other", 9)):
        assert sum(lm.prefill([5, 9, 3, 7, 7, 2, 11, 60, 4], 4, salt=salt)) == wanted
    begun = lm.prefill([5, 9, 3, 8, 8], 1, salt="one")
    next(begun)
    begun.close()
    assert sum(lm.prefill([5, 9, 3, 8, 8], 1, salt="other")) == 5


def test_requests_that_run_together_share_prompts_within_a_salt_only() -> None:
    target = tiny("llama", context=512)
    made = Decoder(target, draft=noisy_copy(target, 0.03), method=method("sd"), guard=False, prefix_bytes=0)
    engine = made.engine
    made.session.add([Request(PROMPT[:50], 5, salt=salt) for salt in ("one", "one", "other", "")]).collect()
    assert [engine.target.prefilled, engine.drafter.model.prefilled] == [3 * 49] * 2  # type: ignore[attr-defined]


def test_a_text_takes_no_other_salts_place() -> None:
    store = PrefixStore(10**6)
    lm = CausalLM(tiny("llama"))
    list(lm.prefill([1, 2, 3, 4], 9))
    for salt in ("one", "other"):
        store.put([1, 2, 3], lm.prompts.cache.view(0, 3), salt=salt)
    store.put([1, 2, 3, 4], lm.prompts.cache.view(0, 4), salt="one")
    assert [(len(each.tokens), each.salt) for each in store._entries] == [(3, "other"), (4, "one")]
    found = [store.find([1, 2, 3, 4], salt=salt) for salt in ("one", "other", "")]
    assert [each and each[1] for each in found] == [4, 3, None]


@pytest.mark.parametrize("name", ["suffix", "ouroboros"])
def test_salted_requests_neither_read_nor_feed_what_outlives_requests(name: str) -> None:
    target = tiny("llama", context=512)
    draft = noisy_copy(target, 0.03) if method(name).needs_draft else None

    def steps(decoder: Decoder, salt: str) -> list[tuple[int, int]]:
        (found,) = decoder.session.add([Request(PROMPT[:9], 60, salt=salt)]).collect()
        return [(step.drafted, step.draft_forwards) for step in found]

    def size(decoder: Decoder) -> int:
        (pool,) = decoder.pools.values()  # type: ignore[union-attr]
        return len(pool)

    made = Decoder(target, draft=draft, method=method(name), guard=False)
    first = steps(made, "one")
    assert size(made) == 0 and steps(made, "one") == first
    plain = steps(made, "")
    assert size(made) > 0 and plain == first
    held = size(made)
    assert steps(made, "one") == first and size(made) == held
    assert steps(made, "") != first  # it drafts from what the one before it said


def test_a_salt_goes_along_to_replicas() -> None:
    decoder = make_decoder()
    asked = replace(decoder.request("the cat"), salt="one")
    (found,) = rebuild([SentRequest.of(asked, 1)], decoder)
    assert asked.salt == found.salt == "one"
