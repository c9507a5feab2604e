"""What clients send that other servers take: each field has the effect that its sender expects."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from forerun.api.decoder import Decoder
from forerun.sampling.probabilities import logprobs_of
from tests.support import tools as tool_support
from tests.support.serving import (
    CHAT,
    HELLO,
    PLAIN,
    TEMPLATE,
    Live,
    answered,
    events,
    get,
    live,
    make_decoder,
    make_filler,
    post,
    refusal,
)

RESPONSES = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder()


def chat(server: Live, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    """The one choice of a chat, and its usage."""
    response = post(server, CHAT, {"messages": messages, "max_tokens": 8} | fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice | {"usage": response.json()["usage"]}


def text_of(server: Live, **fields: Any) -> str:
    """The text of a plain answer."""
    return answered(post(server, PLAIN, {"prompt": "the cat", "max_tokens": 12} | fields))


# The form.


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ],
    ids=["llama.cpp", "flat", "openai"],
)
def test_a_schema_holds_wherever_it_stands(server: Live, form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    for seed in range(3):
        choice = chat(server, response_format=form, max_tokens=200, seed=seed)
        value = json.loads(choice["message"]["content"])
        assert [*value] == ["age"] and 0 <= value["age"] <= 9
    text = {"input": "hello", "text": {"format": form}, "seed": 1, "max_output_tokens": 200}
    if "json_schema" not in form:
        (item,) = post(server, RESPONSES, text).json()["output"]
        assert [*json.loads(item["content"][0]["text"])] == ["age"]


def test_a_schema_beside_tools_holds_for_answers(caller: Live) -> None:
    """And the tools can still be called."""
    pytest.importorskip("llguidance")
    body = {
        "messages": HELLO,
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "max_tokens": 200,
    }
    kinds = set()
    markers = [caller.worker.decoder.tokenizer.convert_tokens_to_ids("<tool_call>")]
    for seed, bias in ((0, 100), (1, 100), (2, -100), (3, -100)):
        more = {"seed": seed, "logit_bias": {str(token): bias for token in markers}}
        (choice,) = post(caller, CHAT, body | more).json()["choices"]
        message = choice["message"]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "tool_calls":
            json.loads(message["tool_calls"][0]["function"]["arguments"])
        elif choice["finish_reason"] == "stop":
            assert [*json.loads(message["content"])] == ["age"]
    assert {"tool_calls", "stop"} <= kinds
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = post(
        caller,
        RESPONSES,
        {
            "input": "hello",
            "tools": flat,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "max_output_tokens": 200,
            "seed": 3,
        },
    )
    assert response.status_code == 200, response.text


# The length and the seed.


@pytest.fixture(scope="module")
def short() -> Iterator[Live]:
    """A server with a context that is full soon."""
    with live(lambda: make_filler(128)) as server:
        yield server


@pytest.mark.parametrize("limit", [-1, -2])
def test_no_limit_is_the_context(short: Live, limit: int) -> None:
    body = {"prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0}
    usage = post(short, PLAIN, body | {"max_tokens": limit}).json()["usage"]
    assert usage["total_tokens"] == 128
    prompts = [[5] * 100, [6, 7]]
    many = post(short, PLAIN, body | {"prompt": prompts, "max_tokens": limit}).json()["usage"]
    assert many["total_tokens"] == 2 * 128
    whole = chat(short, max_tokens=None, max_completion_tokens=limit, ignore_eos=True)
    assert whole["usage"]["total_tokens"] == 128
    response = post(short, RESPONSES, {"input": "x", "max_output_tokens": limit}).json()
    assert response["status"] in ("completed", "incomplete")


def test_a_whole_number_may_be_written_with_a_point(server: Live) -> None:
    """As clients in Lua and Swift do, and as JSON Schema allows for integers."""
    numbers = {"seed": 5, "top_k": 3, "n": 2, "min_tokens": 1, "max_tokens": 4}
    body = {"prompt": "the cat", "temperature": 1.5, "ignore_eos": True}
    texts = []
    for kind in (int, float):
        fields = {name: kind(number) for name, number in numbers.items()}
        choices = post(server, PLAIN, body | fields).json()["choices"]
        texts.append([choice["text"] for choice in choices])
    assert texts[0] == texts[1] and len(texts[0]) == 2
    for number in (4.5, 1e300, True, "4"):
        assert refusal(post(server, PLAIN, body | {"max_tokens": number}))["param"] == "max_tokens"


def test_no_limit_is_what_memory_holds() -> None:
    decoder = make_decoder()
    small = 300 * decoder.target.position_bytes
    with live(lambda: make_decoder(kv_memory=small)) as server:
        body = {"prompt": [5, 6, 7], "ignore_eos": True, "max_tokens": -1, "temperature": 0}
        usage = post(server, PLAIN, body).json()["usage"]
        assert 200 < usage["total_tokens"] <= 256  # a block of the cache, less room for a draft
        body = {"prompt": [5, 6, 7], "max_tokens": 400}
        assert refusal(post(server, PLAIN, body))["param"] == "max_tokens"


def test_a_seed_of_minus_one_is_none(server: Live) -> None:
    texts = {text_of(server, seed=-1, temperature=3.0) for _ in range(4)}
    assert len(texts) > 1
    assert len({text_of(server, seed=1, temperature=3.0) for _ in range(2)}) == 1


# How tokens are chosen.


def test_a_repeat_penalty_is_a_repetition_penalty(server: Live, decoder: Decoder) -> None:
    wanted = decoder.generate("the cat", repetition_penalty=1.6, max_new_tokens=12).text
    assert wanted != decoder.generate("the cat", max_new_tokens=12).text
    for more in (
        {"repetition_penalty": 1.6},
        {"repeat_penalty": 1.6},
        {"repeat_penalty": 1.6, "repetition_penalty": 1.6, "repeat_last_n": -1},
    ):
        assert text_of(server, temperature=0, **more) == wanted
    body = {"prompt": "a", "repeat_penalty": 1.6}
    error = refusal(post(server, PLAIN, body | {"repetition_penalty": 1.2}))
    assert error["param"] == "repeat_penalty"
    assert refusal(post(server, PLAIN, body | {"repeat_last_n": 64}))["param"] == "repeat_last_n"
    # Where nothing is penalised the window does not matter.
    assert text_of(server, temperature=0, repeat_penalty=1.0, repeat_last_n=64)


def test_typical_p_is_that_of_the_decoder(server: Live, decoder: Decoder) -> None:
    for seed in range(3):
        asked = {"temperature": 1.5, "typical_p": 0.3, "seed": seed}
        wanted = decoder.generate("the cat", max_new_tokens=12, **asked).text
        assert text_of(server, **asked) == wanted
        assert text_of(server, **asked | {"typical_p": 1.0}) != wanted


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 1e-8},
        {"top_p": 0},
        {"top_p": 0, "temperature": 1.7, "seed": 3},
        {"temperature": 0.0, "top_p": 0.0, "min_p": 0.5, "top_k": 3},
    ],
    ids=str,
)
def test_what_leaves_one_token_is_greedy(
    server: Live, decoder: Decoder, more: dict[str, Any]
) -> None:
    assert text_of(server, **more) == decoder.generate("the cat", max_new_tokens=12).text
    response = post(server, RESPONSES, {"input": "hello", "max_output_tokens": 12} | more)
    if not more.keys() - {"temperature", "top_p"}:
        (item,) = response.json()["output"]
        assert item["content"][0]["text"] == decoder.chat(HELLO, max_new_tokens=12).text


def test_a_small_temperature_is_sampled(server: Live, decoder: Decoder) -> None:
    """It was refused below 0.001, where it is not greedy yet."""
    asked = {"temperature": 2e-5, "seed": 1}
    wanted = decoder.generate("the cat", max_new_tokens=12, **asked).text
    assert text_of(server, **asked) == wanted


# The end.


def test_an_answer_has_at_least_min_tokens(caller: Live) -> None:
    """Drafted or not, sampled or not; an end token ends it from then on."""
    ends = {str(tool_support.END): 100}
    for more in ({"temperature": 0}, {"seed": 1}, {"temperature": 0, "forerun_method": "ar"}):
        for count in (0, 1, 5):
            choice = chat(caller, min_tokens=count, logit_bias=ends, **more)
            assert choice["usage"]["completion_tokens"] == count + 1
            assert choice["finish_reason"] == "stop"


def test_any_token_may_end_an_answer(server: Live, decoder: Decoder) -> None:
    tokens = decoder.generate("the cat", max_new_tokens=12).tokens
    place = next(i for i in range(2, 12) if tokens[i] not in tokens[:i])
    wanted = decoder.tokenizer.decode([*decoder.tokenizer("the cat")["input_ids"], *tokens[:place]])
    for more in ({}, {"ignore_eos": True}, {"stream": True}):
        body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0} | more
        body["stop_token_ids"] = [tokens[place]]
        assert "the cat" + answered(post(server, PLAIN, body)) == wanted
    whole = post(server, PLAIN, body | {"stream": False}).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == place + 1
    held = post(server, PLAIN, body | {"stream": False, "min_tokens": place + 1}).json()
    assert held["usage"]["completion_tokens"] > place + 1  # until then it is not sampled


def test_min_tokens_hold_back_stop_strings(server: Live, decoder: Decoder) -> None:
    tokens = decoder.generate("the cat", max_new_tokens=12, ignore_eos=True).tokens
    texts = [decoder.tokenizer.decode(tokens[:n]) for n in range(13)]
    body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    tried = 0
    for end in range(2, 13):
        stop = texts[end][-2:]
        if not texts[end].startswith(texts[end - 1]) or texts[end].index(stop) < end - 2:
            continue
        first = next(n for n in range(13) if stop in texts[n])
        tried += 1
        for least in (first - 1, first, 12):
            ends = [n for n in range(least + 1, 13) if stop in texts[n][len(texts[n - 1]) - 1 :]]
            count = ends[0] if ends else 12
            place = texts[count].rindex(stop) if ends else None
            for more in ({}, {"stream": True}, {"forerun_method": "ar"}):
                asked = body | {"stop": [stop], "min_tokens": least} | more
                assert answered(post(server, PLAIN, asked)) == texts[count][:place]
            whole = post(server, PLAIN, body | {"stop": [stop], "min_tokens": least}).json()
            assert whole["usage"]["completion_tokens"] == count
    assert tried > 2


def test_errors_name_the_limit_as_the_client_does(server: Live) -> None:
    """OpenAI's newer name, in the message too."""
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"messages": HELLO, name: 4, "min_tokens": 5}
        error = refusal(post(server, CHAT, body))
        assert f"to {name}, which is 4" in error["message"] and error["param"] == "min_tokens"
        error = refusal(post(server, CHAT, {"messages": HELLO, name: 0}))
        assert error["param"] == name and error["message"].startswith(f"{name}: ")
    small = 300 * server.worker.engine.target.position_bytes
    with live(lambda: make_decoder(kv_memory=small)) as other:
        for name in ("max_tokens", "max_completion_tokens"):
            body = {"messages": HELLO, name: 400}
            assert refusal(post(other, CHAT, body))["param"] == name
        body = {"input": "hello", "max_output_tokens": 400}
        assert refusal(post(other, "/v1/responses", body))["param"] == "max_output_tokens"
    error = refusal(post(server, "/v1/responses", {"input": "hello", "max_output_tokens": 0}))
    assert error["message"].startswith("max_output_tokens: ")


