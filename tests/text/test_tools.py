"""Tool calls: how answers are read, calls that follow their schema, and what clients get."""

import json
import re
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

from forerun.engine.sequence import Request
from forerun.methods import AR, SD, Hybrid, Parts, Suffix
from forerun.sampling.grammar import compiled
from forerun.sampling.response_format import form_of
from forerun.sampling.sampler import Sampler
from forerun.text.chat import chat_prompt, checked
from forerun.text.tool_calls import FORMS, ToolCall, ToolStream, form_of_template
from forerun.text.tools import answer_form, checked_choice, checked_tools, tools_for
from tests.support import toys
from tests.support.patience import patient
from tests.support.serving import (
    CHAT,
    HELLO,
    NAME,
    Live,
    client_of,
    events,
    figures,
    live,
    post,
    refusal,
    served,
)
from tests.support.tools import MARKERS, TEMPLATES, make_decoder, scripted

CALL = '{"name": "f", "arguments": {"x": "a\\"}{[", "y": [1, {}]}}'
PIECES = {  # of texts that are partly calls
    "hermes": [
        *(CALL, "```json\n", "```", "<tool_call>", "</tool_call>", "<too", "\n"),
        '{"arguments": {}, "name": "f"}',
    ],
    "llama3": [
        '{"name": "g", "parameters": {"x": 1}}',
        *("<|python_tag|>", ";", " "),
        '{"name": "Al", "parameters": {}}',
    ],
    "mistral": [
        *("[TOOL_CALLS]", "[", CALL, ", ", "]", " "),
        '{"name": "g", "arguments": {}, "id": "abcdefghi"}',
    ],
}
BROKEN = [
    '{"name": "f", "a',
    '{"name": "f", "arguments": {"x": nope}}',
    '{"name": "f", "arguments": []}',
    '{"nam',
]
BROKEN += ["é <|", "{}", '"}', "}"]


def read(
    form: str, pieces: list[str], most: int | None = None
) -> tuple[ToolStream, str, list[Any]]:
    """What reads these pieces; the text and the calls that it gave."""
    stream = ToolStream(FORMS[form], ("f", "g"), most)
    given = [*chain(*(stream.push(piece, False) for piece in pieces), stream.push("", True))]
    texts = [each for each in given if isinstance(each, str)]
    return stream, "".join(texts), [each for each in given if not isinstance(each, str)]


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_any_split_of_a_text_gives_the_same(form: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[form] + BROKEN), max_size=9)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    whole, *streamed = read(form, [text])
    cut, *cut_streamed = read(
        form, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    )
    assert streamed == cut_streamed == [whole.text, whole.calls]
    assert (cut.text, cut.calls, cut.broken) == (whole.text, whole.calls, whole.broken)
    if not whole.calls:
        assert whole.text == text


DIGITS = (
    '<tool_call>{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}</tool_call>"
)  # more than Python's int reads
NO_BRACE = '{"name": "f", "arguments": {"x": 1}'  # a brace forgotten
CUT = '<tool_call>\n{"name": "f", "arguments": {"x'
NO_TOOL = '```json\n{"name": "Al", "arguments": {}}\n```'
TWO_CALLS = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}}'
# Form, text, what is left of it, names called, broken calls.
WANTED: list[tuple[str, str, str, list[str], int]] = [
    ("hermes", f"Look: \n<tool_call>\n{CALL}\n</tool_call>", "Look:", ["f"], 0),
    (
        "hermes",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL} </tool_call>\nDone.\n",
        *("\nDone.", ["f", "f"], 0),
    ),
    ("hermes", '<tool_call>{"arguments": {"name": 1}, "name": "g"}</tool_call>', "", ["g"], 0),
    ("hermes", '<tool_call>{"name": "unheard"}', "", ["unheard"], 0),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', [], 1),
    ("hermes", f"<tool_call>\n{NO_BRACE}\n</tool_call>", "", ["f"], 0),
    ("hermes", CUT, CUT, [], 1),
    ("hermes", "a <tool_call> is\n", "a <tool_call> is\n", [], 1),
    ("hermes", DIGITS, DIGITS, [], 1),
    (
        "hermes",
        f"<tool_call>1</tool_call>\n<tool_call>{CALL}</tool_call>",
        *("<tool_call>1</tool_call>", ["f"], 1),
    ),
    ("hermes", f"So:\n```json\n{CALL}\n```\n", "So:", ["f"], 0),  # as Qwen2.5-Coder writes them
    ("hermes", NO_TOOL, NO_TOOL, [], 0),
    ("llama3", TWO_CALLS, "", ["f", "g"], 0),
    ("llama3", '<|python_tag|>{"name": "other", "parameters": {}}', "", ["other"], 0),
    ("llama3", '{"name": "Al", "parameters": {}}', '{"name": "Al", "parameters": {}}', [], 0),
    ("llama3", 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', [], 0),
    ("mistral", f"Ok.[TOOL_CALLS] [{CALL}, {CALL}]", "Ok.", ["f", "f"], 0),
    ("mistral", f'[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}]', "", ["f"], 0),
    ("mistral", "[TOOL_CALLS]f(x)", "[TOOL_CALLS]f(x)", [], 1),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "left", "names", "broken"), WANTED)
