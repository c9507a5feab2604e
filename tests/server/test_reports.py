"""What users of other servers have reported as bugs of those: here it does not happen.

The model is tiny, random and has drafts, so that a step often has several tokens.
"""

import copy
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forerun.api.decoder import Decoder
from forerun.methods import SD, method
from tests.support import tools as tool_support
from tests.support.serving import (
    CHAT,
    HELLO,
    PLAIN,
    TEMPLATE,
    Live,
    answered,
    client_of,
    events,
    held,
    leave,
    live,
    make_decoder,
    post,
    refusal,
    until,
)
from tests.support.toys import noisy_copy, tiny, tiny_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a city,\nsays "the office" \\ {not me} </tools> `x` \t',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "}{\\"[O]\\n</x>"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder()


@pytest.fixture(scope="module")
def caller() -> Iterator[Live]:
    with live(tool_support.make_decoder) as server:
        yield server


def streamed_texts(server: Live, body: dict[str, Any]) -> list[str]:
    chunks = events(post(server, PLAIN, body | {"stream": True}))
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]]


# Stop strings and characters.


def long_drafts() -> Decoder:
    return make_decoder(method=SD(6))


def test_nothing_is_left_of_what_was_accepted_behind_a_stop_string() -> None:
    """The last log probability is that of the token that completes the stop string."""
    with live(long_drafts) as server:
        check_stops(server, long_drafts())


def check_stops(server: Live, decoder: Decoder) -> None:
    sampling = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    whole = decoder.generate("the cat", max_new_tokens=60, **sampling)
    tokens = list(whole.tokens)
    asked = {"prompt": "the cat", "max_tokens": 60} | sampling
    cut_inside = 0
    place = 0
    for step in whole.steps:
        place += len(step.tokens)
        if len(step.tokens) < 3 or place > 58:
            continue
        last = place - 2  # the next to last token of an accepted chunk
        stop = decoder.tokenizer.decode(tokens[last])
        first = min(end for end in range(1, 61) if stop in decoder.tokenizer.decode(tokens[:end]))
        if "\ufffd" in stop or first != last + 1:
            continue
        cut_inside += 1
        body = asked | {"stop": [stop], "logprobs": 0}
        for stream in (False, True):
            response = post(server, PLAIN, body | {"stream": stream})
            chunks = events(response) if stream else [response.json()]
            names = [
                name
                for chunk in chunks
                for choice in chunk["choices"]
                for name in choice["logprobs"]["tokens"]
            ]
            assert names == [decoder.tokenizer.decode([token]) for token in tokens[:first]]
            assert answered(response) == whole.text[: whole.text.index(stop)]
    assert cut_inside


def test_a_stop_string_that_is_split_over_chunks_is_never_seen(
    server: Live, decoder: Decoder
) -> None:
    text = decoder.generate("the cat", max_new_tokens=40, ignore_eos=True).text
    asked = {"prompt": "the cat", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    checked = 0
    for start in range(0, len(text) - 8, 4):
        stop = text[start : start + 7]
        if "\ufffd" in stop or stop in "the cat" + text[:6]:
            continue
        checked += 1
        assert "".join(streamed_texts(server, asked | {"stop": [stop]})) == text[: text.index(stop)]
    assert checked > 3


def test_an_emoji_that_is_cut_is_the_same_streamed_and_whole(
    server: Live, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character comes when it is whole. What the limit cuts is one U+FFFD, as when decoded."""
    said = "a🎉b👩‍👧é"
    says = tool_support.scripted(lambda prompt: said)
    monkeypatch.setattr("forerun.server.parameters.requests", says)
    tokens = decoder.tokenizer.encode(said, add_special_tokens=False)
    assert len(tokens) > len(said)  # several a character
    for count in range(1, len(tokens) + 1):
        body = {"prompt": "the cat", "max_tokens": count}
        whole = answered(post(server, PLAIN, body))
        assert whole == decoder.tokenizer.decode(tokens[:count])
        *texts, last = streamed_texts(server, body)
        assert "".join(texts) + last == whole
        assert not any("\ufffd" in text for text in texts)
    assert whole == said


# Forms.


@pytest.mark.parametrize(
    "pattern", ["(a", "[z-a]", "a{3,1}", "(?<=a)b", r"\1(a)", "*a", r"\p{Foo}", "(?P<n>a)(?P=n)"]
)
def test_a_bad_regular_expression_is_refused(caller: Live, pattern: str) -> None:
    """It does not fail open, wherever it stands."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    for form in (
        {"type": "regex", "regex": pattern},
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"schema": schema}},
    ):
        body = {"messages": HELLO, "response_format": form, "max_tokens": 4}
        assert refusal(post(caller, CHAT, body))["param"] == "response_format"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "max_tokens": 4}
    assert refusal(post(caller, CHAT, body))["param"] == "tools"


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": ["string", "null"], "maxLength": 5},
        "nick": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    },
    "required": ["name", "nick"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["suffix", "sd"])
