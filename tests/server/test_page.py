"""The server's page in a browser.

Debian's Chromium is driven by Playwright against a server with scripted answers. The tests are
skipped where one of them is missing. axe-core is looked for in the file that AXE_CORE names, and in
node_modules.
"""

import asyncio
import json
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from fastapi import FastAPI, Request  # noqa: E402
from fastapi.responses import JSONResponse, Response, StreamingResponse  # noqa: E402
from fastapi.staticfiles import StaticFiles  # noqa: E402

from benchmarks.pages.page_libraries import LIBRARIES  # noqa: E402
from forerun.server.app import PAGE_HEADERS, STATIC  # noqa: E402
from tests.support.serving import live, running  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).parents[2]
AXE = Path(os.environ.get("AXE_CORE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
FOLDER = STATIC / "vendor"
TIMEOUT = 60_000  # milliseconds; for a machine with much else to do
ORIGINS = ("draft", "lookup", "phrase", "window", "reused", "correction", "bonus")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"
)
expect = sync_api.expect

MARKDOWN = """\
Use **push**:

```python
def push(item):
    return "<b>" + item
```

| a | b |
|---|--:|
| 1 | 2 |

![a picture](http://127.0.0.1:1/spy.png) [a link](https://example.org/)
[a trap](javascript:alert(1))

- [x] done
"""
THOUGHT = "<think>\nThey want *42*.\n</think>\n\nIt is 42."
HTML = '<img src=x onerror="document.title=1"><b>bold</b> & </span><script>alert(1)</script>'


def step(pieces: list[tuple[str, str]], *rejected: str) -> dict[str, Any]:
    """What a chunk says of a step: all pieces but the last were drafted."""
    accepted = len(pieces) - 1
    counts = {
        "drafted": accepted + len(rejected),
        "tested": accepted + bool(rejected),
        "accepted": accepted,
    }
    return {"pieces": pieces, "rejected": rejected, "rests": False, **counts}


SCRIPTS: dict[str, list[dict[str, Any]]] = {
    "hello": [
        step([("Cats ", "bonus")]),
        step(
            [("purr ", "draft"), ("when ", "phrase"), ("they ", "window"), ("\n", "correction")],
            "do",
            "like\n",
            "",
        ),
        step([("are ", "lookup"), ("glad.", "reused"), (" So", "bonus")]),
        step([(".", "correction")], " it"),
    ],
    "html": [step([(HTML, "draft"), ("!", "bonus")], "<i>no</i>")],
    "markdown": [step([(line, "draft"), ("", "bonus")]) for line in MARKDOWN.splitlines(True)],
    "think": [step([(word, "bonus")]) for word in re.findall(r"\s*\S+", THOUGHT)],
    "think apart": [step([("Hm.", "bonus")]), step([("It is 42.", "bonus")])],
    "rests": [step([("So", "bonus")]), *[step([(".", "bonus")]) | {"rests": True}] * 2],
    "slow": [step([(f"{number} ", "bonus")]) for number in range(10_000)],
    "flood": [step([(f"{number} ", "bonus")]) for number in range(2000)],
}
PAUSES = {"slow": 0.05, "flood": 0.0}  # seconds within a step; else 0.005
SCRIPTS["broken"] = SCRIPTS["cut"] = SCRIPTS["slow"][:1]


def refused(status: int, message: str, retry: int = 0, **more: str) -> Response:
    return JSONResponse(
        {"error": {"message": message, **more}},
        status,
        {"Retry-After": str(retry)} if retry else None,
    )


class Stub:
    """A server of the page with scripted answers.

    The last message is the name of the script.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.not_ready = 0  # times that /health is still 503
        self.key = ""
        self.states = {"stub-model": "loaded"}  # of its models
        self.left = threading.Event()  # a stream has ended, or its client has gone away
        self.streams = self.most_streams = 0  # at once
        self.app = FastAPI()
        self.app.get("/health")(self.health)
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/tokenize")(self.tokenize)
        self.app.mount("/", StaticFiles(directory=STATIC, html=True))

        @self.app.middleware("http")
        async def guard(request: Request, proceed: Any) -> Any:
            response = await proceed(request)
            response.headers["Content-Security-Policy"] = PAGE_HEADERS["Content-Security-Policy"]
            return response

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)
        if scope.get("path") == "/v1/chat/completions":
            self.left.set()

    def health(self) -> Response:
        self.not_ready -= 1
        return (
            refused(503, "the model is being loaded", 5)
            if self.not_ready >= 0
            else JSONResponse({"status": "ok"})
        )

    def models(self, request: Request) -> Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return refused(401, "wrong key")
        lengths = {"loaded": 1000}
        data = [
            {"id": name, "max_model_len": lengths.get(state), "state": state}
            for name, state in self.states.items()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def tokenize(self, request: Request) -> dict[str, int]:
        return {"count": len((await request.json())["prompt"].split())}

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        script = body["messages"][-1]["content"]
        if script == "refused":
            return refused(400, "top_p is <b>bad</b>", param="top_p")
        if script == "full":
            return refused(503, "the queue is full", 7)
        while self.states[body["model"]] != "loaded":
            await asyncio.sleep(0.01)
        stream = self.stream(script, body.get("forerun_method") == "ar")
        return StreamingResponse(stream, media_type="text/event-stream")

    async def stream(self, script: str, plain: bool) -> AsyncIterator[str]:
        def event(data: Any) -> str:
            return f"data: {json.dumps(data)}\n\n"

        self.streams += 1
        self.most_streams = max(self.streams, self.most_streams)
        steps = SCRIPTS.get(script, SCRIPTS["hello"])
        if plain:
            steps = [step([(piece, "bonus")]) for part in steps for piece, _ in part["pieces"]]
            steps = steps[script == "differs" :]
        yield (
            event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            + ": keep-alive\n\n"
        )
        for part in steps:
            delta = {"content": "".join(piece for piece, _ in part["pieces"])}
            if script == "think apart" and part is steps[0]:
                delta = {"reasoning_content": delta["content"]}
            finish = "stop" if part is steps[-1] and script not in ("broken", "cut") else None
            text = event({"choices": [{"delta": delta, "finish_reason": finish}], "forerun": part})
            yield text[: len(text) // 2]  # a network splits where it likes
            await asyncio.sleep(PAUSES.get(script, 0.005))
            yield text[len(text) // 2 :]
        self.streams -= 1
        if script == "broken":
            yield event({"error": {"message": "a processor raised"}}) + "data: [DONE]\n\n"
        elif script != "cut":
            tokens = sum(len(part["pieces"]) for part in steps)
            yield (
                event({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": tokens}})
                + "data: [DONE]\r\n\r\n"
            )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    with running(made) as made.url:
        yield made


def opened(browser: Any, url: str, **options: Any) -> Any:
    """A new page, with what went wrong in `page.wrong`.

    That is requests to elsewhere, errors, and what the policy refused.
    """
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(TIMEOUT)
    expect.set_options(timeout=TIMEOUT)
    page = context.new_page()
    page.wrong = []
    page.on(
        "request", lambda request: request.url.startswith(url) or page.wrong.append(request.url)
    )
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on(
        "console", lambda said: "Content Security" in said.text and page.wrong.append(said.text)
    )
    page.goto(url + "/")
    return page


@pytest.fixture
def page(browser: Any, stub: Stub) -> Iterator[Any]:
    page = opened(browser, stub.url)
    expect(page.locator("#status")).to_have_text("stub-model is ready.")
    yield page
    assert page.wrong == []
    page.context.close()


def ask(page: Any, text: str, until: str | None = "done") -> Any:
    """Asks by the Enter key; gives the first answer to it, when it is `until`."""
    page.fill("#question", text)
    page.press("#question", "Enter")
    answer = page.locator("article").last.locator(".answer").first
    if until:
        expect(answer).to_have_attribute("data-state", until)
    return answer


def show(page: Any, view: str) -> None:
    """Choose a view of answers, Read or Tokens."""
    page.get_by_role("radio", name=view).check()


def press_in_menu(page: Any, title: str, entry: str) -> None:
    """Choose an entry of the menu of the conversation with this title."""
    page.get_by_role("button", name=f"More for {title}").click()
    page.locator("#menu").get_by_role("button", name=entry).click()


@pytest.mark.slow
def test_an_answer_comes_in_pieces_that_are_marked_and_counted(page: Any, stub: Stub) -> None:
    """The legend hides an origin."""
    show(page, "Tokens")
    answer = ask(page, "hello")
    assert answer.locator(".text").text_content() == "Cats purr when they \nare glad. So."
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
    styles = answer.locator(".piece").evaluate_all(
        "pieces => pieces.map(p => [p.className, getComputedStyle(p).backgroundColor,"
        " getComputedStyle(p).textDecorationLine + ' ' + getComputedStyle(p).textDecorationStyle,"
        " getComputedStyle(p).color])"
    )
    marks = {name.split()[1]: (tint, line) for name, tint, line, _ in styles}
    assert set(marks) == set(ORIGINS)
    assert (
        len({tint for tint, _ in marks.values()})
        == len({line for _, line in marks.values()})
        == len(ORIGINS)
    )
    assert len({color for *_, color in styles}) == 1  # the text keeps its colour
    counts = page.locator("#legend button").evaluate_all(
        "all => all.map(b => b.querySelector('b').textContent)"
    )
    assert counts == ["1", "1", "1", "1", "1", "2", "2"]
    for figure, value in {
        "tau": "2.25",
        "alpha": "0.71",
        "tokens": "9",
    }.items():  # 9 tokens in 4 steps; 5 of 7
        assert page.locator(f"#{figure}").text_content() == value
    assert stub.bodies[0] == {
        "model": "stub-model",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "forerun": True,
        **{"temperature": 0, "max_tokens": 1024, "top_p": 1},
    }
    assert (
        answer.locator(".reused").get_attribute("title")
        == "reused: used again after a rejected token"
    )
    entry = page.locator("#legend button").first
    drafted = answer.locator(".draft")
    look = "e => getComputedStyle(e).textDecorationLine + getComputedStyle(e).backgroundColor"
    marked = drafted.evaluate(look)
    assert "underline" in marked
    entry.press("Enter")
    expect(entry).to_have_attribute("aria-pressed", "false")
    assert drafted.evaluate(look) == "nonergba(0, 0, 0, 0)"
    assert "underline" in answer.locator(".lookup").evaluate(look)
    entry.press("Enter")
    expect(entry).to_have_attribute("aria-pressed", "true")
    assert drafted.evaluate(look) == marked


@pytest.mark.slow
def test_arrows_walk_the_steps_of_an_answer(page: Any) -> None:
    show(page, "Tokens")
    answer = ask(page, "hello")
    strip = page.locator("#steps")
    line = page.locator("#step")
    expect(strip.locator("[role=option]")).to_have_count(4)
    expect(line).to_contain_text("Step 4 of 4: 1 drafted, 1 tested, 0 accepted, 1 rejected.")
    strip.press("Home")
    expect(line).to_contain_text("Step 1 of 4: nothing drafted.")
    strip.press("ArrowRight")
    expect(line).to_contain_text("Step 2 of 4: 6 drafted, 4 tested, 3 accepted, 3 rejected.")
    assert line.locator("s").all_text_contents() == ["do", "like↵", "(no text)"]
    assert line.locator(".piece").all_text_contents() == ["purr ", "when ", "they ", "↵"]
    assert answer.locator(".here").all_text_contents() == ["purr ", "when ", "they ", "\n"]
    assert strip.get_attribute("aria-activedescendant") == strip.locator(
        "[aria-selected=true]"
    ).get_attribute("id")
    strip.press("End")
    strip.press("ArrowRight")
    expect(line).to_contain_text("Step 4 of 4")
    strip.press("ArrowLeft")
    expect(line).to_contain_text("Step 3 of 4: 2 drafted, 2 tested, 2 accepted, 0 rejected.")
    answer.locator(".phrase").click()  # a token leads to its step
    expect(line).to_contain_text("Step 2 of 4")


@pytest.mark.slow
def test_the_conversation_and_the_settings_go_along(page: Any, stub: Stub) -> None:
    ask(page, "hello")
    page.click("#tab-settings")
    expect(page.locator("#context")).to_have_text("109 of 1,000 tokens of context used")
    expect(page.locator("#used")).to_have_text("context 11 %")
    settings = {
        "system": "Be brief.",
        "temperature": "0.7",
        "max_tokens": "9",
        "top_p": "0.5",
        "seed": "3",
        "min_p": "0.1",
    }
    for name, value in settings.items():
        page.fill(f"#{name}", value)
    page.fill("#question", "one")
    page.press("#question", "Shift+Enter")
    page.keyboard.type("two")
    page.press("#question", "Enter")
    expect(page.locator(".answer[data-state=done]")).to_have_count(2)
    body = stub.bodies[1]
    assert [message["role"] for message in body["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert (
        body["messages"][0]["content"] == "Be brief."
        and body["messages"][3]["content"] == "one\ntwo"
    )
    assert body["messages"][2]["content"] == "Cats purr when they \nare glad. So."
    sent = [body[name] for name in ("temperature", "max_tokens", "top_p", "seed", "min_p")]
    assert sent == [0.7, 9, 0.5, 3, 0.1]
    page.select_option("#method", "ar")
    ask(page, "hello")
    assert "forerun_method" not in body and stub.bodies[2]["forerun_method"] == "ar"
    page.click("#clear")
    page.click("#tab-figures")
    page.evaluate("document.getElementById('temperature').value = -1")
    page.fill("#question", "hello")
    page.press("#question", "Enter")
    expect(page.locator("#temperature")).to_be_visible()  # what is wrong is shown
    assert len(stub.bodies) == 3 and page.locator("article").count() == 0


@pytest.mark.slow
def test_side_by_side_says_whether_the_texts_are_equal(page: Any, stub: Stub) -> None:
    page.check("#both")
    ask(page, "hello")
    said = page.locator(".verdict").last
    expect(said).to_contain_text("The texts are equal: 34 characters. With drafts it took ")
    expect(said).to_contain_text(" times the tokens/s.")
    fast, plain = page.locator(".answer .read").all_text_contents()
    assert fast == plain
    times = float(said.text_content().split(": ")[-1].split()[0])
    ratio = page.locator(".ratio")
    expect(page.get_by_role("button", name="Answer again")).to_have_count(1)
    assert ratio.text_content() == f"{times:.2f}\N{MULTIPLICATION SIGN}"
    clocks = page.locator(".clock").all_text_contents()
    page.get_by_role("button", name="Run the clocks again").click()
    expect(page.locator(".lane.home")).to_have_count(0)
    expect(page.locator(".lane.home")).to_have_count(2)
    assert page.locator(".clock").all_text_contents() == clocks
    assert [body.get("forerun_method", "") for body in stub.bodies] == [
        "",
        "ar",
    ] and stub.most_streams == 1
    assert (
        len({body["cache_salt"] for body in stub.bodies}) == 2
    )  # neither finds what the other has left
    page.locator(".answer").last.get_by_role("button", name="Figures and steps").click()
    expect(page.locator("#tau")).to_have_text("1.00")
    expect(page.locator("#alpha")).to_have_text("\u2013")
    ask(page, "differs")
    expect(page.locator(".verdict")).to_have_count(2)
    expect(said).to_contain_text("The texts differ from character 1 on.")
    ask(page, "rests")
    expect(said).to_contain_text(": drafts rest: they were slower.")
    assert page.locator("#rests").text_content() == "drafts rest: they were slower"
    expect(page.locator(".facts").nth(4)).to_contain_text("drafts rest: they were slower")
    expect(page.locator("#step")).to_contain_text("Step 3 of 3: nothing drafted: drafts rest.")
    assert page.locator("#legend b").all_text_contents() == ["\u2013"] * 6 + ["3"]


@pytest.mark.slow
def test_escape_stops_and_the_question_can_be_sent_again(page: Any, stub: Stub) -> None:
    answer = ask(page, "slow", until="running")
    expect(answer.locator(".read")).to_contain_text("0 1 2 ")
    expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(answer).to_have_attribute("data-state", "stopped")
    assert stub.left.wait(TIMEOUT / 1000)
    expect(answer.locator(".facts")).to_contain_text("stopped")
    expect(page.locator("#question")).to_be_focused()
    answer.get_by_role("button", name="Answer again").click()
    expect(page.locator("article")).to_have_count(1)
    again = page.locator(".answer[data-state=running] .read")
    expect(again).to_contain_text("0 1 2 ")
    page.click("#stop")
    expect(page.locator(".answer")).to_have_attribute("data-state", "stopped")
    assert stub.bodies[0] == stub.bodies[1]
    ask(page, "hello")
    assert stub.bodies[2]["messages"][1]["content"].startswith("0 1 2 ")  # what was written stays


@pytest.mark.slow
def test_steps_that_come_faster_than_frames_are_shown_together(page: Any) -> None:
    """Long answers leave the page responsive.

    A page that lays out every step is busy for seconds, and reacts to neither Stop nor Escape.
    """
    page.evaluate(
        "window.draws = 0; const counter = new MutationObserver(() => draws++);"
        "counter.observe(document.getElementById('forwards'), {childList: true})"
    )
    answer = ask(page, "flood")
    wanted = "".join(f"{number} " for number in range(2000))
    assert answer.locator(".read").inner_text().strip() == wanted.strip()
    expect(page.locator("#steps [role=option]")).to_have_count(2000)
    expect(page.locator("#step")).to_contain_text("Step 2000 of 2000")
    assert page.evaluate("draws") < 1000


@pytest.mark.slow
def test_errors_and_what_the_model_writes_are_shown_as_text(page: Any, stub: Stub) -> None:
    for script, shown in {
        "refused": "400: top_p is <b>bad</b> (top_p).",
        "full": "503: the queue is full. Try again in 7 s.",
        "broken": "a processor raised",
        "cut": "The connection ended before the answer did.",
    }.items():
        expect(page.locator("#send")).to_be_enabled()
        answer = ask(page, script, until="failed")
        expect(answer.locator(".error")).to_have_text(shown)
        assert answer.locator(".error b").count() == 0
    expect(page.locator("#send")).to_be_enabled()
    ask(page, "hello")
    said = [message["content"] for message in stub.bodies[-1]["messages"]]
    assert said == [
        "broken",
        "0 ",
        "cut",
        "0 ",
        "hello",
    ]  # what had no answer is no part of the conversation
    answer = ask(page, "html")
    assert answer.locator(".read").inner_text().startswith("<img src=x onerror=")
    assert answer.locator(".read :is(img, script, [onerror])").count() == 0
    show(page, "Tokens")
    assert answer.locator(".text").text_content() == HTML + "!"
    assert answer.locator(".text *:not(span)").count() == 0
    assert page.locator("#step s").all_text_contents() == ["<i>no</i>"]
    assert page.title() == "refused · forerun"
    with pytest.raises(sync_api.Error, match="TrustedHTML"):
        page.evaluate("html => { document.createElement('b').innerHTML = html }", HTML)


@pytest.mark.slow
def test_it_waits_for_the_model_and_for_a_key(page: Any, stub: Stub) -> None:
    stub.not_ready, stub.key = 2, "secret"
    page.reload()
    expect(page.locator("#status")).to_have_text("503: the model is being loaded. Waiting …")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#status")).to_contain_text("wants an API key")
    page.click("#tab-settings")
    page.fill("#key", "secret")
    expect(page.locator("#status")).to_have_text("stub-model is ready.")
    expect(page.locator("#send")).to_be_enabled()


@pytest.mark.slow
def test_a_choice_of_models_goes_along_and_stays_with_the_conversation(
    page: Any, stub: Stub
) -> None:
    choice = page.get_by_role("combobox", name="Model")
    expect(page.locator("#model")).to_be_hidden()  # there is nothing to choose
    ask(page, "hello")
    stub.states |= {"other <b>": "unloaded", "third": "loaded"}
    page.reload()
    expect(page.locator("#status")).to_have_text("3 models are ready.")
    expect(choice.locator("option")).to_have_text([*stub.states])
    expect(choice).to_have_value("stub-model")
    choice.select_option("other <b>")
    answer = ask(page, "hello", until=None)
    expect(page.locator("#status")).to_have_text("other <b> is being loaded …")
    stub.states["other <b>"] = "loaded"
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.get_by_role("heading")).to_have_text("other <b>")
    expect(page.locator("#status")).to_have_text("other <b> is ready.")
    expect(page.locator("#context")).to_contain_text("of 1,000 tokens")  # known since the load
    assert [body["model"] for body in stub.bodies] == ["stub-model", "other <b>"]
    page.reload()  # the choice is kept, and so are those of conversations
    expect(choice).to_have_value("other <b>")
    rows = page.locator(".conversation")
    rows.last.click()
    expect(choice).to_have_value("stub-model")
    rows.first.click()
    expect(choice).to_have_value("other <b>")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer")).to_have_attribute("data-state", "done")
    page.click("#clear")
    choice.focus()
    page.keyboard.press("ArrowDown")
    ask(page, "hello")
    assert [body["model"] for body in stub.bodies[2:]] == ["other <b>", "third"]
    del stub.states["other <b>"]
    page.reload()
    expect(page.locator("#status")).to_have_text("2 models are ready.")
    rows.nth(1).click()
    expect(page.locator("#status")).to_have_text(
        "other <b> is not served here: stub-model answers."
    )
    expect(choice).to_have_value("stub-model")


@pytest.mark.slow
def test_answers_are_read_as_markdown_and_their_tokens_stay(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = ask(page, "markdown")
    read = answer.locator(".read")
    expect(read.locator("strong")).to_have_text("push")
    code = read.locator("pre[aria-label='Code in python'] code")
    assert code.text_content() == 'def push(item):\n    return "<b>" + item\n'
    assert code.locator(".hljs-keyword").all_text_contents() == ["def", "return"]
    assert code.locator("b").count() == 0
    read.get_by_role("button", name="Copy").click()
    expect(read.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == code.text_content()
    assert read.locator(".table th").all_text_contents() == ["a", "b"]
    cell = read.locator("td").last
    assert cell.evaluate("e => getComputedStyle(e).textAlign") == "right"
    expect(read.locator("li")).to_contain_text("☑ done")
    links = read.locator("a").evaluate_all("all => all.map(a => [a.textContent, a.href, a.rel])")
    assert links == [
        ["a picture", "http://127.0.0.1:1/spy.png", "noopener noreferrer"],
        ["a link", "https://example.org/", "noopener noreferrer"],
        ["a trap", "", ""],
    ]
    show(page, "Tokens")
    expect(read).to_be_hidden()
    assert answer.locator(".text").text_content() == MARKDOWN
    marked = answer.locator(".piece.mono").all_text_contents()
    assert "".join(marked) == MARKDOWN[MARKDOWN.index("```") : MARKDOWN.rindex("```") + 4]
    page.reload()
    expect(page.get_by_role("radio", name="Tokens")).to_be_checked()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["think", "think apart"])
def test_thinking_is_folded_and_not_sent_back(page: Any, stub: Stub, script: str) -> None:
    answer = ask(page, script)
    expect(answer.locator(".read > .prose")).to_have_text("It is 42.")
    thoughts = answer.locator(".thinking .prose")
    expect(thoughts).to_be_hidden()
    answer.locator("summary").click()
    expect(thoughts).to_be_visible()
    assert thoughts.inner_text() == {"think": "They want 42.", "think apart": "Hm."}[script]
    ask(page, "hello")
    assert stub.bodies[1]["messages"][1] == {"role": "assistant", "content": "It is 42."}


@pytest.mark.slow
def test_conversations_are_kept_renamed_exported_and_deleted(page: Any, stub: Stub) -> None:
    ask(page, "hello")
    page.click("#clear")
    expect(page.locator("article")).to_have_count(0)
    ask(page, "markdown")
    assert [message["content"] for message in stub.bodies[1]["messages"]] == ["markdown"]
    page.reload()
    rows = page.locator(".conversation")
    expect(rows).to_have_text(["markdown", "hello"])
    rows.last.click()
    expect(page.locator("h1")).to_have_text("hello")
    expect(page.locator(".read")).to_contain_text("Cats purr when they")
    expect(page.locator("#tau")).to_have_text("2.25")
    expect(page.locator("#send")).to_be_enabled()
    ask(page, "rests")
    assert len(stub.bodies[2]["messages"]) == 3  # it goes on where it was
    expect(rows).to_have_text(["hello", "markdown"])
    press_in_menu(page, "hello", "Rename")
    page.fill("#name", "Cats <b>")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Cats <b>")
    with page.expect_download() as saved:
        press_in_menu(page, "Cats <b>", "Export as Markdown")
    assert saved.value.suggested_filename == "Cats-b.md"
    text = Path(saved.value.path()).read_text()
    assert text.startswith("# Cats <b>\n\n## Question\n\nhello\n\n## Answer\n\nCats purr when")
    with page.expect_download() as saved:
        press_in_menu(page, "Cats <b>", "Export as JSON")
    exported = json.loads(Path(saved.value.path()).read_text())
    assert [turn["question"] for turn in exported["turns"]] == ["hello", "rests"]
    assert exported["turns"][0]["answers"][0]["steps"][1]["rejected"] == ["do", "like\n", ""]
    press_in_menu(page, "Cats <b>", "Delete")
    page.get_by_role("button", name="Cancel").click()
    expect(rows).to_have_count(2)
    press_in_menu(page, "Cats <b>", "Delete")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(rows).to_have_text(["markdown"])
    expect(page.locator("h1")).to_have_text("New chat")
    page.reload()
    expect(rows).to_have_text(["markdown"])


@pytest.mark.slow
def test_an_edited_question_leaves_the_one_before_as_a_version(page: Any, stub: Stub) -> None:
    ask(page, "hello")
    ask(page, "rests")
    page.get_by_role("button", name="Edit the message").first.click()
    editor = page.get_by_role("textbox", name="Edit the message")
    expect(editor).to_be_focused()
    editor.press("Escape")
    expect(page.locator("article")).to_have_count(2)
    page.get_by_role("button", name="Edit the message").first.click()
    editor.fill("markdown")
    editor.press("Enter")
    expect(page.locator("article")).to_have_count(1)
    expect(page.locator(".answer")).to_have_attribute("data-state", "done")
    assert [message["content"] for message in stub.bodies[2]["messages"]] == ["markdown"]
    expect(page.locator(".versions")).to_have_text("2 of 2")
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".question")).to_have_text(["hello", "rests"])
    ask(page, "hello")
    assert len(stub.bodies[3]["messages"]) == 5
    page.reload()
    page.locator(".conversation").click()
    expect(page.locator("article")).to_have_count(3)
    page.get_by_role("button", name="Later version").click()
    expect(page.locator(".question")).to_have_text(["markdown"])


@pytest.mark.slow
def test_a_text_file_that_is_dropped_goes_along(page: Any, stub: Stub) -> None:
    drop = """files => {
        const data = new DataTransfer();
        for (const [name, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name));
        document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
    }"""
    text = "x = '```'\n"
    page.evaluate(drop, [["a.py", list(text.encode())], ["b.bin", [255, 254, 0]]])
    expect(page.locator("#file-problem")).to_have_text("b.bin is not a text in UTF-8.")
    expect(page.locator("#files .file")).to_contain_text("a.py3 tokens")
    page.evaluate(drop, [["c.txt", [99]]])
    page.get_by_role("button", name="Leave out c.txt").click()
    ask(page, "What is this?")
    assert stub.bodies[0]["messages"][0]["content"] == (
        f"a.py:\n````py\n{text}````\n\nWhat is this?"
    )
    expect(page.locator(".question summary")).to_have_text("a.py")
    expect(page.locator("#files .file")).to_have_count(0)


@pytest.mark.slow
def test_on_a_narrow_screen_the_columns_are_opened_and_closed(browser: Any, stub: Stub) -> None:
    page = opened(browser, stub.url, viewport={"width": 390, "height": 844})
    for pane, name in {"#sidebar": "Conversations", "#panel": "Figures and settings"}.items():
        opener = page.get_by_role("button", name=name)
        expect(page.locator(pane)).to_be_hidden()
        opener.click()
        expect(page.locator(pane)).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(pane)).to_be_hidden()
        expect(opener).to_be_focused()
    assert page.wrong == []
    page.context.close()


def test_vendored_libraries_have_their_licence_and_ask_nothing_of_others() -> None:
    for library in LIBRARIES:
        assert (FOLDER / library.licence).stat().st_size > 1000
        assert library.version in (FOLDER / Path(library.file).name).read_text()[:3000]
    vendored = {Path(library.file).name for library in LIBRARIES}
    scripts = [*STATIC.glob("*.js"), *STATIC.glob("*.html"), *STATIC.glob("*.css")]
    assert {path.name for path in FOLDER.glob("*js")} == vendored
    for path in scripts:
        addresses = re.findall(r"https?://[^\"' )]+", path.read_text())
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path.name


LOOKS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "forced": {"forced_colors": "active", "reduced_motion": "reduce"},
    "narrow": {"viewport": {"width": 400, "height": 800}},
}


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
def test_every_look_is_accessible_and_fits_its_window(
    browser: Any, stub: Stub, look: str, tmp_path: Path
) -> None:
    stub.states |= {"another-model-with-quite-a-long-name-7B-Instruct-Q4_K_M": "loaded"}
    page = opened(browser, stub.url, **LOOKS[look])
    expect(page.locator("#send")).to_be_enabled()
    page.select_option("#model", index=1)
    ask(page, "markdown")
    ask(page, "think")
    page.check("#both")
    ask(page, "hello")
    expect(page.locator(".verdict")).to_be_visible()
    ask(page, "refused", until="failed")
    expect(page.locator("article:last-of-type .verdict")).to_be_visible()
    assert overflowing(page) == []
    check_with_axe(page)
    show(page, "Tokens")
    lines = page.locator(".answer .piece").evaluate_all(
        "all => all.map(p => getComputedStyle(p).textDecorationLine)"
    )
    assert set(lines) == {"underline", "overline"}
    assert overflowing(page) == []
    check_with_axe(page)
    assert len(page.screenshot(path=tmp_path / f"{look}.png")) > 10_000
    page.locator("article:nth-last-of-type(2)").get_by_role(
        "button", name="Figures and steps"
    ).first.click()
    figures = page.locator("#figures").bounding_box()
    assert figures["y"] >= 0 and figures["y"] + figures["height"] <= 800, figures
    page.evaluate("document.querySelectorAll('dd').forEach(dd => dd.textContent = '12345.6')")
    assert (
        page.locator("#figures :is(div, dt, dd), #legend :is(button, small)").evaluate_all(
            "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.outerHTML)"
        )
        == []
    )
    check_with_axe(page)
    page.click("#tab-settings")
    assert overflowing(page) == []
    check_with_axe(page)
    assert page.wrong == []
    page.context.close()
    if not AXE.is_file():
        pytest.skip("the rest needs axe-core: npm install axe-core, or AXE_CORE=axe.min.js")


def overflowing(page: Any) -> list[str]:
    """What reaches over the window's edges, except in boxes that scroll."""
    return page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(e => {
            const box = e.getBoundingClientRect();
            const isScrolled = e.closest("pre, .table, #steps, .offscreen, .track");
            return box.width && !isScrolled && (box.right > innerWidth + 1 || box.left < -1);
        }).map(e => e.outerHTML.slice(0, 100))"""
    )


def check_with_axe(page: Any) -> None:
    """Check the page as it is with axe-core, where there is one."""
    if not AXE.is_file():
        return
    page.evaluate(AXE.read_text())
    violations = page.evaluate(
        "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.failureSummary)]))"
    )
    assert violations == []


@pytest.mark.slow
def test_the_real_server_is_understood(browser: Any) -> None:
    with live() as server:
        page = opened(browser, server.url)
        expect(page.locator("#status")).to_have_text("tiny is ready.")
        expect(page.locator("#used")).to_have_text("")
        page.click("#tab-settings")
        page.fill("#max_tokens", "40")
        page.check("#both")
        answer = ask(page, "the low the low the low")
        expect(page.locator(".verdict")).to_contain_text("The texts are equal")
        expect(page.locator("#context")).to_contain_text(" of 512 tokens of context used")
        show(page, "Tokens")
        assert answer.locator(".piece.bonus, .piece.correction").count() > 0
        assert answer.locator(".facts").text_content().startswith("40 tokens")
        assert page.locator("#tokens").text_content() == "40"
        assert float(page.locator("#tau").text_content()) >= 1
        assert (
            page.locator("#steps li").count() == int(page.locator("#forwards").text_content()) <= 40
        )
        page.evaluate(
            "document.getElementById('top_p').max = 9; document.getElementById('top_p').value = 7"
        )
        refused = ask(page, "hello", until="failed")
        expect(refused.locator(".error")).to_contain_text("400: top_p")
        assert page.wrong == []
        page.context.close()
