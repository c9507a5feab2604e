"""Models that think before they answer: their thoughts are apart from the answer."""

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import AddedToken

from forerun.api.decoder import Decoder
from tests.support.serving import CHAT, HELLO, Live, client_of, events, live, post, refusal
from tests.support.tools import END, TEMPLATES, scripted
from tests.support.toys import noisy_copy, tiny, tiny_tokenizer

RESPONSES = "/v1/responses"
# Templates of models that think: they keep no thoughts, and one may begin them.
TEMPLATE = (
    TEMPLATES["hermes"].replace(
        "<|{{ m.role }}|>{{ m.content }}",
        "<|{{ m.role }}|>{% if m.reasoning_content %}{BEGIN}{{ m.reasoning_content }}{CLOSE}"
        "{% endif %}{{ m.content }}",
    )
    + "{% if enable_thinking is defined and not enable_thinking %}{BEGIN}\n\n{CLOSE}\n\n{% endif %}"
)
OPEN = TEMPLATE + "{% if add_generation_prompt %}{BEGIN}\n{% endif %}"
MARKS = {
    "tokens": ("<think>", "</think>", False),
    "special": ("[THINK]", "[/THINK]", True),
    "spelled": ("<think>", "</think>", None),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": [3]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
FORM = {"type": "json_object", "schema": {"enum": ["cat", "mat"]}}


def thinker(kind: str = "tokens", template: str = TEMPLATE) -> Decoder:
    begin, close, special = MARKS[kind]
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template.replace("{BEGIN}", begin).replace("{CLOSE}", close)
    if special is not None:
        tokenizer.add_tokens(
            [AddedToken(text, special=special, normalized=False) for text in (begin, close)]
        )
    target = tiny("llama", vocab=304, context=1024)
    target.generation_config.eos_token_id = END
    return Decoder(target, tokenizer, noisy_copy(target, 0.02), guard=False)


@pytest.fixture(scope="module", params=MARKS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(kind: str) -> Iterator[Live]:
    with live(lambda: thinker(kind)) as found:
        yield found


@pytest.fixture(scope="module")
def opened() -> Iterator[Live]:
    with live(lambda: thinker(template=OPEN)) as found:
        yield found


def says(monkeypatch: pytest.MonkeyPatch, kind: str, text: str) -> None:
    begin, close, _ = MARKS[kind]
    said = text.replace("BEGIN", begin).replace("CLOSE", close)
    monkeypatch.setattr("forerun.server.parameters.requests", scripted(lambda prompt: said))


CASES = [
    ("BEGIN\nhm, so\n\nthen\nCLOSE\n\nYes.", "hm, so\n\nthen", "Yes."),
    ("BEGIN\n\nCLOSE\n\nYes.", "", "Yes."),
    ("Yes.", "", "Yes."),
    ("BEGINhm", "hm", ""),
    ("Well BEGINhmCLOSE", "", "Well BEGINhmCLOSE"),
]


@pytest.mark.parametrize(("text", "thoughts", "answer"), CASES, ids=range(len(CASES)))
def test_thoughts_are_apart(
    server: Live,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    thoughts: str,
    answer: str,
) -> None:
    """In chats and responses, whole and streamed."""
    says(monkeypatch, kind, text)
    begin, close, _ = MARKS[kind]
    answer = answer.replace("BEGIN", begin).replace("CLOSE", close)
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 200}
    whole = post(server, CHAT, body).json()
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (thoughts, answer)
    deltas = [
        choice["delta"]
        for chunk in events(post(server, CHAT, body | {"stream": True}))
        for choice in chunk["choices"]
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thoughts
    assert "".join(delta.get("content", "") for delta in deltas) == answer
    response = post(server, RESPONSES, {"input": "hello"}).json()
    texts = {item["type"]: item["content"][0]["text"] for item in response["output"]}
    assert (texts.get("reasoning", ""), texts.get("message", "")) == (thoughts, answer)
    details = response["usage"]["output_tokens_details"]
    assert bool(details["reasoning_tokens"]) == text.startswith("BEGIN")
    with client_of(server) as client:
        stream = client.responses.create(model="tiny", input="hello", stream=True)
        kinds: dict[str, str] = {}
        for event in stream:
            if event.type.endswith("text.delta"):
                kinds[event.type] = kinds.get(event.type, "") + event.delta
    assert kinds.get("response.reasoning_text.delta", "") == thoughts
    assert kinds.get("response.output_text.delta", "") == answer


def test_calls_follow_thoughts(server: Live, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "count", "arguments": {"x": 3}}\n</tool_call>'
    says(monkeypatch, kind, f"BEGIN\n<tool_call> no\nCLOSE\n\n{call}")
    body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 300}
    (choice,) = post(server, CHAT, body).json()["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "<tool_call> no" and message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "count", "arguments": '{"x": 3}'}


def test_thoughts_go_back_to_the_template(server: Live, kind: str) -> None:
    begin, close, _ = MARKS[kind]
    decoder = thinker(kind)
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    tokens = post(server, "/tokenize", {"messages": [answer, *HELLO]}).json()["tokens"]
    assert f"<|assistant|>{begin}hm{close}Yes." in decoder.tokenizer.decode(tokens)
    items = [
        {"type": "reasoning", "id": "a", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "Yes."},
        {"role": "user", "content": "hello"},
    ]
    usage = post(server, RESPONSES, {"input": items, "max_output_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] == len(tokens)


def test_a_prompt_may_begin_the_thoughts(opened: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "tokens", "hm\nCLOSE\n\nYes.")
    body = {"messages": HELLO, "max_tokens": 200}
    message = post(opened, CHAT, body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    prefill = [*HELLO, {"role": "assistant", "content": "<think>so"}]
    message = post(opened, CHAT, body | {"messages": prefill}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    ended = [*HELLO, {"role": "assistant", "content": "<think>so</think>Yes"}]
    says(monkeypatch, "tokens", ", sir.")
    message = post(opened, CHAT, body | {"messages": ended}).json()["choices"][0]["message"]
    assert message["content"] == ", sir." and "reasoning_content" not in message


@pytest.mark.parametrize("more", [{}, {"forerun_method": "ar"}, {"temperature": 0}])
def test_a_form_begins_after_thoughts_of_a_budget(opened: Live, more: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 200, "temperature": 1.5, "seed": 3}
    body |= {"logit_bias": {str(END): 30}} | more  # no end within the thoughts
    for budget in (0, 7):
        for way in (
            {"thinking_budget_tokens": budget},
            {"thinking": {"type": "enabled", "budget_tokens": budget}},
        ):
            answer = post(opened, CHAT, body | way | {"response_format": FORM}).json()
            (choice,) = answer["choices"]
            assert json.loads(choice["message"]["content"]) in ("cat", "mat")
            details = answer["usage"]["completion_tokens_details"]
            assert 1 <= details["reasoning_tokens"] <= budget + 1
    called = post(
        opened,
        CHAT,
        body | {"tools": [TOOL], "tool_choice": "required", "thinking_budget_tokens": 7},
    ).json()
    message = called["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x": 3}'


def test_sampled_forms_and_calls_behind_thoughts_are_valid(opened: Live) -> None:
    pytest.importorskip("llguidance")
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    ways: list[dict[str, Any]] = [{"response_format": FORM}, tools]

    def ask(seed: int) -> dict[str, Any]:
        body = {"messages": HELLO, "max_tokens": 200, "temperature": 1.5, "seed": seed}
        body |= {"thinking_budget_tokens": seed % 9, "logit_bias": {str(END): 30}}
        return post(opened, CHAT, body | ways[seed % 2]).json()["choices"][0]["message"]

    with ThreadPoolExecutor(8) as pool:
        messages = list(pool.map(ask, range(24)))
    texts = [json.loads(message["content"]) for message in messages[::2]]
    assert set(texts) == {"cat", "mat"}
    calls = [call for message in messages[1::2] for call in message["tool_calls"]]
    assert [call["function"]["arguments"] for call in calls] == ['{"x": 3}'] * 12


def test_a_model_may_begin_its_thoughts_before_a_form() -> None:
    """Here the mark is as probable as can be. Without one the form begins at once."""
    pytest.importorskip("llguidance")
    with live(thinker) as server:
        begin = thinker().tokenizer.convert_tokens_to_ids("<think>")
        body = {"messages": HELLO, "max_tokens": 200, "response_format": FORM}
        body |= {"thinking_budget_tokens": 3, "temperature": 0}
        for bias, count in ((100, 5), (-100, None)):
            answer = post(server, CHAT, body | {"logit_bias": {str(begin): bias}}).json()
            assert json.loads(answer["choices"][0]["message"]["content"]) in ("cat", "mat")
            details = answer["usage"]["completion_tokens_details"]
            assert details.get("reasoning_tokens") == count  # two marks and three tokens


def test_thinking_is_switched_as_the_template_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def say(prompt: str) -> str:
        seen.append(prompt)
        return "Yes."

    efforts = TEMPLATE + "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
    monkeypatch.setattr("forerun.server.parameters.requests", scripted(say))
    off = "<think>\n\n</think>\n\n"
    with live(thinker) as server, live(lambda: thinker(template=efforts)) as other:
        for more, ending in (
            ({"reasoning_effort": "none"}, off),
            ({"thinking": {"type": "disabled"}}, off),
            ({"chat_template_kwargs": {"enable_thinking": False}}, off),
            ({"reasoning_effort": "low"}, "<|assistant|>"),
            ({"thinking": {"type": "enabled"}}, "<|assistant|>"),
            ({"thinking": {"type": "adaptive"}}, "<|assistant|>"),
        ):
            assert post(server, CHAT, {"messages": HELLO} | more).status_code == 200
            assert seen[-1].endswith(ending), more
        post(server, RESPONSES, {"input": "hello", "reasoning": {"effort": "none"}})
        assert seen[-1].endswith(off)
        assert post(other, CHAT, {"messages": HELLO, "reasoning_effort": "low"}).status_code == 200
        assert seen[-1].endswith("<low>")


def test_what_a_model_cannot_do_is_refused() -> None:
    with live(lambda: thinker("spelled", "{{ messages[-1].content }}")) as server:
        for field, value in (
            ("reasoning_effort", "low"),
            ("thinking", {"type": "enabled"}),
            ("thinking_budget_tokens", 5),
        ):
            error = refusal(post(server, CHAT, {"messages": HELLO, field: value}))
            assert error["param"] == field and "not supported" in error["message"]
        for more in (
            {"reasoning_effort": "none"},
            {"thinking": {"type": "disabled"}},
            {"thinking": {"type": "adaptive", "budget_tokens": 5}},
            {"thinking_budget_tokens": -1},
        ):
            body = {"messages": HELLO, "max_tokens": 2}
            assert post(server, CHAT, body | more).status_code == 200