def test_nullable_fields_keep_their_length_under_drafts(name: str) -> None:
    pytest.importorskip("llguidance")
    model = tiny("llama", vocab=300, context=512)
    draft = noisy_copy(model, 0.02) if name == "sd" else None
    plain = Decoder(model, tiny_tokenizer(), None, method("ar"), False)
    drafted = Decoder(model, tiny_tokenizer(), draft, method(name), False)
    form = {"type": "json_object", "schema": PERSON}
    asked = {"response_format": form, "max_new_tokens": 120}
    prompt = '{"name": "abcdefgh", "nick": null} {"name": "abcdefgh", "nick": "abcdef"} '
    wanted = plain.generate(prompt, **asked)
    assert drafted.generate(prompt, **asked).tokens == wanted.tokens
    for row in drafted.generate([prompt] * 12, temperature=1.2, seed=3, **asked):
        if row.finish_reason == "stop":
            value = json.loads(row.text)
            assert value["name"] is None or len(value["name"]) <= 5
            assert value["nick"] is None or len(value["nick"]) <= 3


# Tools.


def test_a_description_of_any_characters_reaches_the_model() -> None:
    """As JSON of one line, so that it can end nothing."""
    decoder = tool_support.make_decoder()
    with live(tool_support.make_decoder) as server:
        body = {"messages": HELLO, "tools": [WEATHER], "max_tokens": 1}
        assert post(server, CHAT, body).status_code == 200
    tokens = decoder.tokenizer.apply_chat_template(HELLO, tools=[WEATHER], tokenize=False)
    line = next(line for line in tokens.splitlines() if "the office" in line)
    start = line.index("{")
    assert (
        json.loads(line[start:])["function"]["description"]
        == (
            WEATHER["function"]["description"]  # type: ignore[index]
        )
    )


