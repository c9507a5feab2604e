"""Ollama's API through its own client: the answers of chats and plain prompts in other words."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from ollama import _utils
from tokenizers import AddedToken

from forerun.api.decoder import Decoder
from forerun.server import answers
from forerun.server.ollama_messages import conversation
from tests.support.local import LOCAL
from tests.support.serving import (
    CHAT,
    HELLO,
    NAME,
    PLAIN,
    Live,
    get,
    held,
    live,
    make_decoder,
    make_filler,
    post,
    sent,
    served,
)
from tests.support.tools import END, TEMPLATES, scripted
from tests.support.tools import make_decoder as make_caller
from tests.support.toys import noisy_copy, tiny, tiny_tokenizer

API_CHAT, API_GENERATE = "/api/chat", "/api/generate"
GREEDY = {"temperature": 0, "num_predict": 12}
# What Ollama does where an option is absent.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
FIGURES = {
    "done_reason",
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
caller = served(make_caller)


def thinker(switch: str = SWITCH) -> Decoder:
    """With tokens for the marks of thoughts, which its template keeps and may switch off."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    marks = ("<think>", "</think>")
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    kept = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    said = "<|{{ m.role }}|>"
    tokenizer.chat_template = TEMPLATES["hermes"].replace(said, said + kept) + switch
    target = tiny("llama", vocab=304, context=1024)
    target.generation_config.eos_token_id = END
    return Decoder(target, tokenizer, noisy_copy(target, 0.02), guard=False)


thinking = served(thinker)


def client_of(server: Live, **options: Any) -> ollama.Client:
    return ollama.Client(host=server.url, **LOCAL, **options)


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[ollama.Client]:
    with client_of(server) as found:
        yield found


@pytest.fixture(scope="module")
def caller_client(caller: Live) -> Iterator[ollama.Client]:
    with client_of(caller) as found:
        yield found


@pytest.fixture(scope="module")
def thinking_client(thinking: Live) -> Iterator[ollama.Client]:
    with client_of(thinking) as found:
        yield found


def records(response: httpx.Response) -> list[dict[str, Any]]:
    """The records of a stream, of which the last alone has figures and has no text."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    parts = [json.loads(line) for line in response.text.splitlines()]
    assert all(part["model"] == NAME and part["created_at"].endswith("Z") for part in parts)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [bool(FIGURES & part.keys()) for part in parts] == [part["done"] for part in parts]
    assert parts[-1].get("message", parts[-1]).get("content", parts[-1].get("response")) == ""
    return parts


def failed(response: httpx.Response, status: int = 400) -> str:
    """The text of an error, which is all that there is."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert [*response.json()] == ["error"] and isinstance(error, str) and error
    return error


# Answers.

SAMPLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"seed": 3}, DEFAULTS),
    ({"seed": 3, "temperature": 1.5, "top_p": 0.5, "top_k": 7, "min_p": 0.01}, {}),
    ({"seed": 3, "top_k": 0, "top_p": 1.0, "typical_p": 0.3, "temperature": 1.5}, {}),
    ({"temperature": 0, "repeat_penalty": 1.6, "repeat_last_n": -1}, {}),
    ({"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 1.5}, {}),
]


@pytest.mark.parametrize(("options", "more"), SAMPLINGS, ids=lambda fields: ",".join(fields))
def test_an_answer_is_a_chats(
    server: Live, client: ollama.Client, options: dict[str, Any], more: dict[str, Any]
) -> None:
    """Token by token, with the option in the place of the field, and its counts."""
    chat = post(server, CHAT, {"messages": HELLO, "max_tokens": 12} | more | options).json()
    wanted = chat["choices"][0]["message"]["content"]
    asked: dict[str, Any] = {"options": options | {"num_predict": 12}}
    whole = client.chat(NAME, HELLO, **asked)
    assert whole.message.content == wanted and whole.message.role == "assistant"
    assert whole.done and whole.done_reason == "length"
    parts = list(client.chat(NAME, HELLO, stream=True, **asked))
    assert "".join(part.message.content or "" for part in parts) == wanted and len(parts) > 2
    answer = client.generate(NAME, "hello", **asked)
    assert answer.response == wanted
    for found in (whole, parts[-1], answer):
        assert found.eval_count == chat["usage"]["completion_tokens"] == 12
        assert found.prompt_eval_count == chat["usage"]["prompt_tokens"]


def test_options_change_what_a_chat_says(server: Live) -> None:
    """So that the test above would notice a lost one."""
    bodies = [{"messages": HELLO, "max_tokens": 12} | more | given for given, more in SAMPLINGS]
    bodies += [{"messages": HELLO, "max_tokens": 12, "seed": 3}]
    texts = [post(server, CHAT, body).json()["choices"][0]["message"]["content"] for body in bodies]
    assert len(set(texts)) == len(texts)


def test_a_stream_is_lines_and_its_last_one_has_the_figures(server: Live) -> None:
    body = {"model": NAME, "messages": HELLO, "options": GREEDY}
    parts = records(post(server, API_CHAT, body))  # a stream is the default
    assert records(post(server, API_CHAT, body | {"stream": None}))
    whole = post(server, API_CHAT, body | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert (
        "".join(part["message"]["content"] for part in parts)
        == (whole.json()["message"]["content"])
    )
    for last in (parts[-1], whole.json()):
        assert last.keys() >= FIGURES
        times = [last[name] for name in FIGURES if name.endswith("_duration")]
        assert all(isinstance(time, int) and time >= 0 for time in times)
        spent = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
        assert last["eval_duration"] > 0 and spent <= last["total_duration"]
    generated = records(post(server, API_GENERATE, {"prompt": "hello", "options": GREEDY}))
    assert all("response" in part and "message" not in part for part in generated)


def test_a_system_prompt_and_raw_prompts(server: Live, client: ollama.Client) -> None:
    messages = [{"role": "system", "content": "be short"}, *HELLO]
    chat = post(server, CHAT, {"messages": messages, "max_tokens": 12, "temperature": 0}).json()
    answer = client.generate(NAME, "hello", system="be short", options=GREEDY)
    assert answer.response == chat["choices"][0]["message"]["content"]
    assert answer.prompt_eval_count == chat["usage"]["prompt_tokens"]
    plain = post(server, PLAIN, {"prompt": "the cat", "max_tokens": 12, "temperature": 0}).json()
    raw = client.generate(NAME, "the cat", raw=True, options=GREEDY)
    assert raw.response == plain["choices"][0]["text"] and raw.done_reason == "length"


def test_a_model_without_a_chat_template_continues_prompts(client: ollama.Client) -> None:
    def plain() -> Decoder:
        decoder = make_decoder()
        assert decoder.tokenizer is not None
        decoder.tokenizer.chat_template = None
        return decoder

    wanted = client.generate(NAME, "the cat", raw=True, options=GREEDY).response
    with live(plain) as server:
        body = {"prompt": "the cat", "options": GREEDY, "stream": False}
        assert post(server, API_GENERATE, body).json()["response"] == wanted
        assert "chat template" in failed(post(server, API_GENERATE, body | {"system": "a"}))
        assert "chat template" in failed(post(server, API_CHAT, {"messages": HELLO}))
        shown = post(server, "/api/show", {"model": NAME}).json()
        assert shown["template"] == "" and shown["capabilities"] == ["completion"]


def test_an_answer_goes_on_to_its_end() -> None:
    """Without `num_predict` the context is the only limit; stop strings end it before that."""
    with live(lambda: make_filler(context=64)) as server, client_of(server) as client:
        body = {"messages": HELLO, "max_tokens": -1, "temperature": 0}
        chat = post(server, CHAT, body).json()
        wanted = chat["choices"][0]
        for limit in ({}, {"num_predict": -1}, {"num_predict": -2}):
            answer = client.chat(NAME, HELLO, options={"temperature": 0} | limit)
            assert answer.message.content == wanted["message"]["content"]
            assert answer.done_reason == wanted["finish_reason"]
            assert answer.eval_count == chat["usage"]["completion_tokens"] > 16
        text = str(wanted["message"]["content"])
        (end,) = re.findall("[ -~]{2}", text)[3:4]
        for stop in (end, [end, "never"]):
            options = {"temperature": 0, "stop": stop}
            body = {"messages": HELLO, "options": options, "stream": False}
            found = post(server, API_CHAT, body).json()
            assert found["message"]["content"] == text[: text.index(end)]
            assert found["done_reason"] == "stop"


def test_the_middle_is_filled_in() -> None:
    with live(make_filler) as server:
        body = {"prompt": "the cat", "suffix": "the mat", "temperature": 0, "max_tokens": 8}
        wanted = post(server, PLAIN, body).json()["choices"][0]["text"]
        options = {"temperature": 0, "num_predict": 8}
        for raw in ({}, {"raw": True}):
            body = {"prompt": "the cat", "suffix": "the mat", "options": options, "stream": False}
            assert post(server, API_GENERATE, body | raw).json()["response"] == wanted
        assert "insert" in post(server, "/api/show", {"model": NAME}).json()["capabilities"]


def test_log_probabilities_are_a_chats(server: Live, client: ollama.Client) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0} | asked
    wanted = post(server, CHAT, body).json()["choices"][0]["logprobs"]["content"]
    body = {"messages": HELLO, "options": GREEDY} | asked
    assert post(server, API_CHAT, body | {"stream": False}).json()["logprobs"] == wanted
    parts = records(post(server, API_CHAT, body))
    assert [entry for part in parts for entry in part.get("logprobs", ())] == wanted
    (first, *_) = client.chat(NAME, HELLO, stream=True, options=GREEDY, **asked)  # type: ignore[call-overload]
    assert first.logprobs[0].top_logprobs[0].logprob == wanted[0]["top_logprobs"][0]["logprob"]
    raw = client.generate(NAME, "the cat", raw=True, options=GREEDY, logprobs=True)
    assert len(raw.logprobs or ()) == 12


# Forms, tools and thoughts.

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}