def test_an_editor_may_send_many_stop_strings(server: Live) -> None:
    """Each of them is looked for, also the last one."""
    whole = text_of(server, temperature=0)
    place = len(whole) // 2
    stops = [*(f"<|{number}|>" for number in range(63)), whole[place:]]
    assert text_of(server, temperature=0, stop=stops) == whole[: whole.index(whole[place:])]


# Several answers, and none.


def test_the_best_answers_are_the_most_probable_ones(server: Live, decoder: Decoder) -> None:
    prompts = ["the cat", "low"]
    sampling = {"temperature": 2.0, "seed": 4}
    body = {"prompt": prompts, "max_tokens": 10, "ignore_eos": True} | sampling
    answer = post(server, PLAIN, body | {"n": 2, "best_of": 5}).json()
    rows = [prompt for prompt in prompts for _ in range(5)]
    outcomes = decoder.generate(rows, max_new_tokens=10, ignore_eos=True, **sampling)
    wanted = []
    for place, prompt in enumerate(prompts):
        texts = {
            mean_logprob(decoder, prompt, outcome.tokens): outcome.text
            for outcome in outcomes[5 * place : 5 * place + 5]
        }
        wanted += [texts[score] for score in sorted(texts, reverse=True)[:2]]
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 10
    error = refusal(post(server, PLAIN, body | {"n": 3, "best_of": 2}))
    assert error["param"] == "best_of"
    error = refusal(post(server, PLAIN, body | {"best_of": 2, "stream": True}))
    assert error["param"] == "best_of"
    same = post(server, PLAIN, body | {"n": 2, "best_of": 2, "stream": True})
    assert same.status_code == 200