def test_what_is_read(form: str, text: str, left: str, names: list[str], broken: int) -> None:
    found, _, _ = read(form, [text])
    assert (found.text, [call.name for call in found.calls], found.broken) == (left, names, broken)


def test_texts_wait_no_longer_than_a_marker_may_begin_and_calls_come_whole() -> None:
    stream = ToolStream(FORMS["hermes"], ())
    said = [
        stream.push(piece, False)
        for piece in ("So <", "b> <tool_ca", "n ", "x\n<tool_call>", '{"name": "f", ')
    ]
    assert said == [["So"], [" <b>"], [" <tool_can"], [" x"], []]
    said = [
        stream.push(piece, False)
        for piece in ('"arguments": {"x', '": "1', '23"', "}", "}\n</tool", "_call> ")
    ]
    assert said == [[], [], [], [], [], [ToolCall("f", '{"x": "123"}')]]
    bare = ToolStream(FORMS["llama3"], ("f",))
    assert [bare.push(piece, False) for piece in ('{"na', 'me": "fx"', ', "a": ')] == [
        [],
        ['{"name": "fx"'],
        [', "a":'],
    ]
    many = f"<tool_call>{CALL}</tool_call>\n" * 3 + "end"
    stream, text, calls = read("hermes", [many], 1)
    assert len(stream.calls) == len(calls) == 1 and text == "\nend"


def test_the_form_is_that_of_the_template() -> None:
    assert {name: form_of_template(text) for name, text in TEMPLATES.items()} == FORMS
    assert form_of_template(TEMPLATES["hermes"] + "<function=") is None
    names = checked_tools([tool("f", X)])
    for name in FORMS:
        found = tools_for(names, checked_choice("auto", names), make_decoder(name).tokenizer)
        assert found.form is FORMS[name] and found.grammar is None
        assert sorted(found.shown.values()) == [text for text, special in MARKERS[name] if special]


# Calls that follow their schema.


def tool(name: str, properties: dict[str, Any], strict: Any = None) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    if "$ref" in json.dumps(properties):
        schema["$defs"] = {"Unit": {"enum": ["C", "F"]}}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


X = {"x": {"type": "integer", "minimum": 0, "maximum": 99}}
CITY = {"city": {"type": "string", "maxLength": 4}, "unit": {"$ref": "#/$defs/Unit"}}
TOOLS = [tool("count", X), tool("get_weather", CITY)]
NAMED = {"type": "function", "function": {"name": "count"}}


def of(
    name: str,
    choice: Any,
    parallel: bool = True,
    are_tokens: bool = True,
    tools: Any = None,
    form: Any = None,
) -> Any:
    """A decoder, and how the tools are used with it."""
    decoder = make_decoder(name, are_tokens)
    read = checked_tools(tools or TOOLS)
    chosen = checked_choice(choice, read)
    answer = answer_form(form, chosen, read)
    return decoder, tools_for(read, chosen, decoder.tokenizer, parallel=parallel, answer=answer)


