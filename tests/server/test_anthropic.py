"""/v1/messages: the answers of chats as Anthropic's client reads them, and what is refused."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message
from tokenizers import AddedToken

from forerun.api.decoder import Decoder
from tests.support.local import LOCAL
from tests.support.serving import (
    CHAT,
    HELLO,
    NAME,
    Live,
    get,
    live,
    make_decoder,
    post,
    sent,
    served,
)
from tests.support.serving import TEMPLATE as SERVER_TEMPLATE
from tests.support.tools import MARKERS, TEMPLATES, models, scripted
from tests.support.toys import tiny_tokenizer

MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
ASKED: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 20}
GREEDY = ASKED | {"temperature": 0}
SAID = ASKED | {"extra_body": {"temperature": 0}}  # the same by the client, which has no such name
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"enum": [3]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "count", "description": "Count.", "input_schema": SCHEMA}
CHATS_TOOL = {
    "type": "function",
    "function": {"name": "count", "description": "Count.", "parameters": SCHEMA},
}
CALL = '<tool_call>\n{"name": "count", "arguments": {"x": 3}}\n</tool_call>'
# A model that calls tools and thinks, and a template that takes all that its clients may ask for.
TEMPLATE = (
    TEMPLATES["hermes"].replace(
        "<|{{ m.role }}|>{{ m.content }}",
        "<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}",
    )
    + "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    + "{% endif %}"
)


def make_thinker() -> Decoder:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    marks = [*MARKERS["hermes"], ("<think>", False), ("</think>", False)]
    tokenizer.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in marks]
    )
    target, draft = models()
    return Decoder(target, tokenizer, draft, guard=False)


thinker = served(make_thinker)


def client_of(server: Live, **options: Any) -> anthropic.Anthropic:
    """Anthropic's client of a server, which closes its connections at the end of a `with`."""
    http = httpx2.Client(**LOCAL)
    options = {"api_key": "none"} | options
    return anthropic.Anthropic(base_url=server.url, http_client=http, max_retries=0, **options)


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as made:
        yield made


@pytest.fixture(scope="module")
def thinking_client(thinker: Live) -> Iterator[anthropic.Anthropic]:
    with client_of(thinker) as made:
        yield made