def logits_of(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return decoder.target.model(input_ids=torch.tensor([tokens])).logits[0]


def mean_logprob(decoder: Decoder, text: str, tokens: list[int]) -> float:
    assert decoder.tokenizer is not None
    prompt = decoder.tokenizer(text)["input_ids"]
    logits = logits_of(decoder, [*prompt, *tokens])[len(prompt) - 1 : -1]
    scores = logprobs_of(logits, tokens, 0)
    return sum(score.logprob for score in scores) / len(scores)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_an_answer(server: Live, decoder: Decoder, stream: bool) -> None:
    """As evaluations of log likelihoods ask for it."""
    prompt = [5, 6, 7, 8, 9]
    body = {"prompt": [prompt, prompt[:3]], "max_tokens": 0, "echo": True, "logprobs": 1}
    response = post(server, PLAIN, body | {"stream": stream})
    chunks = events(response) if stream else [response.json()]
    choices = sorted(
        (choice for chunk in chunks for choice in chunk["choices"]), key=lambda one: one["index"]
    )
    assert len(choices) == 2
    logits = logits_of(decoder, prompt)
    for choice, row in zip(choices, body["prompt"], strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["text"] == decoder.tokenizer.decode(row)
        first, *values = choice["logprobs"]["token_logprobs"]
        scores = logprobs_of(logits[: len(row) - 1], row[1:], 0)
        assert first is None
        assert values == pytest.approx([score.logprob for score in scores], abs=1e-4)
    if not stream:
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == 0 and usage["prompt_tokens"] == 8
    only = post(server, PLAIN, {"prompt": "the cat", "max_tokens": 0, "echo": True}).json()
    assert only["choices"][0]["text"] == "the cat"
    assert refusal(post(server, PLAIN, {"prompt": "a", "max_tokens": 0}))["param"] == "max_tokens"


def test_a_prediction_is_ignored_with_figures_of_zero(server: Live) -> None:
    prediction = {"type": "content", "content": "the cat sat"}
    with_it = chat(server, prediction=prediction, temperature=0)
    without = chat(server, temperature=0)
    assert with_it["message"] == without["message"]
    details = with_it["usage"]["completion_tokens_details"]
    assert set(details.values()) == {0}


# Conversations.


def prompt_of(server: Live, decoder: Decoder, messages: Any) -> str:
    tokens = post(server, "/tokenize", {"messages": messages}).json()["tokens"]
    return str(decoder.tokenizer.decode(tokens))


ANSWER = {"role": "assistant", "content": "low"}


@pytest.mark.parametrize(
    "message",
    [
        ANSWER | {"reasoning_content": "hm"},
        ANSWER | {"reasoning": "hm"},
        ANSWER | {"refusal": None, "audio": None, "function_call": None, "annotations": []},
        ANSWER | {"refusal": "no", "annotations": [{"type": "url_citation"}]},
        ANSWER | {"provider_specific_fields": {"a": 1}, "id": "x", "name": None},
        {"role": "assistant", "content": None, "refusal": "low"},
    ],
    ids=str,
)
def test_what_answers_bring_back_is_no_error(
    server: Live, decoder: Decoder, message: dict[str, Any]
) -> None:
    assert prompt_of(server, decoder, [message, *HELLO]) == prompt_of(
        server, decoder, [ANSWER, *HELLO]
    )
    assert chat(server, [message, *HELLO])


def test_unknown_keys_of_messages_are_named_in_the_log(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        chat(server, [HELLO[0] | {"cache": 1}, ANSWER, *HELLO])
    assert "'messages.cache'" in caplog.text


def test_thoughts_are_for_templates_that_take_them() -> None:
    def thinking() -> Decoder:
        decoder = make_decoder()
        decoder.tokenizer.chat_template = TEMPLATE.replace(
            "{{ m['content'] }}",
            "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m['content'] }}",
        )
        return decoder

    with live(thinking) as server:
        for name in ("reasoning_content", "reasoning"):
            text = prompt_of(server, thinking(), [ANSWER | {name: "hm"}, *HELLO])
            assert text == "<|assistant|>(hm)low\n<|user|>hello\n<|assistant|>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "", "tool_calls": None},
        {"role": "assistant"},
    ],
    ids=str,
)
def test_an_answer_without_content_is_empty(
    server: Live, decoder: Decoder, message: dict[str, Any]
) -> None:
    text = prompt_of(server, decoder, [*HELLO, message, *HELLO])
    assert text == "<|user|>hello\n<|assistant|>\n<|user|>hello\n<|assistant|>"


ENDS = [
    ({}, "<|user|>hello\n<|assistant|>low"),
    ({"continue_final_message": True}, "<|user|>hello\n<|assistant|>low"),
    (
        {"continue_final_message": True, "add_generation_prompt": False},
        "<|user|>hello\n<|assistant|>low",
    ),
    ({"add_generation_prompt": True}, "<|user|>hello\n<|assistant|>low\n<|assistant|>"),
    ({"continue_final_message": False}, "<|user|>hello\n<|assistant|>low\n<|assistant|>"),
    ({"add_generation_prompt": False}, "<|user|>hello\n<|assistant|>low\n"),
]


@pytest.mark.parametrize(("more", "prompt"), ENDS, ids=str)
def test_a_last_answer_goes_on(
    server: Live, decoder: Decoder, more: dict[str, Any], prompt: str
) -> None:
    """Only the new text is answered, as other servers do."""
    wanted = decoder.generate(prompt, max_new_tokens=8).text
    choice = chat(server, [*HELLO, ANSWER], temperature=0, **more)
    assert choice["message"]["content"] == wanted
    tokens = post(server, "/tokenize", {"messages": [*HELLO, ANSWER]} | more).json()["tokens"]
    assert tokens == decoder.tokenizer(prompt)["input_ids"]


def test_ends_of_other_conversations(server: Live, decoder: Decoder) -> None:
    asked = {"temperature": 0, "max_tokens": 8}
    wanted = decoder.chat(HELLO, max_new_tokens=8).text
    empty = {"role": "assistant", "content": ""}
    assert chat(server, [*HELLO, empty], **asked)["message"]["content"] == wanted
    assert (
        decoder.chat([*HELLO, ANSWER], max_new_tokens=8).text
        == decoder.generate("<|user|>hello\n<|assistant|>low", max_new_tokens=8).text
    )
    closed = chat(server, add_generation_prompt=False, **asked)["message"]["content"]
    assert closed == decoder.generate("<|user|>hello\n", max_new_tokens=8).text
    users = chat(server, continue_final_message=True, **asked)["message"]["content"]
    assert users == decoder.generate("<|user|>hello", max_new_tokens=8).text
    both = {"add_generation_prompt": True, "continue_final_message": True}
    error = refusal(post(server, CHAT, {"messages": [*HELLO, ANSWER]} | both))
    assert error["param"] == "messages" and "exclude each other" in error["message"]
    items = [HELLO[0], ANSWER]
    response = post(server, RESPONSES, {"input": items, "max_output_tokens": 8, "temperature": 0})
    (item,) = response.json()["output"]
    wanted = decoder.generate("<|user|>hello\n<|assistant|>low", max_new_tokens=8).text
    assert item["content"][0]["text"] == wanted


def beginning() -> Decoder:
    """A decoder whose tokenizer puts a begin token before every text."""
    decoder = make_decoder()
    tokenizer: Any = decoder.tokenizer
    begin = tokenizer.all_special_tokens[0]
    tokenizer.bos_token = begin
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        f"{begin} $A", f"{begin} $A $B", [(begin, tokenizer.bos_token_id)]
    )
    return decoder


