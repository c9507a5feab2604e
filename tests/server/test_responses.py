"""/v1/responses: the answers of chats in other words, as items and events, and what is refused."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.support.serving import (
    CHAT,
    HELLO,
    NAME,
    Live,
    client_of,
    live,
    make_decoder,
    post,
    refusal,
    sent,
    served,
)
from tests.support.tools import make_decoder as make_caller
from tests.support.tools import scripted

RESPONSES = "/v1/responses"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
}
COUNT: dict[str, Any] = {
    "type": "function",
    "name": "count",
    "description": "Count.",
    "parameters": SCHEMA,
}
CALL = '<tool_call>\n{"name": "count", "arguments": {"x": 12}}\n</tool_call>'
caller = served(make_caller)


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with client_of(server) as found:
        yield found


def streamed(server: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each named twice, with numbers in order."""
    response = post(server, RESPONSES, body | {"stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith(
        "text/event-stream"
    ), response.text
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [each["type"] for each in told]
    assert [each["sequence_number"] for each in told] == list(range(len(told)))
    return told


def test_a_response_is_a_chats_answer(server: Live, client: openai.OpenAI) -> None:
    """A response has the text of a chat's answer, greedily, with drafts and without.

    Usage has its own shape; statistics are those of chats.
    """
    wanted = make_decoder().chat(HELLO, max_new_tokens=20)
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 20}
    message = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "hello"}],
    }
    for given in ("hello", HELLO, [message]):
        answer = client.responses.create(input=given, **asked)  # type: ignore[call-overload]
        assert (
            answer.output_text == wanted.text
            and answer.status == "incomplete"
            and answer.error is None
        )
        assert (
            answer.incomplete_details.reason == "max_output_tokens"
            and answer.output[0].status == "incomplete"
        )
    body = {"input": "hello", "temperature": 0, "max_output_tokens": 20}
    drafted, plain = (
        post(server, RESPONSES, body | {"forerun_method": each}).json() for each in (None, "ar")
    )
    chat = post(server, CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 20}).json()
    Response.model_validate(drafted)
    assert drafted["output"][0]["content"] == plain["output"][0]["content"]
    own = drafted["metrics"]["speculative_decoding"]
    assert own == chat["metrics"]["speculative_decoding"] and own["num_accepted_draft_tokens"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    usage, chats = drafted["usage"], chat["usage"]
    assert [usage[f"{name}_tokens"] for name in ("input", "output", "total")] == [
        chats[f"{name}_tokens"] for name in ("prompt", "completion", "total")
    ]
    accepted = chats["completion_tokens_details"]["accepted_prediction_tokens"]
    assert usage["output_tokens_details"]["accepted_prediction_tokens"] == accepted > 0


def test_a_conversation_is_rendered_as_a_chats(server: Live) -> None:
    """Instructions stand before it, and messages of several parts and roles are those of a chat."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be short"},
        {"role": "developer", "content": "in English"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now"}],
        },
    ]
    items: list[dict[str, Any]] = [dict(message) for message in messages[1:]]
    items[2]["content"] = [{"type": "output_text", "text": "hi", "annotations": []}]
    items[2] |= {"type": "message", "id": "msg_1", "status": "completed"}
    items[3]["content"] = [
        {"type": "input_text", "text": part["text"]} for part in messages[4]["content"]
    ]
    same = {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
    chat = post(server, CHAT, {"messages": messages, "max_tokens": 12} | same).json()
    more = {
        "instructions": "be short",
        "max_output_tokens": 12,
        "metadata": {"a": "b"},
        "user": "me",
    }
    answer = post(server, RESPONSES, {"input": items} | more | same).json()
    assert answer["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert (answer["instructions"], answer["metadata"], answer["user"]) == (
        "be short",
        {"a": "b"},
        "me",
    )


def test_a_stream_tells_items_as_they_come(server: Live) -> None:
    body: dict[str, Any] = {"input": "hello", "temperature": 0, "max_output_tokens": 20}
    whole = post(server, RESPONSES, body).json()
    told = streamed(server, body)
    names = [event["type"].removeprefix("response.") for event in told]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert names[-4:] == ends and set(names[4:-4]) == {"output_text.delta"} and len(names) > 10
    text = "".join(event["delta"] for event in told[4:-4])
    assert text == told[-4]["text"] == whole["output"][0]["content"][0]["text"]
    last = told[-1]["response"]
    Response.model_validate(last)
    assert last["output"] == [told[-2]["item"]] and last["usage"] == whole["usage"]
    assert last["metrics"]["speculative_decoding"] == whole["metrics"]["speculative_decoding"]


@pytest.mark.slow
def test_calls_are_items(caller: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are items, and so is text beside them.

    What the tool says comes back as an item, and the next answer is text.
    """
    said = f"I count.\n{CALL}\n{CALL}"
    says = scripted(lambda prompt: "So 12." if "twelve" in prompt else said)
    monkeypatch.setattr("forerun.server.parameters.requests", says)
    with client_of(caller) as client:
        asked: dict[str, Any] = {"model": NAME, "tools": [COUNT], "max_output_tokens": 200}
        answer = client.responses.create(input="hello", **asked)
        assert [item.type for item in answer.output] == [
            "message",
            "function_call",
            "function_call",
        ]
        assert (
            answer.output_text == "I count."
            and answer.status == "completed"
            and answer.tools[0].name == "count"
        )
        calls = answer.output[1:]
        assert len({call.call_id for call in calls}) == 2 and {
            call.arguments for call in calls
        } == {'{"x": 12}'}
        items: list[Any] = [
            {"role": "user", "content": "hello"},
            *(item.to_dict() for item in answer.output),
        ]
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "twelve"}
            for call in calls
        ]
        again = client.responses.create(input=items, **asked)
        assert again.output_text == "So 12." and [item.type for item in again.output] == ["message"]
        told = [
            {"id": c.call_id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
        messages = [*HELLO, {"role": "assistant", "content": "I count.", "tool_calls": told}]
        messages += [
            {"role": "tool", "content": "twelve", "tool_call_id": call.call_id} for call in calls
        ]
        tool = {"type": "function", "function": {key: COUNT[key] for key in COUNT if key != "type"}}
        chat = post(caller, CHAT, {"messages": messages, "tools": [tool]}).json()
        assert again.usage.input_tokens == chat["usage"]["prompt_tokens"]  # the same prompt
        with client.responses.stream(input="hello", **asked) as events:
            kinds = [event.type.removeprefix("response.") for event in events]
            final = events.get_final_response()
        for item, one in zip(final.output, answer.output, strict=True):
            assert item.type == one.type and item.to_dict().get("arguments") == one.to_dict().get(
                "arguments"
            )
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
        assert (
            kinds.count("function_call_arguments.done") == 2
            and "function_call_arguments.delta" in kinds
        )
        assert kinds[-1] == "completed"


def test_forced_calls_follow_their_schema(caller: Live) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"x": {"enum": [3]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    body = {
        "input": "hello",
        "tools": [COUNT | {"parameters": schema}],
        "parallel_tool_calls": False,
    }
    for choice in ("required", {"type": "function", "name": "count"}):
        found = post(caller, RESPONSES, body | {"tool_choice": choice}).json()
        (item,) = found["output"]
        assert json.loads(item["arguments"]) == {"x": 3} and found["tool_choice"] == choice


def test_text_follows_the_form_that_is_asked_for(server: Live) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": {"enum": ["cat", "mat"]}}
    found = post(server, RESPONSES, {"input": "hello", "text": {"format": form}, "seed": 1}).json()
    assert json.loads(found["output"][0]["content"][0]["text"]) in ("cat", "mat")
    assert found["status"] == "completed" and found["text"]["format"] == form


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,x"}
FILE = {"type": "input_file", "file_id": "x"}
BAD: list[tuple[str, list[Any]]] = [
    ("input", [None, 5, [], {}, [5], "a\0"]),
    ("input", [[{"role": "user"}], [{"role": "robot", "content": "a"}]]),
    ("input", [[{"role": "user", "content": [part]}] for part in (IMAGE, FILE)]),
    ("input", [[{"role": "user", "content": [part]}] for part in ("a", {"type": ["a"]})]),
    ("input", [[{"type": kind}] for kind in ("item_reference", "web_search_call", 5)]),
    ("input", [[{"type": "reasoning", "content": parts}] for parts in (5, ["a"], [{"text": 1}])]),
    ("input", [[{"role": role, "content": "a"}] for role in ("tool",)]),
    ("input", ["the cat " * 4000]),
    ("input", [[HELLO[0], {"type": "function_call", "call_id": "a", "name": "f"}]]),
    ("instructions", [5, "\ud800"]),
    ("max_output_tokens", [0, "7"]),
    ("temperature", [-1, "hot"]),
    ("tools", [5, [5], [{"type": "web_search"}], [{"type": "function"}]]),
    ("tools", [[COUNT | {"x": float("nan")}]]),
    ("tool_choice", ["required", "some", [1]]),
    ("tool_choice", [{"type": "allowed_tools"}, {"type": "function", "name": "f"}]),
    ("text.format", [{"format": {"type": "json_schema"}}, {"format": {"type": "x"}}]),
    ("text.format", [{"format": {"a": float("nan")}}]),
    ("text.verbosity", [{"verbosity": "low"}]),
    ("metadata.a", [{"a": 1}]),
    ("store", ["yes"]),
    ("reasoning.effort", [{"effort": "low"}, {"effort": 5}]),
    ("reasoning.summary", [{"summary": "detailed"}]),
    ("include", [["message.output_text.logprobs"]]),
    ("background", [True]),
    ("truncation", ["auto"]),
    ("service_tier", ["flex"]),
    ("top_logprobs", [2]),
    ("n", [2]),
    ("stop", ["a"]),
    ("frequency_penalty", [1.0]),
    ("max_tokens", [5]),
    ("messages", [HELLO]),
    ("cache_salt", [""]),
    *((name, [{"id": "x"}]) for name in ("previous_response_id", "conversation", "prompt")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("param", "values"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_fields_are_named(server: Live, param: str, values: list[Any]) -> None:
    for value in values:
        for more in ({}, {"stream": True}):
            body = more | {"input": "hello"} | {param.partition(".")[0]: value}
            assert refusal(sent(server, RESPONSES, body))["param"] == param, value


def test_what_asks_for_nothing_is_accepted(server: Live) -> None:
    """Nothing is stored, whatever was asked for."""
    names = (
        "previous_response_id",
        "conversation",
        "instructions",
        "tools",
        "tool_choice",
        "text",
        "metadata",
        "user",
    )
    body: dict[str, Any] = {"input": "hello", "max_output_tokens": 3, **dict.fromkeys(names)}
    body |= {
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "background": False,
        "truncation": "disabled",
    }
    body |= {
        "reasoning": {"effort": None},
        "prompt_cache_key": "a",
        "stream_options": {"include_obfuscation": False},
    }
    answer = post(server, RESPONSES, body).json()
    assert (
        answer["store"] is False
        and answer["tool_choice"] == "auto"
        and answer["text"] == {"format": {"type": "text"}}
    )


def test_an_error_in_a_stream_is_its_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    with live() as server:
        monkeypatch.setattr(server.worker.engine.target, "forward", lambda *_, **__: 1 / 0)
        body = {"input": "hello", "max_output_tokens": 5}
        *_, last = streamed(server, body)
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert post(server, RESPONSES, body).status_code == 500


@pytest.mark.skipif(
    find_spec("langchain_openai") is None, reason="langchain-openai is not installed"
)
def test_langchain_gets_answers_of_responses(caller: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    says = scripted(lambda prompt: "So 12." if "twelve" in prompt else CALL)
    monkeypatch.setattr("forerun.server.parameters.requests", says)
    asked: dict[str, Any] = {
        "base_url": f"{caller.url}/v1",
        "api_key": "none",
        "model": NAME,
        "max_retries": 0,
    }
    tool = {"type": "function", "function": {key: COUNT[key] for key in COUNT if key != "type"}}
    chat = ChatOpenAI(**asked, use_responses_api=True).bind_tools([tool])
    messages: list[Any] = [HumanMessage("hello")]
    first = chat.invoke(messages)
    (call,) = first.tool_calls
    assert call["name"] == "count" and call["args"] == {"x": 12}
    messages += [first, ToolMessage("twelve", tool_call_id=call["id"])]
    assert chat.invoke(messages).text == "So 12."
    assert "".join(chunk.text for chunk in chat.stream(messages)) == "So 12."