def test_a_form_holds(server: Live, client: ollama.Client) -> None:
    pytest.importorskip("llguidance")
    for seed in range(3):
        options = {"seed": seed, "num_predict": 200}
        answer = client.chat(NAME, HELLO, format=SCHEMA, options=options)
        assert [*json.loads(answer.message.content or "")] == ["age"]
        prompted = client.generate(NAME, "hello", format=SCHEMA, options=options)
        assert [*json.loads(prompted.response)] == ["age"]
    body = {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 30}
    chat = post(server, CHAT, body | {"temperature": 0}).json()["choices"][0]
    answer = client.chat(NAME, HELLO, format="json", options=GREEDY | {"num_predict": 30})
    assert answer.message.content == chat["message"]["content"]
    assert (answer.message.content or "").lstrip().startswith("{")
    assert client.chat(NAME, HELLO, format="", options=GREEDY).message.content


def count(x: int) -> str:
    """Count.

    Args:
        x: how far
    """
    return str(x)


@pytest.mark.slow
def test_tools_are_called_and_answer(
    caller: Live, caller_client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls come whole, with arguments as objects; what the tool says goes back to the model."""
    call = '<tool_call>\n{"name": "count", "arguments": {"x": 12}}\n</tool_call>'
    says = scripted(lambda prompt: "So 12." if "twelve" in prompt else f"I count.\n{call}\n{call}")
    monkeypatch.setattr("forerun.server.parameters.requests", says)
    client = caller_client
    asked: dict[str, Any] = {"tools": [count]}
    first = client.chat(NAME, HELLO, **asked)
    calls = first.message.tool_calls or []
    assert first.message.content == "I count." and first.done_reason == "stop"
    assert [(tool_call.function.name, tool_call.function.arguments) for tool_call in calls] == [
        ("count", {"x": 12})
    ] * 2
    parts = list(client.chat(NAME, HELLO, stream=True, **asked))
    streamed = [tool_call for part in parts for tool_call in part.message.tool_calls or ()]
    assert [tool_call.function.arguments for tool_call in streamed] == [{"x": 12}] * 2
    assert "".join(part.message.content or "" for part in parts) == "I count."
    function = _utils.convert_function_to_tool(count).model_dump(exclude_none=True)["function"]
    tools = [{"type": "function", "function": function}]
    body = {"messages": HELLO, "tools": tools}
    raw = post(caller, API_CHAT, body | {"stream": False}).json()["message"]["tool_calls"]
    assert [tool_call["function"]["index"] for tool_call in raw] == [0, 1]
    assert len({tool_call["id"] for tool_call in raw}) == 2
    results = [{"role": "tool", "content": "twelve", "tool_name": "count"}] * 2
    messages: list[Any] = [*HELLO, first.message, *results]
    again = client.chat(NAME, messages, **asked)
    assert again.message.content == "So 12." and not again.message.tool_calls
    told = [
        {"id": str(at), "function": {"name": "count", "arguments": '{"x": 12}'}} for at in (1, 2)
    ]
    answered = [{"role": "tool", "content": "twelve", "tool_call_id": str(at)} for at in (1, 2)]
    spoken = {"role": "assistant", "content": "I count.", "tool_calls": told}
    chat = post(caller, CHAT, {"messages": [*HELLO, spoken, *answered], "tools": tools}).json()
    assert again.prompt_eval_count == chat["usage"]["prompt_tokens"]
    assert "tools" in client.show(NAME).capabilities


def test_results_find_their_calls() -> None:
    """By the function's name, else in order; ids that are given stay."""

    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {}}, **more}

    messages = conversation(
        [
            {"role": "assistant", "tool_calls": [call("a"), call("b", id="mine"), call("c")]},
            {"role": "tool", "content": "of c", "tool_name": "c"},
            {"role": "tool", "content": "of b", "tool_call_id": "mine"},
            {"role": "tool", "content": "of a"},
            {"role": "assistant", "content": "x", "thinking": "hm", "tool_calls": [call("a")]},
            {"role": "tool", "content": "of a again", "tool_name": "a"},
            {"role": "tool", "content": "of nothing"},
        ]
    )
    first, of_c, of_b, of_a, second, again, lost = messages
    ids = [each["id"] for each in first["tool_calls"]]
    assert ids == ["call00000", "mine", "call00002"] and second["reasoning_content"] == "hm"
    assert [each["tool_call_id"] for each in (of_a, of_b, of_c)] == ids
    assert second["tool_calls"][0]["id"] == again["tool_call_id"] == "call00003"
    assert lost["tool_call_id"] is None and of_c["name"] == "c"
    assert conversation("no list") == "no list" and conversation([5]) == [5]