def test_a_prompt_has_one_begin_token() -> None:
    """Many clients write it themselves, since the chat templates of their models do."""
    tokenizer: Any = beginning().tokenizer
    begin = tokenizer.bos_token
    plain = tokenizer("the cat")["input_ids"]
    assert plain[0] == tokenizer.bos_token_id != plain[1]
    with live(beginning) as server:
        for text in ("the cat", begin + "the cat"):
            assert post(server, "/tokenize", {"prompt": text}).json()["tokens"] == plain
            body = {"prompt": text, "max_tokens": 1, "temperature": 0}
            assert post(server, PLAIN, body).json()["usage"]["prompt_tokens"] == len(plain)
        twice = {"prompt": begin * 2 + "the cat"}  # who writes two wants two
        assert len(post(server, "/tokenize", twice).json()["tokens"]) == len(plain) + 1


# A server whose model calls tools.

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def caller() -> Iterator[Live]:
    with live(tool_support.make_decoder) as server:
        yield server


# The address.


def test_paths_without_v1_are_the_same(server: Live) -> None:
    """Clients send them if their URL ends before it, as it does with llama.cpp's server."""
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 6}
    short = post(server, CHAT.removeprefix("/v1"), body)
    assert short.json()["choices"] == post(server, CHAT, body).json()["choices"]
    plain = {"prompt": "the cat", "temperature": 0}
    assert answered(post(server, PLAIN.removeprefix("/v1"), plain)) == text_of(
        server, temperature=0, max_tokens=16
    )
    assert post(server, "/responses", {"input": "hello"}).json()["object"] == "response"
    assert get(server, "/models").json() == get(server, "/v1/models").json()
    assert get(server, "/v1/v1/models").status_code == 404
    assert get(server, "/other").status_code == 404


def test_paths_without_v1_need_the_key_too() -> None:
    with live(make_decoder, api_key="secret") as server:
        assert get(server, "/models").status_code == 401
