"""Fill in the middle: prompts of each form, /v1/completions with `suffix`, and an editor."""

import asyncio
import copy
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from forerun import Decoder
from forerun.text import infill
from forerun.text.infill import infill_form
from tests.support.local import LOCAL
from tests.support.serving import (
    FILLERS,
    NAME,
    PLAIN,
    Live,
    client_of,
    figures,
    live,
    make_filler,
    post,
    refusal,
    sent,
    served,
    until,
)
from tests.support.toys import pieces, tiny_tokenizer

CODE = "def add(a, b): return a + b\nfor i in range(10): print(i)\n" * 4


editor = served(make_filler)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_filler()


@pytest.mark.parametrize("names", infill._FORMS, ids=lambda names: names[0])
def test_each_form_is_found_by_its_tokens(names: tuple[str, ...]) -> None:
    tokenizer = copy.deepcopy(pieces() if names[0].startswith("\u2581") else tiny_tokenizer())
    assert infill_form(tokenizer) is None
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names[:2]])
    assert infill_form(tokenizer) is None  # not all of them
    tokenizer.add_tokens([AddedToken(names[2], special=True, normalized=False)])
    form = infill_form(tokenizer)
    assert form is not None
    before, after, middle = (tokenizer.convert_tokens_to_ids(name) for name in names)
    (row,) = form.prompts(tokenizer, ["the cat"], "at the")
    assert (row[-1], row.count(before), {before, after, middle} <= form.ends) == (middle, 1, True)
    at = row.index(after)
    front = tokenizer("")["input_ids"]
    assert row[: at + 1] == [
        *front,
        before,
        *tokenizer("the cat", add_special_tokens=False)["input_ids"],
        after,
    ]
    # No space is put before the text after the gap, which may begin in the middle of a word.
    assert "".join(tokenizer.convert_ids_to_tokens(row[at + 1 : -1])) in (
        "at\u2581the",
        "at\u0120the",
    )
    assert (tokenizer.eos_token_id in form.ends) == (tokenizer.eos_token == "<|endoftext|>")


def test_an_answer_fills_the_gap(editor: Live, decoder: Decoder) -> None:
    """A greedy answer is what the model says after the form's prompt.

    With drafts and without, whole and streamed.
    """
    with client_of(editor) as client:
        asked: dict[str, Any] = {
            "model": NAME,
            "suffix": "\nprint(i)",
            "temperature": 0,
            "max_tokens": 24,
        }
        texts = ["def add", ""]  # the gap may be at the beginning
        form = infill_form(decoder.tokenizer)  # type: ignore[arg-type]
        assert form is not None
        rows = form.prompts(decoder.tokenizer, texts, "\nprint(i)")  # type: ignore[arg-type]
        wanted = [
            completion.text
            for completion in decoder.generate(rows, max_new_tokens=24, ignore_eos=True)
        ]
        for more in ({}, {"forerun_method": "ar"}):
            answer = client.completions.create(
                prompt=texts, **asked, extra_body={"ignore_eos": True} | more
            )
            assert [choice.text for choice in answer.choices] == wanted and answer.usage is not None
            assert answer.usage.prompt_tokens == sum(map(len, rows))
            drafted = answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"]  # type: ignore[index]
            assert bool(drafted) == (not more)
        chunks = client.completions.create(
            prompt=texts[0], **asked, stream=True, extra_body={"ignore_eos": True}
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted[0]


@pytest.mark.parametrize("name", ["<|endoftext|>", *FILLERS])
def test_what_such_models_write_at_the_end_ends_it(
    editor: Live, decoder: Decoder, name: str
) -> None:
    """And it is no text, be it a special token or not. Other prompts are not ended by it."""
    end = decoder.tokenizer.convert_tokens_to_ids(name)  # type: ignore[union-attr]
    body = {"prompt": "def add", "temperature": 0, "max_tokens": 5, "logit_bias": {str(end): 100}}
    for stream in (False, True):
        response = post(editor, PLAIN, body | {"suffix": "x", "stream": stream})
        assert (
            response.status_code == 200
            and '"finish_reason":"stop"' in response.text
            and name not in response.text
        )
    assert '"completion_tokens":1' in post(editor, PLAIN, body | {"suffix": "x"}).text
    for more in ({}, {"suffix": ""}, {"suffix": "x", "ignore_eos": True}):
        usage = post(editor, PLAIN, body | more).json()["usage"]
        assert usage["completion_tokens"] == 5


def test_what_has_no_gap_is_refused(editor: Live, server: Live) -> None:
    """`server` has a model without the tokens."""
    bodies: list[dict[str, Any]] = [
        {"echo": True},
        {"prompt": [5, 6]},
        {"prompt": [[5], [6]]},
        {"prompt": [{"a": 1}]},
    ]
    bodies += [{"suffix": each} for each in ("a\0", "\ud800", "a" * 2**20, 5)]
    bodies += [{"prompt": each} for each in ("a\0", ["a", "a" * 2**20], ["a"] * 300, "a " * 2000)]
    for body in bodies:
        named = "prompt" if body in bodies[8:] else "suffix"
        assert (
            refusal(sent(editor, PLAIN, {"prompt": "a", "suffix": "b"} | body))["param"] == named
        ), body
    assert refusal(post(server, PLAIN, {"prompt": "a", "suffix": "b"}))["param"] == "suffix"


@pytest.mark.slow
def test_an_editor_cancels_at_each_key_stroke(editor: Live) -> None:
    """Cancelled answers leave nothing, and the last key stroke gets its usual answer.

    96 answers are cancelled: before they begin, after their first event, or after some events.
    """
    body = {
        "suffix": "\nprint(i)",
        "temperature": 0,
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
    }
    before = figures(editor)

    async def ask(client: httpx.AsyncClient, at: int, came: asyncio.Event) -> None:
        async with client.stream(
            "POST", editor.url + PLAIN, json=body | {"prompt": CODE[:at]}
        ) as response:
            assert response.status_code == 200
            left = at % 3
            async for line in response.aiter_lines():
                left -= line.startswith("data: ")
                if left < 0:
                    came.set()

    async def type_all() -> None:
        async with httpx.AsyncClient(timeout=120, **LOCAL) as client:
            for at in range(96):
                came = asyncio.Event()
                asked = asyncio.create_task(ask(client, at, came))
                if at % 4:
                    await came.wait()
                else:
                    await asyncio.sleep(0)  # it may not even have been sent
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(type_all())
    until(lambda: not editor.rows and not editor.service.open and not editor.service.readers.calls)
    usage = "forerun:kv_cache_usage_perc"
    until(lambda: figures(editor)[usage] == before[usage])  # the last row leaves after its request
    after = figures(editor)
    assert after["forerun:num_requests_running"] == after["forerun:num_requests_waiting"] == 0
    aborted = 'forerun:request_success_total{finished_reason="abort"}'
    assert after[aborted] - before.get(aborted, 0) >= 66 and editor.worker.failed is None
    last = body | {"prompt": CODE[:200], "stream": False, "max_tokens": 30}
    with live(make_filler) as fresh:
        assert (
            post(editor, PLAIN, last).json()["choices"]
            == post(fresh, PLAIN, last).json()["choices"]
        )