def allows(name: str, use: Any, text: str, decoder: Any) -> bool:
    """Whether the grammar allows a text to its end."""
    pytest.importorskip("llguidance")
    form = form_of(use.grammar)
    assert form is not None
    grammar = compiled(form, decoder.tokenizer, frozenset([0]))(0)
    tokens = [*decoder.tokenizer.encode(text, add_special_tokens=False), 0]
    with patient():
        return grammar.fitting([], tokens) == len(tokens)


COUNT, OSLO = '{"x": 7}', '{"city": "Oslo", "unit": "C"}'


def written(name: str, *calls: tuple[str, str]) -> str:
    """Calls as models write them."""
    form = FORMS[name]
    texts = [
        f'{{"name": "{function}", "{form.key}": {arguments}}}' for function, arguments in calls
    ]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return f"[TOOL_CALLS][{', '.join(texts)}]" if name == "mistral" else "; ".join(texts)


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_grammars_allow_calls_that_fit_their_tools_alone(name: str, are_tokens: bool) -> None:
    one, other = ("count", COUNT), ("get_weather", OSLO)
    many = written(name, one, other)
    strict = [tool("count", X, True), TOOLS[1]]
    for choice, parallel, tools, text, allowed in [
        ("required", True, TOOLS, written(name, one), True),
        ("required", True, TOOLS, many, name != "llama3"),
        ("required", False, TOOLS, many, False),
        ("required", True, TOOLS, "Let me see.", False),
        ("required", True, TOOLS, written(name, ("count", '{"x": 100}')), False),
        (NAMED, True, TOOLS, written(name, other), False),
        ("auto", True, strict, "Let me see <a> 3 [b].\n", True),
        ("auto", True, strict, written(name, one), True),
        ("auto", True, strict, written(name, ("count", '{"x": "7"}')), False),
        ("auto", True, strict, written(name, ("get_weather", '{"town": 1}')), True),  # not strict
        ("auto", True, strict, "So: \n" + many + "\nok", True),
        ("auto", False, strict, many, False),
        ("auto", True, strict, 'Ok:\n```json\n{"x": 1}\n```', True),
        (
            "auto",
            True,
            strict,
            'Ok:\n```json\n{"name": "count", "arguments": {"x": 7}}\n```\nSo.',
            True,
        ),
        (
            "auto",
            True,
            strict,
            'Ok:\n```json\n{"name": "count", "arguments": {}}\n```',
            name != "hermes",
        ),
    ]:
        decoder, use = of(name, choice, parallel, are_tokens, tools)
        assert allows(name, use, text, decoder) == allowed, (choice, parallel, text)