def says(monkeypatch: pytest.MonkeyPatch, text: str, prompts: list[str] | None = None) -> None:
    """Let the model say a text, and note its prompts."""

    def say(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        return text

    monkeypatch.setattr("forerun.server.parameters.requests", scripted(say))


def refused(response: Any, status: int = 400) -> dict[str, str]:
    """The error, which has Anthropic's shape and a short text."""
    assert response.status_code == status, response.text[:500]
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    error: dict[str, str] = body["error"]
    assert error.keys() == {"type", "message"} and 0 < len(error["message"]) <= 300
    return error


def told(server: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each named twice."""
    response = post(server, MESSAGES, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    names = [name.removeprefix("event: ") for name, _ in blocks]
    assert names == [event["type"] for event in events]
    return events


# Texts.


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 0, "forerun_method": "ar"},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3},
        {"seed": 5},
    ],
    ids=str,
)
def test_a_message_is_a_chats_answer(server: Live, more: dict[str, Any]) -> None:
    answer = post(server, MESSAGES, ASKED | more).json()
    Message.model_validate(answer)
    chat = post(server, CHAT, ASKED | more).json()
    wanted = {"type": "text", "text": chat["choices"][0]["message"]["content"]}
    assert answer["content"] == [wanted]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert (answer["role"], answer["type"], answer["model"]) == ("assistant", "message", NAME)
    usage = answer["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"] == 20
    drafting = answer["metrics"]["speculative_decoding"]
    assert drafting == chat["metrics"]["speculative_decoding"]
    assert bool(drafting["num_accepted_draft_tokens"]) == ("forerun_method" not in more)


def test_a_stream_tells_blocks_as_they_come(server: Live, client: anthropic.Anthropic) -> None:
    whole = post(server, MESSAGES, GREEDY).json()
    start, ping, begin, *deltas, end, last, stop = told(server, GREEDY)
    message = start["message"]
    assert (start["type"], ping) == ("message_start", {"type": "ping"})
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    block = {"type": "text", "text": ""}
    assert begin == {"type": "content_block_start", "index": 0, "content_block": block}
    assert len(deltas) > 3
    texts = []
    for delta in deltas:
        assert (delta["type"], delta["index"]) == ("content_block_delta", 0)
        assert delta["delta"].keys() == {"type", "text"}
        texts.append(delta["delta"]["text"])
    assert "".join(texts) == whole["content"][0]["text"]
    assert end == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["type"] == "message_delta" and last["usage"] == whole["usage"]
    assert stop == {"type": "message_stop"}
    with client.messages.stream(**SAID) as stream:
        assert "".join(stream.text_stream) == whole["content"][0]["text"]
        final = stream.get_final_message()
    assert final.usage.to_dict() == whole["usage"] and final.stop_reason == "max_tokens"


def test_a_conversation_is_a_chats(server: Live, client: anthropic.Anthropic) -> None:
    """Neighbours of one role are one message; what is only for Anthropic is no prompt."""
    marked = {"cache_control": {"type": "ephemeral"}}
    billing = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "and", **marked}]},
        {"role": "user", "content": "now"},
        {"role": "assistant", "content": [{"type": "text", "text": "low"}]},
        {"role": "user", "content": "so"},
    ]
    chat = {
        "messages": [
            {"role": "system", "content": "be short\nin English"},
            {"role": "user", "content": "and\nnow"},
            {"role": "assistant", "content": "low"},
            {"role": "user", "content": "so"},
        ]
    }
    wanted = post(server, CHAT, GREEDY | chat).json()
    blocks = [
        {"type": "text", "text": billing},
        {"type": "text", "text": "be short", **marked},
        {"type": "text", "text": "in English"},
    ]
    for system in (blocks, "be short\nin English", f"{billing}\n\nbe short\nin English"):
        found = client.messages.create(**SAID | {"messages": messages}, system=system)
        assert found.content[0].text == wanted["choices"][0]["message"]["content"]
        assert found.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    alone = client.messages.create(**SAID, system=[{"type": "text", "text": billing}])
    assert alone.to_dict()["content"] == post(server, MESSAGES, GREEDY).json()["content"]


def test_a_system_message_may_come_late(server: Live) -> None:
    """Claude Code ends its first request with one. Some templates take it at the beginning only."""

    def strict() -> Decoder:
        decoder = make_decoder()
        decoder.tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('late') }}{% endif %}{% endfor %}" + SERVER_TEMPLATE
        )
        return decoder

    late = {"role": "system", "content": "be short"}
    first = {"role": "system", "content": "in English"}
    body = GREEDY | {"messages": [first, *HELLO, late]}
    kept = "<|user|>hello\n<|system|>be short\n"
    moved = "<|user|>hello\nbe short\n"
    with live(strict) as other:
        for asked, middle in ((server, kept), (other, moved)):
            prompt = f"<|system|>in English\n{middle}<|assistant|>"
            wanted = make_decoder().generate(prompt, max_new_tokens=20).text
            assert post(asked, MESSAGES, body).json()["content"][0]["text"] == wanted


def test_a_last_answer_goes_on(client: anthropic.Anthropic) -> None:
    wanted = make_decoder().generate("<|user|>hello\n<|assistant|>low", max_new_tokens=20).text
    for content in ("low", [{"type": "text", "text": "low"}]):
        prefill = [*HELLO, {"role": "assistant", "content": content}]
        found = client.messages.create(**SAID | {"messages": prefill})
        assert found.content[0].text == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_came_is_named(
    thinker: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    says(monkeypatch, "the cat sat on the mat")
    for given, wanted in (
        (["sat on"], "sat on"),
        (["mat", "never", "sat"], "sat"),
        (["dog"], None),
    ):
        body = ASKED | {"stop_sequences": given, "max_tokens": 60}
        if stream:
            *events, last, _ = told(thinker, body)
            ending = last["delta"]
            written = "".join(event["delta"]["text"] for event in events if "delta" in event)
        else:
            ending = post(thinker, MESSAGES, body).json()
            written = ending["content"][0]["text"]
        reason = "end_turn" if wanted is None else "stop_sequence"
        assert (ending["stop_reason"], ending["stop_sequence"]) == (reason, wanted)
        assert written == ("the cat sat on the mat" if wanted is None else "the cat ")


def test_an_answer_without_a_word_is_an_empty_text(
    thinking_client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, "")
    answer = thinking_client.messages.create(**ASKED)
    assert answer.stop_reason == "end_turn" and answer.usage.output_tokens == 1
    with thinking_client.messages.stream(**ASKED) as stream:
        final = stream.get_final_message()
    for message in (answer, final):
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ""}]


# Tools.


def test_calls_and_their_results_go_around(
    thinker: Live, thinking_client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    says(monkeypatch, f"I count.\n{CALL}\n{CALL}", prompts)
    asked = ASKED | {"max_tokens": 200, "tools": [TOOL]}
    answer = thinking_client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    text, *calls = answer.content
    assert text.text == "I count."
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "count", {"x": 3})
    ] * 2
    assert calls[0].id != calls[1].id
    with thinking_client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in final.content[1:]] == [{"x": 3}] * 2
    single = {"type": "auto", "disable_parallel_tool_use": True}
    one = thinking_client.messages.create(**asked, tool_choice=single)
    assert [block.type for block in one.content] == ["text", "tool_use"]

    says(monkeypatch, "So 3.", prompts)
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "three"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "no such number"}],
            "is_error": True,
        },
        {"type": "text", "text": "and now?"},
    ]
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    again = thinking_client.messages.create(**asked | {"messages": messages})
    assert (again.content[0].text, again.stop_reason) == ("So 3.", "end_turn")
    chats = [
        *HELLO,
        {
            "role": "assistant",
            "content": "I count.",
            "tool_calls": [
                {"id": call.id, "function": {"name": call.name, "arguments": '{"x": 3}'}}
                for call in calls
            ],
        },
        {"role": "tool", "tool_call_id": calls[0].id, "content": "three"},
        {"role": "tool", "tool_call_id": calls[1].id, "content": "Error: no such number"},
        {"role": "user", "content": "and now?"},
    ]
    post(thinker, CHAT, {"messages": chats, "tools": [CHATS_TOOL]})
    assert prompts[-2] == prompts[-1] and "no such number" in prompts[-1]


def test_forced_calls_follow_their_schema(thinking_client: anthropic.Anthropic) -> None:
    pytest.importorskip("llguidance")
    asked = ASKED | {"max_tokens": 200, "tools": [TOOL], "extra_body": {"seed": 1}}
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "count"},
    ):
        answer = thinking_client.messages.create(**asked, tool_choice=choice)
        assert [block.input for block in answer.content if block.type == "tool_use"] == [{"x": 3}]
    answer = thinking_client.messages.create(**asked, tool_choice={"type": "none"})
    assert {block.type for block in answer.content} <= {"text", "thinking"}


def test_an_answer_keeps_a_form(client: anthropic.Anthropic, server: Live) -> None:
    pytest.importorskip("llguidance")
    form: Any = {"type": "json_schema", "schema": {"enum": ["cat", "mat"]}}
    found = client.messages.create(**SAID, output_config={"format": form})
    assert json.loads(found.content[0].text) in ("cat", "mat")
    bad = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "thing"}}}}
    assert "output_config.format" in refused(post(server, MESSAGES, ASKED | bad))["message"]


# Thoughts.


def test_thoughts_are_a_block_of_their_own(
    thinker: Live, thinking_client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    says(monkeypatch, "<think>\nhm, so\n</think>\n\nYes.", prompts)
    asked = ASKED | {"max_tokens": 200}
    answer = thinking_client.messages.create(**asked)
    thoughts, text = answer.content
    assert (thoughts.type, thoughts.thinking, text.text) == ("thinking", "hm, so", "Yes.")
    assert thoughts.signature
    details = answer.usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens < answer.usage.output_tokens
    with thinking_client.messages.stream(**asked) as stream:
        names = [event.delta.type for event in stream if event.type == "content_block_delta"]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0] == thoughts
    assert list(dict.fromkeys(names)) == ["thinking_delta", "signature_delta", "text_delta"]
    hidden = {"type": "adaptive", "display": "omitted"}
    quiet = thinking_client.messages.create(**asked, thinking=hidden)
    assert [block.type for block in quiet.content] == ["text"]

    messages = [{"role": "assistant", "content": answer.content}, *HELLO]
    thinking_client.messages.create(**asked | {"messages": [*HELLO, *messages]})
    assert "<|assistant|><think>hm, so</think>Yes." in prompts[-1]


def test_thinking_is_switched(
    thinker: Live,
    server: Live,
    thinking_client: anthropic.Anthropic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What lets a model think is no error for one that cannot."""
    prompts: list[str] = []
    says(monkeypatch, "Yes.", prompts)
    for more, ending in (
        ({}, "<|assistant|>"),
        ({"thinking": {"type": "disabled"}}, "<think>\n\n</think>\n\n"),
        ({"thinking": {"type": "adaptive"}}, "<|assistant|>"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "<|assistant|>"),
        ({"output_config": {"effort": "low"}}, "<low>"),
    ):
        thinking_client.messages.create(**ASKED, **more)
        assert prompts[-1].endswith(ending), more
    monkeypatch.undo()
    wanted = post(server, MESSAGES, GREEDY).json()["content"]
    for more in (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"thinking": {"type": "disabled"}},
    ):
        assert post(server, MESSAGES, GREEDY | more).json()["content"] == wanted


def test_a_budget_ends_thoughts(thinker: Live) -> None:
    begin = make_thinker().tokenizer.convert_tokens_to_ids("<think>")
    prefill = [*HELLO, {"role": "assistant", "content": "<think>so"}]
    body = GREEDY | {"messages": prefill, "max_tokens": 60}
    found = post(thinker, MESSAGES, body | {"thinking": {"type": "enabled", "budget_tokens": 7}})
    assert begin is not None
    assert 1 <= found.json()["usage"]["output_tokens_details"]["thinking_tokens"] <= 8


# Counting.


def test_tokens_are_counted_as_they_are_used(thinking_client: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "be short"}]
    for more in ({}, {"system": system}, {"tools": [TOOL], "system": "in English"}):
        asked: dict[str, Any] = {"model": NAME, "messages": HELLO} | more
        count = thinking_client.messages.count_tokens(**asked)
        used = thinking_client.messages.create(**asked, max_tokens=1).usage
        assert count.input_tokens == used.input_tokens > 0


