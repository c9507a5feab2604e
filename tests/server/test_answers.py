"""What clients get, and what requests with salts share.

OpenAI's client and others talk to a server in this process.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from forerun import Decoder
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.methods import method
from forerun.model.causal_lm import CausalLM
from tests.support.serving import (
    CHAT,
    HELLO,
    NAME,
    PLAIN,
    Live,
    client_of,
    figures,
    get,
    live,
    make_decoder,
    post,
)
from tests.support.toys import noisy_copy, tiny

PROMPT = list(range(5, 65))
SAT: list[Any] = [{"role": "user", "content": "the cat sat"}]


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with client_of(server) as found:
        yield found


@pytest.fixture(scope="module")
def decoder() -> Any:
    return make_decoder()


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(model=NAME, prompt=prompt, **options)


def test_a_greedy_answer_is_the_decoders(client: openai.OpenAI, decoder: Any) -> None:
    """With drafts, and plainly on request."""
    answer = client.chat.completions.create(model=NAME, messages=SAT, temperature=0, max_tokens=24)
    wanted = decoder.chat(SAT, max_new_tokens=24)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    batch = complete(client, ["def add", "for i"], temperature=0, max_tokens=12)
    texts = [
        completion.text for completion in decoder.generate(["def add", "for i"], max_new_tokens=12)
    ]
    assert [choice.text for choice in batch.choices] == texts
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    answers = [
        complete(client, "def add", **options, extra_body={"forerun_method": method_name})
        for method_name in (None, "ar")
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    drafted, plain = (reply.model_extra["metrics"]["speculative_decoding"] for reply in answers)
    assert (
        drafted["num_spec_steps"] < plain["num_spec_steps"] == 40 and not plain["num_draft_tokens"]
    )


def test_n_copies_are_streams_of_the_seed(client: openai.OpenAI, decoder: Any) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    answer = complete(client, "the cat", n=3, max_tokens=16, **options)
    texts = [choice.text for choice in answer.choices]
    assert texts == [
        completion.text
        for completion in decoder.generate(["the cat"] * 3, max_new_tokens=16, **options)
    ]
    assert len(set(texts)) > 1 and [choice.index for choice in answer.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in complete(client, "the cat", n=3, max_tokens=16, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, decoder: Any) -> None:
    whole = decoder.generate("def add", max_new_tokens=40).text
    options = {"temperature": 0, "max_tokens": 40}
    stop = whole[10:13]
    answer = complete(client, "def add", **options, stop=[stop, "zzzz"])
    assert (
        answer.choices[0].text == whole[: whole.index(stop)]
        and answer.choices[0].finish_reason == "stop"
    )
    usage = {"continuous_usage_stats": True}
    chunks = list(
        complete(client, "def add", **options, stop=stop, stream=True, stream_options=usage)
    )
    assert (
        chunks[-1].usage.completion_tokens == chunks[-1].model_extra["timings"]["predicted_n"] > 0
    )
    assert "".join(each.choices[0].text for each in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chunks_of_a_chat_carry_role_text_and_usage(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "temperature": 0,
        "max_completion_tokens": 20,
        "extra_body": {"forerun": True},
    }
    usage: Any = {"include_usage": True}
    chunks = client.chat.completions.create(
        model=NAME, messages=SAT, stream=True, stream_options=usage, **options
    )
    *middle, last = chunks
    assert middle[0].choices[0].delta.role == "assistant" and not middle[0].choices[0].delta.content
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * (len(middle) - 1) + [
        "length"
    ]
    assert not last.choices and last.usage is not None and last.usage.completion_tokens == 20
    steps = [chunk.model_extra["forerun"] for chunk in middle[1:]]  # type: ignore[index]
    texts = [chunk.choices[0].delta.content or "" for chunk in middle[1:]]
    assert ["".join(piece for piece, _ in step["pieces"]) for step in steps] == texts
    assert all(len(step["rejected"]) == step["drafted"] - step["accepted"] for step in steps)
    counts = last.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    accepted = sum(step["accepted"] for step in steps)
    assert (counts["num_spec_steps"], counts["num_accepted_draft_tokens"]) == (len(steps), accepted)


def test_logprobs_are_the_models_own(client: openai.OpenAI, decoder: Any) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "seed": 1, "presence_penalty": 1.0}
    given = (
        complete(client, [5, 6, 7, 8], **options, max_tokens=6, echo=True, logprobs=2)
        .choices[0]
        .logprobs
    )
    assert given.token_logprobs[0] is None
    (completion,) = decoder.generate([[5, 6, 7, 8]], **options, max_new_tokens=6)
    tokens = [5, 6, 7, 8, *completion.tokens]
    with torch.inference_mode():
        law = decoder.target.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    wanted = [float(law[at - 1, token]) for at, token in enumerate(tokens)][1:]
    assert given.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
    assert given.tokens == [decoder.tokenizer.decode([token]) for token in tokens]
    assert given.text_offset[:2] == [0, len(given.tokens[0])]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    chat = client.chat.completions.create(model=NAME, messages=SAT, **asked)
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and len(content) == 3
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content)
    assert b"".join(bytes(each.bytes or []) for each in content).decode("utf-8", "replace")


def test_penalties_and_biases_are_those_of_the_decoder(client: openai.OpenAI, decoder: Any) -> None:
    prompt, options = "def add", {"temperature": 0, "max_tokens": 20}
    for field, value in (
        ("presence_penalty", 1.5),
        ("frequency_penalty", -1.0),
        ("logit_bias", {"70": 100}),
    ):
        answer = complete(client, prompt, **options, **{field: value})
        argument = (
            {int(key): bias for key, bias in value.items()} if isinstance(value, dict) else value
        )
        assert (
            answer.choices[0].text
            == decoder.generate(prompt, max_new_tokens=20, **{field: argument}).text
        )
    assert answer.choices[0].text == decoder.tokenizer.decode([70] * 20)


def test_statistics_obey_their_identities(client: openai.OpenAI, server: Live) -> None:
    before = figures(server)
    sums = {"steps": 0, "drafted": 0, "accepted": 0, "tokens": 0, "prompt": 0}
    for seed in range(4):
        answer = complete(
            client, "def add(a", max_tokens=25 + seed, temperature=0.6, seed=seed, n=1 + seed % 2
        )
        usage, extra = answer.usage, answer.model_extra
        metrics = extra["metrics"]["speculative_decoding"]
        steps, drafted = metrics["num_spec_steps"], metrics["num_draft_tokens"]
        accepted, tokens = metrics["num_accepted_draft_tokens"], usage.completion_tokens
        assert accepted <= metrics["num_tested_draft_tokens"] <= drafted
        histogram = metrics["acceptance_histogram"]
        assert (
            sum(histogram) == steps
            and sum(j * count for j, count in enumerate(histogram)) == accepted
        )
        assert (
            0 <= accepted + steps - tokens <= metrics["num_spec_tokens"] * len(answer.choices)
        )  # cut at the end
        assert metrics["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
        assert metrics["draft_acceptance_rate"] == pytest.approx(accepted / drafted)
        details = usage.completion_tokens_details
        assert tokens - steps <= details.accepted_prediction_tokens <= min(accepted, tokens)
        assert details.rejected_prediction_tokens == drafted - accepted
        timings = extra["timings"]
        assert (timings["draft_n"], timings["draft_n_accepted"], timings["predicted_n"]) == (
            drafted,
            accepted,
            tokens,
        )
        for name, value in zip(
            sums, (steps, drafted, accepted, tokens, usage.prompt_tokens), strict=True
        ):
            sums[name] += value
    after = figures(server)
    for space in ("forerun", "vllm"):
        for name, key in (
            ("drafts", "steps"),
            ("draft_tokens", "drafted"),
            ("accepted_tokens", "accepted"),
        ):
            line = f"{space}:spec_decode_num_{name}_total"
            assert after[line] - before[line] == sums[key]
        prefix = f"{space}:spec_decode_num_accepted_tokens_per_pos_total"
        by_position = [line for line in after if line.startswith(prefix)]
        assert sum(after[line] - before.get(line, 0) for line in by_position) == sums["accepted"]
    assert (
        after["forerun:generation_tokens_total"] - before["forerun:generation_tokens_total"]
        == sums["tokens"]
    )
    assert (
        after["forerun:prompt_tokens_total"] - before["forerun:prompt_tokens_total"]
        == sums["prompt"]
    )
    assert after["forerun:num_requests_running"] == after["forerun:num_requests_waiting"] == 0


def test_other_endpoints_answer_as_documented(
    client: openai.OpenAI, server: Live, decoder: Any
) -> None:
    assert [each.id for each in client.models.list()] == [NAME]
    answer = post(server, "/tokenize", {"prompt": "the cat"}).json()
    assert answer["tokens"] == decoder.tokenizer("the cat")["input_ids"] and answer["count"] == len(
        answer["tokens"]
    )
    assert answer["max_model_len"] == 512
    assert post(server, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "the cat"}
    rendered = post(server, "/tokenize", {"messages": SAT}).json()
    assert "assistant" in decoder.tokenizer.decode(rendered["tokens"])
    assert get(server, "/health").json() == {"status": "ok"}
    assert "version" in get(server, "/version").json()
    response = post(
        server, PLAIN, {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine"}
    )
    assert response.headers["x-request-id"] == "mine"
    schema = get(server, "/openapi.json").json()
    assert "422" not in json.dumps(schema)
    limit, _ = schema["components"]["schemas"]["CompletionBody"]["properties"]["top_k"]["anyOf"]
    assert limit == {"type": "integer", "minimum": -1, "exclusiveMaximum": 2**31}


def test_what_clients_send_along_is_understood(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "short"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None},
        {"role": "user", "name": "me", "content": "go on"},
    ]
    more = {
        "tools": [],
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "unknown": {"x": 1},
    }
    more |= {"best_of": 1, "length_penalty": 1.0, "min_tokens": 0}
    absent = dict.fromkeys(("temperature", "stop", "n", "logit_bias", "suffix"))
    body = {"model": NAME, "messages": messages, "max_tokens": 3} | more | absent
    with caplog.at_level("INFO"):
        assert post(server, CHAT, body).status_code == 200
    assert "unknown fields: 'unknown'" in caplog.text


# Clients that people use: an answer, the same streamed, and an error.


@pytest.fixture
def url(server: Live, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return f"{server.url}/v1"


@pytest.fixture
def expected(decoder: Any) -> str:
    return str(decoder.chat(HELLO, max_new_tokens=6).text)


@pytest.mark.skipif(
    find_spec("langchain_openai") is None, reason="langchain-openai is not installed"
)
def test_langchain_gets_the_same_answers(url: str, expected: str) -> None:
    from langchain_openai import ChatOpenAI

    asked: dict[str, Any] = {
        "base_url": url,
        "api_key": "none",
        "model": NAME,
        "temperature": 0,
        "max_retries": 0,
    }
    chat = ChatOpenAI(**asked, max_completion_tokens=6)
    answer = chat.invoke("hello")
    assert answer.content == expected and answer.usage_metadata["output_tokens"] == 6
    assert answer.response_metadata["finish_reason"] == "length"
    assert "".join(chunk.content for chunk in chat.stream("hello")) == expected
    with pytest.raises(openai.BadRequestError) as caught:  # it raises those of OpenAI's client
        ChatOpenAI(**asked, max_completion_tokens=0).invoke("hello")
    assert caught.value.status_code == 400


@pytest.mark.skipif(find_spec("llm") is None, reason="llm is not installed")
def test_llm_gets_the_same_answers(
    url: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: forerun\n  model_name: {NAME}\n  api_base: {url}\n  can_stream: true\n"
    )
    import llm

    asked: dict[str, Any] = {"prompt": "hello", "key": "none", "temperature": 0}
    for stream in (False, True):
        assert (
            "".join(llm.get_model("forerun").prompt(**asked, max_tokens=6, stream=stream))
            == expected
        )
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        list(llm.get_model("forerun").prompt(**asked, max_tokens=0))


# Salts: a request finds nothing that requests with another salt have left.


def ran(engine: Engine) -> list[int]:
    """Tokens of prompts that target and draft have run, and the hits of their stores."""
    models = [engine.target, engine.drafter.model]  # type: ignore[attr-defined]
    return [number for each in models for number in (each.prefilled, each.prompts.store.hits)]


def spent(server: Live, path: str, body: dict[str, Any]) -> list[int]:
    before = ran(server.worker.engine)
    found = post(server, path, {"max_tokens": 8, "temperature": 0, "ignore_eos": True} | body)
    assert found.status_code == 200, found.text
    return [now - then for now, then in zip(ran(server.worker.engine), before, strict=True)]


@pytest.mark.slow
def test_requests_share_with_those_of_their_salt_only() -> None:
    chat = {"messages": [{"role": "user", "content": "the cat sat on the mat " * 5}]}
    bodies: dict[str, dict[str, Any]] = {PLAIN: {"prompt": PROMPT}, CHAT: chat}
    with live() as server:
        for path, body in bodies.items():
            whole = spent(server, path, body)
            assert min(whole[0], whole[2]) > 30 and whole[1::2] == [0, 0]
            for salt in ("one", "other", "One"):
                assert spent(server, path, body | {"cache_salt": salt}) == whole
                for again in (salt, "one", None):
                    assert spent(server, path, body | {"cache_salt": again}) == [0, 1, 0, 1]
        # What was answered is shared in the same way.
        prompt = [each + 100 for each in PROMPT]
        answer = make_decoder().generate(prompt, max_new_tokens=20, ignore_eos=True).tokens
        spent(
            server,
            PLAIN,
            {"prompt": prompt, "max_tokens": 20, "cache_salt": "one", "forerun": True},
        )
        turn = {"prompt": [*prompt, *answer, 7, 8, 9]}
        assert spent(server, PLAIN, turn | {"cache_salt": "other"})[0] == len(turn["prompt"]) - 1
        assert spent(server, PLAIN, turn | {"cache_salt": "one"})[0] < 6


def test_the_prompt_before_is_one_salts_too() -> None:
    """Without a store; and if it is given up, or runs at the same time."""
    target = tiny("llama", context=512)
    lm = CausalLM(target)
    for salt, wanted in (("one", 9), ("one", 0), ("other", 9), ("", 9), ("", 0), ("other", 9)):
        assert sum(lm.prefill([5, 9, 3, 7, 7, 2, 11, 60, 4], 4, cache_salt=salt)) == wanted
    begun = lm.prefill([5, 9, 3, 8, 8], 1, cache_salt="one")
    next(begun)
    begun.close()
    assert sum(lm.prefill([5, 9, 3, 8, 8], 1, cache_salt="other")) == 5
    made = Decoder(
        target, draft=noisy_copy(target, 0.03), method=method("sd"), guard=False, prefix_bytes=0
    )
    engine = made.engine
    made.session.add(
        [Request(PROMPT[:50], 5, cache_salt=salt) for salt in ("one", "one", "other", "")]
    ).collect()
    assert [engine.target.prefilled, engine.drafter.model.prefilled] == [3 * 49] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["suffix", "ouroboros"])
def test_salted_requests_neither_read_nor_feed_what_outlives_requests(name: str) -> None:
    target = tiny("llama", context=512)
    draft = noisy_copy(target, 0.03) if method(name).needs_draft else None

    def steps(decoder: Decoder, salt: str) -> list[tuple[int, int]]:
        (found,) = decoder.session.add([Request(PROMPT[:9], 60, cache_salt=salt)]).collect()
        return [(step.drafted, step.draft_forwards) for step in found]

    made = Decoder(target, draft=draft, method=method(name), guard=False)
    first = steps(made, "one")
    (pool,) = made.pools.values()  # type: ignore[union-attr]
    assert len(pool) == 0 and steps(made, "one") == first
    assert steps(made, "") == first and (size := len(pool)) > 0
    assert steps(made, "one") == first and len(pool) == size
    assert steps(made, "") != first  # it drafts from what the one before it said