YES = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": ["yes"]}}}
WHO = {  # begins like a call of Llama
    "type": "json_object",
    "schema": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "unit": {"$ref": "#/$defs/Unit"}},
        "required": ["name", "unit"],
        "$defs": {"Unit": {"enum": ["C", "F"]}},
        "additionalProperties": False,
    },
}
DAY = {"type": "regex", "regex": "[A-Z][a-z]+day"}
PATH = {"type": "regex", "regex": "[/a-z]+\\/b/\nc"}


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_a_schema_holds_for_answers_that_call_no_tool(name: str, are_tokens: bool) -> None:
    one, other = ("count", COUNT), ("get_weather", OSLO)
    for choice, form, text, allowed in [
        ("auto", YES, '{"yes": 1}', True),
        ("auto", YES, '{"no": 1}', False),
        ("auto", YES, "Let me see.", False),
        ("auto", YES, written(name, one), True),
        ("auto", YES, written(name, one, other), name != "llama3"),
        ("auto", YES, written(name, ("count", '{"free": 1}')), True),  # not strict
        ("auto", YES, "Hm. " + written(name, one), False),
        ("auto", WHO, '{"name": "count", "unit": "C"}', True),
        ("auto", WHO, '{"name": "count", "unit": "K"}', False),
        ("auto", WHO, written(name, one), True),
        ("auto", DAY, "Monday", True),
        ("auto", DAY, "June", False),
        ("auto", DAY, written(name, other), True),
        ("auto", PATH, "a/a/b/\nc", True),
        ("auto", PATH, "a/a/b/", False),
        ("strict", WHO, written(name, ("get_weather", '{"city": "Oslo", "unit": "K"}')), False),
        ("strict", WHO, written(name, other), True),
        ("required", YES, '{"yes": 1}', False),
        ("required", YES, written(name, one), True),
    ]:
        tools = [tool("count", X), tool("get_weather", CITY, strict=choice == "strict")]
        mode = "auto" if choice == "strict" else choice
        decoder, use = of(name, mode, are_tokens=are_tokens, tools=tools, form=form)
        assert allows(name, use, text, decoder) == allowed, (choice, text)


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_calls_are_kept_to_the_allowed_tools(name: str, are_tokens: bool) -> None:
    """The prompt has all tools. Both shapes of OpenAI's two APIs name the list."""
    one, other = ("count", COUNT), ("get_weather", OSLO)
    for mode, text, allowed in [
        ("auto", written(name, one), True),
        ("auto", written(name, ("count", '{"free": 1}')), True),
        ("auto", written(name, other), False),
        ("auto", "Let me see.", True),
        ("required", written(name, one), True),
        ("required", written(name, other), False),
        ("required", "Let me see.", False),
    ]:
        flat = {"mode": mode, "tools": [{"type": "function", "name": "count"}]}
        nested = {"mode": mode, "tools": [NAMED]}
        for choice in (
            {"type": "allowed_tools", "allowed_tools": nested},
            {"type": "allowed_tools", **flat},
        ):
            decoder, use = of(name, choice, are_tokens=are_tokens)
            assert allows(name, use, text, decoder) == allowed, (mode, text)
            assert len(use.given) == 2 and use.callable_names == {"count"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_500_sampled_calls_follow_their_schema(name: str) -> None:
    pytest.importorskip("llguidance")
    names = Counter[str]()
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        decoder, use = of(name, choice, parallel=False)
        sampling: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_new_tokens": 160}
        for completion in decoder.generate(
            [[5, 6, 7]] * 85, **sampling, response_format=use.grammar
        ):
            assert completion.finish_reason == "stop"
            stream = use.stream()
            stream.push(
                decoder.tokenizer.decode([token for token in completion.tokens if token]), True
            )
            (call,) = stream.calls
            assert stream.text == "" and stream.broken == 0
            names[call.name] += 1
            value = json.loads(call.arguments)
            if call.name == "count":
                assert [*value] == ["x"] and 0 <= value["x"] <= 99 and type(value["x"]) is int
            else:
                assert (
                    [*value] == ["city", "unit"]
                    and len(value["city"]) <= 4
                    and value["unit"] in ("C", "F")
                )
    assert names.total() == 170 and names["count"] > 5  # of all three forms: 510


END = 0
MARKER = 1
CLOSE = 2
SPELLED = {"\n": "\u010a", " ": "\u0120"}  # as byte-level vocabularies do
LETTERS = [
    "<end>",
    *(text for text, _ in MARKERS["hermes"]),
    *sorted(set('\n {"name:farguts,x}bc')),
]
WORDS = ("ab", "ba", "b", "bca", "cb")


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose texts have one spelling each: a token a character, and the markers."""
    vocab = {SPELLED.get(letter, letter): token for token, letter in enumerate(LETTERS)}
    backend = Tokenizer(BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in LETTERS[MARKER : CLOSE + 1]]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    made.chat_template = TEMPLATES["hermes"]
    return made


DRAFTERS = {"ar": AR(), "sd": SD(3), "suffix": Suffix(), "hybrid": Hybrid(threshold=2.0)}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_calls_follow_the_models_distribution_restricted_to_the_grammar(name: str) -> None:
    pytest.importorskip("llguidance")
    tokenizer = letters()
    given = checked_tools([tool("f", {"x": {"enum": [*WORDS]}})])
    named = checked_choice({"type": "function", "function": {"name": "f"}}, given)
    form = form_of(tools_for(given, named, tokenizer).grammar)
    assert form is not None
    begin = [MARKER, *map(LETTERS.index, '\n{"name": "f", "arguments": {"x": "')]
    prompt = [3, 4, 5]
    size = len(LETTERS)
    target = toys.random_table(size, 1, 1.3)
    draft = toys.random_table(size, 2, 1.3)

    def joint(before: int, last: int, text: str, left: int) -> torch.Tensor:
        """[V] * left: the distribution of the next tokens in the word, whose quote is its end."""
        table = torch.zeros([size] * left)
        allowed = sorted(
            {LETTERS.index(f'{word}"'[len(text)]) for word in WORDS if f'{word}"'.startswith(text)}
        )
        for token, p in zip(allowed, target[before, last][allowed].softmax(-1), strict=True):
            is_end = LETTERS[token] == '"'
            if is_end or left == 1:
                table[(token,) * left if is_end else token] += p
            else:
                table[token] += p * joint(last, token, text + LETTERS[token], left - 1)
        return table

    processor = compiled(form, tokenizer, frozenset([END]))(len(prompt))
    sampler = Sampler(False, LogitsProcessorList([processor]))
    generator = torch.Generator().manual_seed(0)
    asked = Request(
        prompt,
        len(begin) + 3,
        sampler,
        eos=frozenset([END]),
        stop=processor.stop(None),
        generator=generator,
    )
    parts = Parts(toys.TableLM(target), toys.TableLM(draft))
    outcomes = []
    quote = LETTERS.index('"')
    for steps in toys.decode(toys.TableLM(target), DRAFTERS[name].build(parts), [asked] * 250):
        tokens = toys.tokens_of(steps)
        assert tokens[: len(begin)] == begin, steps[-1].error
        word = tokens[len(begin) :]
        outcomes.append((word[: word.index(quote)] if quote in word else word) + [quote] * 3)
    samples = [outcome[:3] for outcome in outcomes]
    assert toys.p_value(samples, joint(begin[-2], begin[-1], "", 3)) > 1e-4


def test_calls_in_python() -> None:
    pytest.importorskip("llguidance")
    decoder = make_decoder()
    for choice in ("required", NAMED):
        completion = decoder.chat(HELLO, tools=TOOLS, tool_choice=choice, max_new_tokens=60)
        assert completion.tool_calls and completion.tool_calls[0].name in ("count", "get_weather")
    *_, last = decoder.stream_chat(HELLO, tools=TOOLS, tool_choice=NAMED, max_new_tokens=60)
    assert last.tool_calls == completion.tool_calls


# What clients get.


server = served(make_decoder)
CHOICES: list[dict[str, Any]] = [
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": NAMED},
    {
        "tools": [tool("count", X, True)],
        "logit_bias": {"300": 100},
        "parallel_tool_calls": False,
    },  # the marker
]


@pytest.mark.parametrize("more", CHOICES, ids=["required", "named", "strict"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_forced_calls_whole_and_streamed(
    server: Live, more: dict[str, Any], temperature: float
) -> None:
    """Tokens with drafts are those without."""
    pytest.importorskip("llguidance")
    body = {
        "messages": HELLO,
        "tools": TOOLS,
        "temperature": temperature,
        "seed": 2,
        "max_tokens": 200,
    } | more
    answers = [
        post(server, CHAT, body | {"forerun_method": method}).json() for method in (None, "ar")
    ]
    drafted, plain = (
        answer["metrics"]["speculative_decoding"]["num_draft_tokens"] for answer in answers
    )
    assert drafted > plain == 0
    first, second = (answer["choices"][0] for answer in answers)
    calls = first["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        call["function"] for call in second["message"]["tool_calls"]
    ]
    assert first["finish_reason"] == "tool_calls" and first["message"]["content"] is None
    assert all(
        re.fullmatch("call_[0-9a-f]{24}", call["id"]) and call["type"] == "function"
        for call in calls
    )
    assert (
        answers[0]["metrics"]["tool_calls"] == 1
        and answers[0]["metrics"]["unparsed_tool_calls"] == 0
    )
    chunks = events(post(server, CHAT, body | {"stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (piece,) = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    assert (piece["index"], piece["type"], piece["function"]) == (
        0,
        "function",
        calls[0]["function"],
    )
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_texts_beside_calls_and_what_cannot_be_read(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"See:\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>nothing</tool_call>"
    monkeypatch.setattr("forerun.server.parameters.requests", scripted(lambda prompt: text))
    before = figures(server)
    body = {"messages": HELLO, "tools": TOOLS, "n": 2}
    answer = post(server, CHAT, body).json()
    for choice in answer["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {
            "name": "f",
            "arguments": json.dumps(json.loads(CALL)["arguments"]),
        }
        assert choice["message"]["content"] == "See:\n<tool_call>nothing</tool_call>"
        assert choice["finish_reason"] == "tool_calls"
    assert answer["metrics"]["tool_calls"] == answer["metrics"]["unparsed_tool_calls"] == 2
    after = figures(server)
    for line in ("forerun:tool_calls_total", "forerun:unparsed_tool_calls_total"):
        assert after[line] - before[line] == 2
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(post(server, CHAT, body | {"stream": True, "n": 1}))
    ]
    assert (
        "".join(delta.get("content", "") for delta in deltas)
        == "See:\n<tool_call>nothing</tool_call>"
    )
    for choice in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        message = post(server, CHAT, {"messages": HELLO} | choice).json()["choices"][0]["message"]
        assert message["content"] == text and "tool_calls" not in message
    cut = post(server, CHAT, body | {"max_tokens": 20}).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"].startswith(
        'See:\n<tool_call>\n{"name": "f"'
    )


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_special_tokens_of_calls_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = written(name, ("count", COUNT), ("get_weather", OSLO))
    said = calls if name == "mistral" else "<|python_tag|>" + calls
    monkeypatch.setattr("forerun.server.parameters.requests", scripted(lambda prompt: said))
    with live(lambda: make_decoder(name)) as server:
        body = {"messages": HELLO, "tools": TOOLS}
        (choice,) = post(server, CHAT, body).json()["choices"]
        found = choice["message"]["tool_calls"]
        assert [call["function"]["arguments"] for call in found] == [COUNT, OSLO]
        assert {len(call["id"]) for call in found} == ({9} if name == "mistral" else {29})


@pytest.mark.parametrize("name", FORMS)
def test_the_next_turn_finds_what_the_last_one_left(name: str) -> None:
    """The history is rendered to the tokens that were generated.

    Mistral's has ids that the model did not write.
    """
    pytest.importorskip("llguidance")
    with live(lambda: make_decoder(name)) as server:
        model: Any = server.worker.engine.target
        body = {
            "messages": HELLO,
            "tools": TOOLS,
            "tool_choice": NAMED,
            "temperature": 0,
            "max_tokens": 200,
        }
        first = post(server, CHAT, body).json()
        message = first["choices"][0]["message"]
        ran, hits = model.prefilled, model.prompts.store.hits
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "fine"}
        again = post(server, CHAT, body | {"messages": [*HELLO, message, result]}).json()
        assert model.prompts.store.hits == hits + 1
        new = again["usage"]["prompt_tokens"] - first["usage"]["total_tokens"]
        if (
            name != "mistral"
        ):  # the last token of the answer was not run; the end and the result are new
            assert 0 < new < 40 and model.prefilled - ran <= new + 1


def agent(prompt: str) -> str:
    """What the model says to an agent: two calls, one after the other, then an answer."""
    calls = [("get_weather", '{"city": "Oslo"}'), ("count", COUNT)][prompt.count("<|tool|>") :][:1]
    return f"Let me see.\n{written('hermes', *calls)}" if calls else "It is sunny."


def test_openais_client_calls_tools_over_several_turns(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.server.parameters.requests", scripted(agent))
    with client_of(server) as client:
        for stream in (False, True):
            messages: list[Any] = [*HELLO]
            how: dict[str, Any] = {"model": NAME, "tools": TOOLS}
            for turn in range(3):
                if stream:
                    with client.chat.completions.stream(messages=messages, **how) as events_of:
                        choice: Any = events_of.get_final_completion().choices[0]
                else:
                    choice = client.chat.completions.create(messages=messages, **how).choices[0]
                message = choice.message
                assert choice.finish_reason == ("tool_calls" if turn < 2 else "stop")
                assert message.content == ("Let me see." if turn < 2 else "It is sunny.")
                messages.append(message.model_dump(exclude_none=True) if turn else message)
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
                    for call in message.tool_calls or []
                ]
            assert messages[-2]["content"] == COUNT


UNKNOWN = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f"}}],
}
BAD: list[tuple[str, list[Any]]] = [
    ("tools", [5, [5], [{"type": "function"}], [{"type": "retrieval", "function": {"name": "f"}}]]),
    ("tools", [[tool("two words", X)], [tool("f", X)] * 2]),
    ("tools", [[tool(f"f{number}", X) for number in range(129)]]),
    ("tools", [[{"type": "function", "function": {"name": "f", "parameters": []}}]]),
    ("tools", [[{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]]),
    ("tools", [[tool("f", X, 1)], [tool("f", {"x": {"$ref": "#/no"}}, True)]]),
    ("tools", [[tool("f", {"x": {"enum": ["a" * 70000]}}, True)]]),
    ("tool_choice", ["any", {"type": "allowed_tools"}]),
    ("tool_choice", [{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}]),
    ("tool_choice", [{"type": "allowed_tools", "mode": "auto", "tools": [{"type": "x"}]}]),
    ("tool_choice", [{"type": "allowed_tools", "mode": "none", "tools": [NAMED]}]),
    ("tool_choice", [{"type": "function", "function": {"name": "other"}}]),
    ("parallel_tool_calls", ["no"]),
    ("response_format", [{"type": "grammar", "grammar": 'start: "a"'}]),
    ("ignore_eos", [True]),
    ("min_tokens", [5]),
    ("messages", [[*HELLO, CALLED]]),
    ("messages", [[*HELLO, CALLED | {"tool_calls": [{"id": "call_1"}]}, UNKNOWN]]),
]  # fmt: skip


@pytest.mark.parametrize(("param", "values"), BAD)
def test_wrong_fields_of_tools_are_named(server: Live, param: str, values: list[Any]) -> None:
    pytest.importorskip("llguidance")
    body = {
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": "required" if param in ("ignore_eos", "min_tokens") else "auto",
    }
    for value in values:
        response = post(server, CHAT, body | {param: value})
        assert response.status_code == 400, response.text
        assert (
            response.json()["error"]["param"] == param
            and len(response.json()["error"]["message"]) <= 300
        )


def test_chats_from_python_return_calls() -> None:
    pytest.importorskip("llguidance")
    decoder = make_decoder()
    read = list[tuple[int, int]]()
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "max_new_tokens": 200}
    how["progress"] = lambda done, count: read.append((done, count))
    completion = decoder.chat(HELLO, **how)
    (call,) = completion.tool_calls
    assert call.name == "count" and completion.text == "" and read
    assert [chunk.tool_calls for chunk in decoder.stream_chat(HELLO, **how)][-1] == [call]
    form = {"type": "regex", "regex": "Monday"}
    with pytest.raises(ValueError, match="grammar cannot be given beside tools"):
        decoder.chat(
            HELLO, tools=TOOLS, response_format={"type": "grammar", "grammar": 'start: "a"'}
        )
    completion = decoder.chat(
        HELLO, tools=TOOLS, response_format=form, logit_bias={decoder.tokenizer.encode("M")[0]: 100}
    )
    assert completion.text == "Monday" and not completion.tool_calls
    assert decoder.chat(
        HELLO, tools=TOOLS, tool_choice="none", response_format={"type": "text"}, max_new_tokens=2
    ).text


def test_a_call_without_arguments_comes_back_as_an_object() -> None:
    function = {"name": "f", "arguments": "{}"}
    _, message = checked(
        [*HELLO, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]
    )
    assert message["tool_calls"][0]["function"]["arguments"] == {}


PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def without_tools(template: str = PLAIN_TEMPLATE) -> Any:
    """A decoder whose chat template has no tools."""
    decoder = make_decoder(are_tokens=False)
    decoder.tokenizer.chat_template = template
    return decoder


def test_a_server_may_refuse_tools() -> None:
    with live(without_tools, tool_parser="none") as other:
        for choice in ("auto", "none"):
            body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}
            error = refusal(post(other, CHAT, body))
            assert error["param"] == "tools" and "takes no tools" in error["message"]


def test_another_form_than_the_generic_one_is_refused() -> None:
    with live(without_tools, tool_parser="mistral") as other:
        error = refusal(post(other, CHAT, {"messages": HELLO, "tools": TOOLS}))
        assert error["param"] == "tools" and "only --tool-parser hermes" in error["message"]


def test_tools_need_tools(server: Live) -> None:
    for choice in ("required", NAMED):
        error = refusal(post(server, CHAT, {"messages": HELLO, "tool_choice": choice}))
        assert error["param"] == "tool_choice"


def test_templates_without_tools_get_a_generic_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is read in the form that the text asks for, whole and streamed."""
    pytest.importorskip("llguidance")
    call = '<tool_call>\n{"name": "count", "arguments": {"x": 7}}\n</tool_call>'
    seen: list[str] = []

    def say(prompt: str) -> str:
        seen.append(prompt)
        return call

    with live(without_tools) as other:
        body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 300}
        forced = post(other, CHAT, body | {"tool_choice": NAMED}).json()["choices"][0]
        assert json.loads(forced["message"]["tool_calls"][0]["function"]["arguments"]).keys() == {
            "x"
        }
        monkeypatch.setattr("forerun.server.parameters.requests", scripted(say))
        (choice,) = post(other, CHAT, body).json()["choices"]
        streamed = events(post(other, CHAT, body | {"stream": True}))
    (told,) = choice["message"]["tool_calls"]
    assert told["function"] == {"name": "count", "arguments": '{"x": 7}'}
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    calls = [
        found for event in streamed for found in event["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert [found["function"] for found in calls] == [told["function"]]
    for tool_given in TOOLS:
        assert json.dumps(checked_tools([tool_given])[0].given, ensure_ascii=False) in seen[0]
    assert seen[0].startswith("system: ") and "<tool_call>" in seen[0]
    assert seen[0].endswith("user: hello\n")


def test_calls_are_text_for_templates_without_them() -> None:
    """Results become messages of the user, one for results that follow each other."""
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "f", "arguments": arguments}}
        for number, arguments in enumerate(('{"x": "a \\"b\\""}', "{}"))
    ]
    messages = [
        {"role": "system", "content": "Be short."},
        *HELLO,
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "one"},
        {"role": "tool", "tool_call_id": "1", "content": "two"},
        {"role": "user", "content": "And?"},
    ]
    tokenizer = without_tools().tokenizer
    text = tokenizer.decode(chat_prompt(tokenizer, messages))
    assert text == (
        "system: Be short.\nuser: hello\nassistant: Well.\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": "a \\"b\\""}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n"
        "And?\n"
    )
    given = [found.given for found in checked_tools(TOOLS)]
    with_tools = tokenizer.decode(chat_prompt(tokenizer, messages, tools=given))
    assert with_tools.startswith("system: Be short.\n\nYou can call functions.")
    no_system = without_tools(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    ).tokenizer
    told = no_system.decode(chat_prompt(no_system, messages[1:], tools=given))
    assert told.startswith("user: hello\n\nYou can call functions.")


STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "{{ messages[loop.index0 - 1].tool_calls[0].function.name }} gave {{ m.content }}"
    "{% else %}{{ m.content }}{{ m.tool_calls }}{% endif %}{% endfor %}"
)


def test_a_result_whose_call_was_trimmed_away_is_rendered(server: Live) -> None:
    """A template that needs the call says so."""
    body = {"messages": [*HELLO, UNKNOWN], "max_tokens": 2}
    assert post(server, CHAT, body).status_code == 200
    tokenizer = make_decoder().tokenizer
    assert "<|tool|>x<" in tokenizer.decode(chat_prompt(tokenizer, [*HELLO, UNKNOWN]))
    tokenizer.chat_template = STRICT_TEMPLATE
    called = CALLED | {"content": ""}
    assert "f gave x" in tokenizer.decode(chat_prompt(tokenizer, [*HELLO, called, UNKNOWN]))
    with pytest.raises(ValueError, match="message 2, whose tool call no message before it has"):
        chat_prompt(tokenizer, [*HELLO, UNKNOWN])