def test_a_prompt_that_is_too_long_can_be_counted(
    server: Live, client: anthropic.Anthropic
) -> None:
    messages: list[Any] = [{"role": "user", "content": "the cat sat " * 300}]
    assert client.messages.count_tokens(model=NAME, messages=messages).input_tokens > 512
    endless = post(server, MESSAGES, ASKED | {"max_tokens": 32000, "ignore_eos": True}).json()
    usage = endless["usage"]  # the context is a limit too
    assert usage["input_tokens"] + usage["output_tokens"] == 512
    error = refused(post(server, MESSAGES, ASKED | {"messages": messages}))
    assert error["type"] == "invalid_request_error" and "512" in error["message"]


# What is refused, and what is not.


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
USE = {"type": "tool_use", "id": "a", "name": "count", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
CLEAR = {"type": "clear_tool_uses_20250919"}
BAD: list[tuple[str, list[Any]]] = [
    ("messages", [None, 5, [], "hello", {}, [5], [{}], [{"role": "robot", "content": "a"}]]),
    ("messages", [[{"role": "user"}], [{"role": "user", "content": 5}], user("a"), user(5)]),
    ("messages", [user(IMAGE), user({"type": "document"}), user(USE), user({"type": "text"})]),
    ("messages", [user(RESULT | {"content": [IMAGE]}), user({"type": "tool_result"})]),
    ("messages", [[*HELLO, {"role": "assistant", "content": [block]}] for block in (
        RESULT, {"type": "tool_use", "id": "a"}, USE | {"input": "x"},
        {"type": "redacted_thinking", "data": "x"}, {"type": "thinking"},
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
    )]),
    ("messages", [user({"type": "text", "text": "\ud800"}), user({"type": "text", "text": "a\0"})]),
    ("system", [5, [5], [IMAGE], [{"type": "text"}]]),
    ("max_tokens", [None, 0, -1, "7", 2**40]),
    ("temperature", [-1, "hot"]),
    ("top_p", [2]),
    ("top_k", [-2]),
    ("stop_sequences", [[""], ["a"] * 65, 5]),
    ("stream", ["yes"]),
    ("tools", [5, [5], [{"name": "a"}], [TOOL, TOOL], [TOOL | {"name": "a b"}]]),
    ("tools", [[TOOL | {"input_schema": {"type": "array"}}], [TOOL | {"defer_loading": True}]]),
    ("tools", [[TOOL | {"input_examples": [{"x": 3}]}]]),
    ("tools", [[TOOL | {"allowed_callers": ["code_execution_20260120"]}]]),
    ("tools", [[{"type": "web_search_20250305", "name": "web_search"}]]),
    ("tools", [[{"type": "bash_20250124", "name": "bash"}]]),
    ("tool_choice", ["auto", {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "some"}]),
    ("thinking", ["yes", {"type": "maybe"}, {"type": "enabled", "budget_tokens": -5}]),
    ("thinking", [{"type": "adaptive", "display": "loud"}]),
    ("output_config", [5, {"format": {"type": "x"}}, {"task_budget": {"total": 5}}, {"effort": 5}]),
    ("context_management", [{"edits": [CLEAR]}, {"edits": [{"type": "compact_20260112"}]}]),
    ("metadata", ["me"]),
    ("mcp_servers", [[{"type": "url", "url": "http://a", "name": "a"}]]),
    ("container", ["container_1"]),
    ("service_tier", ["flex"]),
    ("n", [2]),
    ("stop", ["a"]),
    ("max_completion_tokens", [5]),
    ("response_format", [{"type": "json_object"}]),
    ("presence_penalty", [1.0]),
    ("chat_template_kwargs", [{"tokenize": False}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "values"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_fields_are_named(server: Live, field: str, values: list[Any]) -> None:
    for value in values:
        for more in ({}, {"stream": True}):
            error = refused(sent(server, MESSAGES, ASKED | more | {field: value}))
            assert error["type"] == "invalid_request_error" and field in error["message"], value
    if field in ("messages", "system", "tools", "context_management"):
        assert field in refused(sent(server, COUNT, ASKED | {field: values[-1]}))["message"]


def test_what_changes_no_answer_is_accepted(
    server: Live, client: anthropic.Anthropic, caplog: pytest.LogCaptureFixture
) -> None:
    """As agents send it, who ask the beta endpoint too. The log names what nobody has read."""
    wanted = client.messages.create(**SAID).content[0].text
    edit: Any = {"type": "clear_thinking_20251015", "keep": "all"}
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    with caplog.at_level("INFO"):
        answer = client.beta.messages.create(
            **ASKED | {"messages": user({"type": "text", "text": "hello", "odd": 1, **marked})},
            betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
            context_management={"edits": [edit]},
            metadata={"user_id": "user_1"},
            service_tier="auto",
            speed="fast",
            extra_headers={"anthropic-version": "2099-01-01"},
            extra_body={"temperature": 0, "mcp_servers": [], "system": None, "tools": []},
        )
    assert answer.content[0].text == wanted
    (line,) = [record.getMessage() for record in caplog.records if "unknown" in record.msg]
    assert "'speed'" in line and "'messages.odd'" in line and "cache_control" not in line


def test_every_error_has_its_shape(server: Live, client: anthropic.Anthropic) -> None:
    error = refused(post(server, MESSAGES, ASKED | {"model": "claude"}), 404)
    assert error == {"type": "not_found_error", "message": "the model 'claude' does not exist here"}
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**ASKED | {"model": "claude"})
    assert refused(sent(server, MESSAGES, b"{"))["type"] == "invalid_request_error"
    assert refused(get(server, MESSAGES), 405)["type"] == "invalid_request_error"
    large = refused(post(server, MESSAGES, {"system": "a" * 2**21}), 413)
    assert large["type"] == "request_too_large"
    server.service.draining = True
    try:
        assert refused(post(server, COUNT, ASKED), 503)["type"] == "overloaded_error"
    finally:
        server.service.draining = False


def test_a_failure_is_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    with live() as server, client_of(server) as client:
        monkeypatch.setattr(server.worker.engine.target, "forward", lambda *_, **__: 1 / 0)
        *_, last = told(server, ASKED)
        assert last["type"] == "error" and last["error"]["type"] == "api_error"
        assert refused(post(server, MESSAGES, ASKED), 500)["type"] == "api_error"
        with pytest.raises(anthropic.APIStatusError), client.messages.stream(**ASKED) as stream:
            stream.get_final_message()


def test_a_key_may_come_as_anthropics() -> None:
    with live(api_key="secret") as server:
        for right in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with client_of(server, **right) as client:
                assert client.messages.count_tokens(model=NAME, messages=HELLO)
        wrong = pytest.raises(anthropic.AuthenticationError, match="API key")
        with client_of(server, api_key="wrong") as client, wrong:
            client.messages.count_tokens(model=NAME, messages=HELLO)
        error = refused(post(server, MESSAGES, ASKED), 401)
        assert error["type"] == "authentication_error"