def test_thoughts_are_apart(
    thinking_client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []

    def say(prompt: str) -> str:
        prompts.append(prompt)
        return "<think>\nhm, so\n</think>\n\nYes."

    monkeypatch.setattr("forerun.server.parameters.requests", scripted(say))
    client = thinking_client
    for think in (None, True, "low"):
        answer = client.chat(NAME, HELLO, think=think)  # type: ignore[call-overload]
        assert (answer.message.thinking, answer.message.content) == ("hm, so", "Yes.")
        assert prompts[-1].endswith("<|assistant|>")
    parts = list(client.chat(NAME, HELLO, think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "hm, so"
    assert "".join(part.message.content or "" for part in parts) == "Yes."
    generated = client.generate(NAME, "hello", think=True)
    assert (generated.thinking, generated.response) == ("hm, so", "Yes.")
    client.chat(NAME, HELLO, think=False)
    assert prompts[-1].endswith("<think>\n\n</think>\n\n")
    client.chat(NAME, [*HELLO, answer.message, *HELLO])
    assert "<think>hm, so</think>Yes." in prompts[-1]
    assert "thinking" in client.show(NAME).capabilities


def test_who_thinks_always_may_be_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that names the marks and has no switch belongs to such a model."""
    monkeypatch.setattr("forerun.server.parameters.requests", scripted(lambda prompt: "Yes."))
    with live(lambda: thinker("")) as server:
        body = {"messages": HELLO, "stream": False}
        for think in (True, False):
            answer = post(server, API_CHAT, body | {"think": think}).json()
            assert answer["message"]["content"] == "Yes."


# What is refused.

IMAGE = [{"role": "user", "content": "a", "images": ["aGk="]}]
BAD: list[tuple[str, str, Any]] = [
    (API_CHAT, "messages", 5),
    (API_CHAT, "messages", [5]),
    (API_CHAT, "role", [{"role": "robot", "content": "a"}]),
    (API_CHAT, "images", IMAGE),
    (API_CHAT, "tools", 5),
    (API_CHAT, "tools", [{"type": "web_search"}]),
    (API_CHAT, "tool_choice", "required"),
    (API_CHAT, "think", True),
    (API_CHAT, "think", "high"),
    (API_CHAT, "think", 5),
    (API_CHAT, "think", ""),
    (API_CHAT, "format", "yaml"),
    (API_CHAT, "format", 5),
    (API_CHAT, "temperature", 0.5),
    (API_CHAT, "stream", "yes"),
    (API_CHAT, "top_logprobs", 2),
    (API_CHAT, "options", 5),
    (API_GENERATE, "prompt", 5),
    (API_GENERATE, "suffix", "b"),
    (API_GENERATE, "images", ["aGk="]),
    (API_GENERATE, "template", "{{ .Prompt }}"),
    (API_GENERATE, "context", [1, 2]),
    (API_GENERATE, "messages", HELLO),
    (API_GENERATE, "think", True),
    (API_GENERATE, "options", 5),
]
BAD_OPTIONS: list[tuple[str, Any]] = [
    ("num_predict", 0),
    ("num_predict", -3),
    ("num_predict", 1.5),
    ("num_ctx", 513),
    ("num_ctx", 0),
    ("temperature", -1),
    ("top_p", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("seed", -2),
    ("stop", ""),
    ("stop", 5),
    ("repeat_penalty", 0),
    ("presence_penalty", 3),
    ("mirostat", 1),
    ("penalize_newline", False),
]


@pytest.mark.parametrize(("path", "field", "value"), BAD)
def test_bad_fields_are_named(server: Live, path: str, field: str, value: Any) -> None:
    body: dict[str, Any] = {"messages": HELLO} if path == API_CHAT else {"prompt": "hello"}
    name = "messages" if isinstance(value, list) and value in (IMAGE, BAD[2][2]) else field
    for stream in (True, False):
        assert field in failed(post(server, path, body | {"stream": stream} | {name: value}))


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS)
def test_bad_options_are_named(server: Live, option: str, value: Any) -> None:
    options = {option: value}
    assert option in failed(post(server, API_CHAT, {"messages": HELLO, "options": options}))
    assert option in failed(post(server, API_GENERATE, {"prompt": "a", "options": options}))


def test_fields_that_exclude_each_other(server: Live) -> None:
    for more in ({"system": "a"}, {"think": True}):
        (name,) = more
        assert name in failed(post(server, API_GENERATE, {"prompt": "a", "raw": True} | more))
    options = {"repeat_penalty": 1.2, "repeat_last_n": 64}
    body = {"messages": HELLO, "options": options}
    assert "repeat_last_n" in failed(post(server, API_CHAT, body))


def test_an_answer_that_memory_cannot_hold_is_refused() -> None:
    """The option is named, also where the engine refuses what was read."""
    size = make_decoder().target.position_bytes
    with live(lambda: make_decoder(kv_memory=300 * size)) as server:
        body: dict[str, Any] = {"messages": HELLO, "options": {"num_predict": 400}}
        assert failed(post(server, API_CHAT, body)).startswith("num_predict: ")
        assert records(post(server, API_CHAT, body | {"options": {}}))[-1]["done"]


def test_what_changes_no_answer_is_accepted(
    server: Live, client: ollama.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings of loading, and floats without a fraction for integers."""
    wanted = client.chat(NAME, HELLO, options=GREEDY).message.content
    options = {
        "temperature": 0,
        "num_predict": 12.0,
        "num_ctx": 512.0,
        "num_gpu": 99,
        "num_thread": 8,
        "num_batch": 512,
        "num_keep": 5,
        "use_mmap": True,
        "mirostat": 0,
        "tfs_z": 1.0,
        "penalize_newline": True,
        "repeat_penalty": 1.0,
        "repeat_last_n": 64,
        "seed": -1,
        "top_p": None,
        "wings": 2,
    }
    more = {"keep_alive": "5m", "truncate": True, "shift": True, "think": False, "tools": []}
    messages = [HELLO[0] | {"images": [], "tool_calls": None, "mood": "good"}]
    body = {"messages": messages, "options": options, "stream": False, "hat": 1} | more
    with caplog.at_level("INFO"):
        answer = post(server, API_CHAT, body).json()
    assert answer["message"]["content"] == wanted
    assert "unknown fields: 'hat', 'options.wings', 'messages.mood'" in caplog.text
    assert client.chat(NAME, HELLO, options=GREEDY, keep_alive=0).message.content == wanted


def test_errors_are_a_text(server: Live, client: ollama.Client) -> None:
    """Wherever they arise."""
    with pytest.raises(ollama.ResponseError, match="does not exist here") as caught:
        client.chat("other", HELLO)
    assert caught.value.status_code == 404 and isinstance(caught.value.error, str)
    with pytest.raises(ollama.ResponseError, match="does not exist here"):
        client.show("other")
    assert failed(post(server, "/api/pull", {"model": "a"}), 404)
    assert failed(get(server, API_CHAT), 405)
    assert "JSON" in failed(sent(server, API_CHAT, b"{"))
    assert failed(sent(server, API_CHAT, b"a" * (2**21 + 1)), 413)
    assert "context" in failed(post(server, API_CHAT, {"messages": [HELLO[0]] * 400}))
    with live(api_key="secret") as locked:
        assert "API key" in failed(get(locked, "/api/tags"), 401)
        with client_of(locked, headers={"authorization": "Bearer secret"}) as allowed:
            assert allowed.list().models


def test_an_error_in_a_stream_is_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with live() as server:
        monkeypatch.setattr(server.worker.engine.target, "forward", lambda *_, **__: 1 / 0)
        lines = post(server, API_CHAT, {"messages": HELLO}).text.splitlines()
        assert [*json.loads(lines[-1])] == ["error"]
        with (
            client_of(server) as client,
            pytest.raises(ollama.ResponseError, match="decoding failed"),
        ):
            list(client.chat(NAME, HELLO, stream=True))
        assert failed(post(server, API_CHAT, {"messages": HELLO, "stream": False}), 500)


def test_a_record_without_text_keeps_a_connection_open(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE", 0.02)
    body = {"messages": HELLO, "options": GREEDY}
    with (
        held(server.worker.engine) as go,
        httpx.stream("POST", server.url + API_CHAT, json=body, **LOCAL) as response,
    ):
        lines = response.iter_lines()
        first = json.loads(next(lines))
        assert first["message"] == {"role": "assistant", "content": ""} and not first["done"]
        go.set()
        assert json.loads([*lines][-1])["eval_count"] == 12


# Vectors.


def test_vectors_are_those_of_openais_api(server: Live, client: ollama.Client) -> None:
    texts = ["the cat", "def add(a, b):", "the cat"]
    body = {"input": texts, "model": NAME}
    wanted = post(server, "/v1/embeddings", body).json()
    vectors = [each["embedding"] for each in wanted["data"]]
    many = client.embed(NAME, texts)
    assert [[*vector] for vector in many.embeddings] == vectors and vectors[0] != vectors[1]
    assert many.model == NAME and many.prompt_eval_count == wanted["usage"]["prompt_tokens"]
    assert (many.total_duration or 0) > (many.load_duration or 0) > 0
    one = client.embed(f"{NAME}:latest", texts[1], dimensions=len(vectors[1]), keep_alive="5m")
    assert [[*vector] for vector in one.embeddings] == [vectors[1]]
    assert [*client.embeddings(NAME, texts[1]).embedding] == vectors[1]  # of older clients


def test_a_text_that_is_too_long_for_a_vector_is_cut(server: Live, client: ollama.Client) -> None:
    decoder = server.worker.decoder
    assert decoder is not None and decoder.tokenizer is not None and decoder.target.context == 512
    longest = "€a" * 512  # more tokens than characters
    tokens = decoder.tokenizer(longest)["input_ids"][:511]
    wanted = post(server, "/v1/embeddings", {"input": tokens}).json()["data"][0]["embedding"]
    cut = client.embed(NAME, [longest, "a"])
    assert [*cut.embeddings[0]] == wanted and cut.prompt_eval_count == 512
    assert [*client.embed(NAME, "€a" * 100_000, truncate=True).embeddings[0]] == wanted
    with pytest.raises(ollama.ResponseError, match=r"input: prompt 0 has .* tokens"):
        client.embed(NAME, longest, truncate=False)


def test_nothing_has_no_vector_and_mistakes_are_named(server: Live, client: ollama.Client) -> None:
    assert [*client.embed(NAME).embeddings] == [*client.embed(NAME, []).embeddings] == []
    assert [*client.embeddings(NAME).embedding] == []
    for body, words in (
        ({"input": 5}, "input"),
        ({"input": [[5]]}, "input"),
        ({"input": ["a", ""]}, "input: prompt 1 is empty"),
        ({"input": "a", "dimensions": 5}, "dimensions must be 32"),
        ({"input": "a", "options": {"num_ctx": 513}}, "num_ctx"),
        ({"input": "a", "options": {"mirostat": 1}}, "mirostat"),
        ({"input": "a", "stop": ["a"]}, "stop"),
    ):
        assert words in failed(post(server, "/api/embed", body))
    assert "input" in failed(sent(server, "/api/embed", b'{"input": "\\ud800"}'))
    assert "input" in failed(sent(server, "/api/embed", {"input": "\ud800" * 600}))
    assert failed(post(server, "/api/embed", {"input": "a", "model": "other"}), 404)
    assert failed(post(server, "/api/embeddings", {"prompt": 5}))


# Facts.


def test_a_request_of_nothing_says_that_the_model_is_loaded(
    server: Live, client: ollama.Client
) -> None:
    for answer in (client.generate(NAME), client.chat(NAME), client.generate(NAME, keep_alive=0)):
        assert answer.done and answer.done_reason == "load"
    for path, body in ((API_CHAT, {"messages": []}), (API_GENERATE, {"prompt": ""})):
        assert post(server, path, body).json()["done_reason"] == "load"
    assert post(server, API_CHAT, {"messages": []}).json()["message"]["content"] == ""
    assert failed(post(server, API_CHAT, {"model": "other"}), 404)
    for field, value in (("tools", [None]), ("format", 5), ("options", {"num_ctx": 513})):
        name = "num_ctx" if field == "options" else field
        assert name in failed(post(server, API_CHAT, {"messages": [], field: value}))
    assert "images" in failed(post(server, API_GENERATE, {"images": [None]}))


def test_the_model_may_be_named_with_a_tag(client: ollama.Client) -> None:
    for name in (NAME, f"{NAME}:latest"):
        assert client.chat(name, HELLO, options=GREEDY).model == NAME
        assert client.show(name).details
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.chat(f"{NAME}:other", HELLO)


def test_the_model_is_described(server: Live, client: ollama.Client) -> None:
    target = server.worker.decoder.target  # type: ignore[union-attr]
    count = sum(parameter.numel() for parameter in target.model.parameters())
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    shown = client.show(NAME)
    for model in (listed, loaded):
        assert model.model == NAME and model.details == shown.details
        assert model.size == 4 * count and len(model.digest or "") == 64
    assert loaded.digest == listed.digest and loaded.context_length == 512
    assert loaded.size_vram == 0 and loaded.expires_at is not None
    details = shown.details
    assert details is not None and details.family == "llama" and details.families == ["llama"]
    assert details.quantization_level == "F32" and details.format == "safetensors"
    assert details.parameter_size == f"{count / 1000:.1f}K"
    info = shown.modelinfo or {}
    assert info["general.architecture"] == "llama"
    assert info["general.parameter_count"] == count
    assert info["llama.context_length"] == 512 and info["llama.vocab_size"] == 300
    assert info["llama.block_count"] == len(target.model.model.layers)
    assert shown.template == server.worker.decoder.tokenizer.chat_template  # type: ignore[union-attr]
    assert shown.capabilities == ["completion", "tools"]
    numbers = [int(part) for part in get(server, "/api/version").json()["version"].split(".")]
    assert numbers >= [0, 6, 4]  # what editors ask for


def test_facts_wait_for_the_model(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "draining", True)
    for path in ("/api/tags", "/api/ps"):
        assert failed(get(server, path), 503)
    assert failed(post(server, "/api/show", {"model": NAME}), 503)
    assert get(server, "/api/version").status_code == 200


def test_a_body_needs_no_content_type(server: Live) -> None:
    """curl sends none of JSON. Pages of other sites cannot send such a body."""
    body = json.dumps({"messages": HELLO, "options": GREEDY, "stream": False}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (form, {}, {"content-type": "text/plain"}):
        response = httpx.post(server.url + API_CHAT, content=body, headers=headers, **LOCAL)
        assert response.status_code == 200 and response.json()["eval_count"] == 12
        headers = headers | {"origin": "http://elsewhere"}
        response = httpx.post(server.url + API_CHAT, content=body, headers=headers, **LOCAL)
        assert failed(response)