@pytest.mark.parametrize("more", [{}, {"parameters": {"type": "object", "properties": {}}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_without_parameters_is_called_without_any(
    caller: Live, stream: bool, more: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    tool = {"type": "function", "function": CLOCK["function"] | more}  # type: ignore[operator]
    body = {"messages": HELLO, "tools": [tool], "max_tokens": 60, "stream": stream}
    body["tool_choice"] = {"type": "function", "function": {"name": "clock"}}
    response = post(caller, CHAT, body)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(response)]
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    else:
        chunks = response.json()["choices"]
        calls = chunks[0]["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "clock", "arguments": "{}"}]
    assert chunks[-1]["finish_reason"] == "tool_calls"


class Accumulator:
    """A strict reader of streamed calls, as agents have: the name comes first and once.

    Attributes:
        calls: name and arguments by index.
    """

    def __init__(self) -> None:
        self.calls: dict[int, dict[str, str]] = {}

    def take(self, delta: dict[str, Any]) -> None:
        for call in delta.get("tool_calls") or []:
            index = call["index"]
            if index not in self.calls:
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                assert index == len(self.calls)
                self.calls[index] = {"id": call["id"], "name": call["function"]["name"]}
                self.calls[index]["arguments"] = ""
            else:
                assert call.get("id") in (None, self.calls[index]["id"])
            self.calls[index]["arguments"] += call["function"].get("arguments") or ""


def test_parallel_calls_have_their_own_indices(
    caller: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments with braces, brackets and the end of a tag stay whole."""
    says = tool_support.scripted(lambda prompt: CALLS)
    monkeypatch.setattr("forerun.server.parameters.requests", says)
    body = {"messages": HELLO, "tools": [WEATHER, CLOCK], "max_tokens": 400}
    reader = Accumulator()
    for chunk in events(post(caller, CHAT, body | {"stream": True})):
        reader.take(chunk["choices"][0]["delta"])
    calls = list(reader.calls.values())
    assert [call["name"] for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0]["arguments"]) == {"city": '}{"[O]\n</x>'}
    assert json.loads(calls[1]["arguments"]) == {}
    assert len({call["id"] for call in calls}) == 2
    openai = pytest.importorskip("openai")
    assert openai
    with (
        client_of(caller) as client,
        client.chat.completions.stream(model="tiny", **body) as stream,
    ):
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert [call.function.arguments for call in message.tool_calls] == [
        call["arguments"] for call in calls
    ]


# Many at once.


def test_interleaved_conversations_do_not_leak(server: Live, decoder: Decoder) -> None:
    """Each of 20 gets in each turn what it would get alone, though they share rows and prefixes."""
    names = [f"conversation {number * number}" for number in range(20)]
    conversations: list[list[Any]] = [[{"role": "user", "content": name}] for name in names]
    for turn in range(3):
        with ThreadPoolExecutor(20) as pool:
            bodies = [
                {"messages": messages, "max_tokens": 10, "temperature": 0}
                for messages in conversations
            ]
            answers = list(pool.map(lambda body: post(server, CHAT, body).json(), bodies))
        for messages, answer in zip(conversations, answers, strict=True):
            text = answer["choices"][0]["message"]["content"]
            assert text == decoder.chat(messages, max_new_tokens=10).text
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": f"turn {turn}"})


def test_a_queued_request_and_one_that_is_read_can_be_cancelled() -> None:
    """The request that runs goes on, and its answer is what it would be alone."""
    wanted = make_decoder().generate("the cat", max_new_tokens=200, ignore_eos=True).text
    with live(lambda: make_decoder(max_rows=1)) as server, ThreadPoolExecutor(1) as pool:
        running = {"prompt": "the cat", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with held(server.worker.engine) as go:
            first = pool.submit(post, server, PLAIN, running)
            until(lambda: server.rows == 1)
            leave(server, PLAIN, {"prompt": "a", "max_tokens": 400}, lambda: server.rows == 2)
            go.set()
        assert answered(first.result(60)) == wanted
        until(lambda: server.rows == 0)
        with held(server.worker.engine) as go:  # its prompt is not read to the end
            leave(server, PLAIN, {"prompt": [5] * 500, "max_tokens": 9}, lambda: server.rows == 1)
            go.set()
        until(lambda: server.rows == 0)
        assert answered(post(server, PLAIN, running)) == wanted


def test_n_answers_of_a_seed_are_its_streams(server: Live) -> None:
    body = {"prompt": "the cat", "max_tokens": 12, "temperature": 1.5, "seed": 5}
    texts = [
        [choice["text"] for choice in post(server, PLAIN, body | {"n": count}).json()["choices"]]
        for count in (1, 3, 3)
    ]
    assert texts[1] == texts[2] and len(set(texts[1])) == 3 and texts[0][0] == texts[1][0]


def test_drafts_stay_as_good_over_many_requests() -> None:
    """The mean acceptance of the last hundred is that of the first."""
    questions = [{"role": "user", "content": f"hello {number % 20}"} for number in range(100)]

    def tau(server: Live) -> float:
        tokens = steps = 0
        with ThreadPoolExecutor(8) as pool:
            bodies = [{"messages": [one], "max_tokens": 6, "temperature": 0} for one in questions]
            for answer in pool.map(lambda body: post(server, CHAT, body).json(), bodies):
                figures = answer["metrics"]["speculative_decoding"]
                tokens += answer["usage"]["completion_tokens"]
                steps += figures["num_spec_steps"]
        return tokens / steps

    with live(lambda: make_decoder(method=method("sd", gamma=3))) as server:
        rounds = [tau(server) for _ in range(3)]
    assert rounds[-1] == pytest.approx(rounds[0])


# Ends of the context.


def short_draft() -> Decoder:
    """A draft whose context is an eighth of the target's."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    target = tiny("llama", vocab=300, context=512)
    draft = noisy_copy(target, 0.02)
    draft.config.max_position_embeddings = 64
    return Decoder(target, tokenizer, draft, method("sd"), False)


@pytest.mark.parametrize("make", [make_decoder, short_draft])
def test_drafts_end_with_the_context(make: Any, decoder: Decoder) -> None:
    """A draft with a shorter context, and drafts at the very end of it, change no token."""
    prompt = [5 + number % 40 for number in range(400)]
    plain = decoder.replace(method="ar")
    with live(make) as server:
        for count in (480, 505, 510, 511):
            row = (prompt * 2)[:count]
            wanted = plain.generate(row, max_new_tokens=600, ignore_eos=True)
            body = {"prompt": row, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
            answer = post(server, PLAIN, body).json()
            assert answer["usage"]["total_tokens"] == 512
            assert answer["choices"][0]["text"] == wanted.text
            assert answer["choices"][0]["finish_reason"] == "length"
        row = prompt[:40]  # begins within the draft's context, and leaves it
        wanted = plain.generate(row, max_new_tokens=100, ignore_eos=True)
        body = {"prompt": row, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        assert answered(post(server, PLAIN, body)) == wanted.text
        error = refusal(post(server, PLAIN, {"prompt": (prompt * 2)[:512]}))
        assert "leaves room for at most 511" in error["message"]


def test_blanks_do_not_use_up_the_tokens(caller: Live) -> None:
    """A schema allows no long runs of white space, which small models like to write."""
    pytest.importorskip("llguidance")
    tokenizer = caller.worker.decoder.tokenizer
    blanks = {token for text, token in tokenizer.get_vocab().items() if not text.strip("ĠĊ \n\t")}
    bias = {str(token): 100 for token in blanks}
    for form in ({"type": "json_object"}, {"type": "json_object", "schema": PERSON}):
        body = {"messages": HELLO, "response_format": form, "max_tokens": 60, "logit_bias": bias}
        (choice,) = post(caller, CHAT, body | {"temperature": 0}).json()["choices"]
        text = choice["message"]["content"]
        assert max(len(run) for run in re.findall(r"\s*", text)) <= 42  # a line break and 40
        assert text.strip(), text
