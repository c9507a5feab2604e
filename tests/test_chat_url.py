"""`forerun chat --url`: against forerun's server, and against one that makes trouble."""

from __future__ import annotations

import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from rich.console import Console
from serving import NAME, Live, live, make_decoder, post
from terminals import Terminal
from test_server_process import health, started, until

from forerun.cli.chat import chat
from forerun.cli.remote import Remote, key_for
from forerun.cli.talk import Talk
from forerun.cli.wire import BrokenError
from forerun.cli.writing import Answer, Reading
from forerun.methods import SD
from forerun.params import SamplingParams
from forerun.zoo import FOLDER

USER = {"role": "user", "content": "hello"}
SCHEMA = {"enum": ["x", "y"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(lambda: make_decoder(method=SD(gamma=3)), api_key="secret") as found:
        yield found


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("FORERUN_API_KEY", "secret")


@pytest.fixture
def talk(server: Live) -> Talk:
    return Talk(Remote(server.url), SamplingParams(max_new_tokens=12), None)


def whole(server: Live, messages: list[dict[str, str]], **options: Any) -> Any:
    """The server's answer by a plain request."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0} | options
    return post(server, "/v1/chat/completions", body, headers={"Authorization": "Bearer secret"}).json()


# Forerun's own server.


def test_one_answer_is_the_servers(server: Live, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = whole(server, [{"role": "system", "content": "the"}, USER])
    text = wanted["choices"][0]["message"]["content"]
    options: Any = {"url": server.url, "system": "the", "max_new_tokens": 12}
    chat("hello", **options)
    assert capsys.readouterr() == (text + "\n", "")
    (tmp_path / "in.txt").write_text("hello\n")
    with (tmp_path / "in.txt").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        chat(None, as_json=True, **(options | {"url": server.url + "/v1/"}))
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["model"], found["finish_reason"]) == (text, NAME, "length")
    assert found["usage"] == wanted["usage"]
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert "".join(piece for piece, _ in found["pieces"]) == text
    assert {origin for _, origin in found["pieces"]} >= {"draft"}


def test_turns_follow_each_other(server: Live, talk: Talk, capsys: Any) -> None:
    talk.take("hello")
    first = [*talk.messages]
    assert first == [USER, {"role": "assistant", "content": whole(server, [USER])["choices"][0]["message"]["content"]}]
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == first[1]["content"].rstrip("\n")
    assert err.startswith("12 tokens, tau ") and f" {NAME}, context " in err and " of 512, cut at 12 tokens" in err
    (figures,) = talk.figures
    assert figures.tau is not None and figures.tau > 1
    again = [*first, {"role": "user", "content": "the"}]
    talk.take("the")
    assert talk.messages[2:] == [
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": whole(server, again)["choices"][0]["message"]["content"]},
    ]
    talk.take("/stats")
    assert "2 answers, 24 tokens, tau " in capsys.readouterr().err
    talk.take("/undo")
    talk.take("/method ar")  # changes no token
    talk.take("/retry")
    assert talk.messages == first
    assert talk.figures[-1].tau == 1 and "tiny without drafts, context" in capsys.readouterr().err
    with pytest.raises(ValueError, match="methods are ar, which is without drafts, and server, not 'sd'"):
        talk.take("/method sd")
    talk.take("/system the")
    talk.take("/retry")
    system = [{"role": "system", "content": "the"}, USER]
    assert talk.messages[1]["content"] == whole(server, system)["choices"][0]["message"]["content"]


def test_samples_have_seeds_of_their_own(server: Live, talk: Talk) -> None:
    talk.params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, top_p=0.9, top_k=50)
    talk.take("hello")
    first = [*talk.messages]
    talk.take("/retry")
    assert talk.messages != first
    other = Talk(talk.partner, talk.params, None)
    other.take("hello")
    assert other.messages == first


def test_tokens_are_tinted_by_their_origin(server: Live) -> None:
    console = Console(force_terminal=True, file=io.StringIO(), color_system="standard", soft_wrap=True)
    answer = Answer()
    answer.write(Remote(server.url).ask([USER], SamplingParams(max_new_tokens=24), None, Reading()), console, Reading())
    assert isinstance(console.file, io.StringIO) and "\x1b[32m" in console.file.getvalue()
    assert answer.text == whole(server, [USER], max_tokens=24)["choices"][0]["message"]["content"]


def test_an_interrupt_frees_the_row_and_keeps_what_was_written(
    server: Live, talk: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk.params, count, write = SamplingParams(max_new_tokens=400), 3, Answer.write

    def interrupted(self: Answer, chunks: Any, *rest: Any) -> None:
        def some() -> Iterator[Any]:
            for number, chunk in enumerate(chunks):
                if number == count:
                    chunks.close()
                    raise KeyboardInterrupt
                yield chunk

        write(self, some(), *rest)

    monkeypatch.setattr(Answer, "write", interrupted)
    talk.take("hello")
    until(lambda: server.rows == 0)
    assert talk.messages[0] == USER and len(talk.messages[1]["content"]) > 0
    assert talk.figures[0].tokens < 400 and "cut by Ctrl-C" in capsys.readouterr().err
    count = 0
    talk.take("the")
    assert len(talk.messages) == 2 and "the conversation is as it was" in capsys.readouterr().err


def test_answers_follow_a_form(server: Live, talk: Talk, capsys: Any) -> None:
    pytest.importorskip("llguidance")
    chat("hello", url=server.url, json_schema=json.dumps(SCHEMA), max_new_tokens=60)
    assert json.loads(capsys.readouterr().out) in ("x", "y")
    talk.take("/form regex (yes|no)")
    talk.take("hello")
    assert talk.messages[1]["content"] in ("yes", "no")
    before = [*talk.messages]
    with pytest.raises(ValueError, match="/form takes one of json-schema, regex, grammar, not 'xml'"):
        talk.take("/form xml x")
    talk.take("/form regex (")
    with pytest.raises(ValueError, match=r"^the server refuses this \(400\): cannot use response_format.regex: "):
        talk.take("the")
    assert talk.messages == before
    talk.take("/form")
    assert talk.params.response_format is None


def test_what_the_server_refuses_is_one_line(server: Live, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"has no such model .* \(404: there is no model 'other' here\)$"):
        chat("hello", url=server.url, model="other")
    with pytest.raises(ValueError, match=r"refuses this API key \(401: "):
        chat("hello", url=server.url, api_key="wrong")
    monkeypatch.delenv("FORERUN_API_KEY")
    with pytest.raises(ValueError, match=r"wants an API key: give --api-key or FORERUN_API_KEY \(401: "):
        chat("hello", url=server.url)
    talk.take("hello")
    before = [*talk.messages]
    with pytest.raises(ValueError, match=r"^the server refuses this \(400\): .*the target's context of 512"):
        talk.take("x" * 600)
    assert talk.messages == before


# A server that makes trouble.


class Stub(BaseHTTPRequestHandler):
    """Another server with OpenAI's API: what the last message says is what it does."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[dict[str, Any], str | None]] = []  # noqa: RUF012
    models: Any = {"object": "list", "data": [{"id": "stub"}]}  # noqa: RUF012

    def log_message(self, *_: Any) -> None:
        pass

    def give(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.models is None:
            self.give(404, b"no")
        else:
            body = self.models if isinstance(self.models, bytes) else json.dumps(self.models).encode()
            self.give(200, body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((body, self.headers.get("Authorization")))
        what = body["messages"][-1]["content"]
        refusals = {
            "busy": (503, b'{"error": {"message": "the queue is full"}}', "application/json", {"Retry_After": "7"}),
            "limit": (429, b'{"error": {"message": "slower"}}', "application/json", {}),
            "bad": (400, b'{"error": {"message": "top_p is\\n\\u001b[31mbad", "param": "top_q"}}', "text/plain", {}),
            "text": (500, b"out of memory", "text/plain", {}),
            "page": (500, b"<html>very long</html>", "text/html", {}),
            "moved": (307, b"", "text/plain", {"Location": "http://elsewhere/v1"}),
            "html": (200, b"<html></html>", "text/html", {}),
            "nonsense": (200, b"data: {nonsense\n\n", "text/event-stream", {}),
            "error": (200, b'data: {"error": {"message": "no room"}}\n\n', "text/event-stream", {}),
        }
        if what in refusals:
            status, text, kind, headers = refusals[what]
            self.give(status, text, kind, **headers)
            return
        if what == "hang up":
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in ("Grüße", " \x1b[2Jthere"):
            self.event({"choices": [{"delta": {"content": text}, "finish_reason": None}]})
        if what == "cut":  # in the middle of a chunk
            self.wfile.write(b"40\r\ndata: {")
            self.close_connection = True
            return
        if what == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.wfile.flush()
            self.close_connection = True
            return
        if what == "given up":
            self.event({"error": {"message": "a processor raised"}})
        else:
            self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            self.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, content: Any) -> None:
        data = f": comment\n\ndata: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
        half = len(data) // 2  # a network splits where it likes
        for part in (data[:half], data[half:]):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.flush()


@pytest.fixture
def stub() -> Iterator[str]:
    Stub.seen, Stub.models = [], {"object": "list", "data": [{"id": "stub"}]}
    found = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    thread = threading.Thread(target=found.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{found.server_address[1]}"
    found.shutdown()
    found.server_close()
    thread.join()


TEXT = "Grüße \x1b[2Jthere"


def test_another_server_has_neither_origins_nor_tau(stub: str, capsys: Any) -> None:
    talk = Talk(Remote(stub), SamplingParams(max_new_tokens=9, stop=["x"]), None)
    talk.take("hello")
    assert talk.messages[1]["content"] == TEXT
    err = capsys.readouterr().err
    assert err.startswith("4 tokens, ") and "tau" not in err and err.rstrip().endswith("stub, context 9")
    body, key = Stub.seen[0]
    assert key == "Bearer secret"
    assert body == {
        "model": "stub",
        "messages": [USER],
        "max_tokens": 9,
        "temperature": 0.0,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with pytest.raises(ValueError, match="is no forerun server: it has no method ar"):
        talk.take("/method ar")
    with pytest.raises(ValueError, match="--regex needs a forerun server"):
        talk.take("/form regex x")
    talk.take("/form json-schema {}")
    talk.take("/retry")
    assert Stub.seen[1][0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {}},
    }
    chat("hello", url=stub, as_json=True)
    usage = {"prompt_tokens": 5, "completion_tokens": 4}
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "text": TEXT, "finish_reason": "stop", "model": "stub", "usage": usage,
    }  # fmt: skip


def test_nothing_steers_the_terminal(stub: str) -> None:
    console = Console(force_terminal=True, file=io.StringIO(), color_system=None, soft_wrap=True)
    answer = Answer()
    answer.write(Remote(stub).ask([USER], SamplingParams(), None, Reading()), console, Reading())
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == "Grüße [2Jthere"
    assert answer.text == TEXT


def test_the_key_is_the_options_or_of_the_environment(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    chat("hello", url=stub, api_key="mine")
    chat("hello", url=stub)
    monkeypatch.delenv("FORERUN_API_KEY")
    chat("hello", url=stub)
    assert [key for _, key in Stub.seen] == ["Bearer mine", "Bearer secret", None]
    # OpenAI's key goes to OpenAI alone, and nowhere in clear text.
    assert key_for("https://api.openai.com/v1") == "other"
    for url in (stub, "http://api.openai.com/v1", "https://api.openai.com.evil.org", "https://openai.example"):
        assert key_for(url) is None
    with pytest.raises(ValueError, match=r"^the API key must be printable ASCII without spaces around it$"):
        chat("hello", url=stub, api_key="two\nlines")


def test_models_of_a_server(stub: str) -> None:
    Stub.models = {"data": [{"id": "one"}, {"id": "two"}]}
    with pytest.raises(ValueError, match="has several models: one, two; give --model"):
        Remote(stub)
    assert Remote(stub, model="two").model == "two"
    Stub.models = None
    with pytest.raises(ValueError, match="names no models, as OpenAI's API would; give --model"):
        Remote(stub)
    assert Remote(stub, model="any").model == "any"
    for found in ([], {"data": 3}, {"data": [{}]}, b"<html>", b"\xff", b"3"):
        Stub.models = found
        with pytest.raises(ValueError, match="is no server with OpenAI's API"):
            Remote(stub)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("busy", "the server cannot answer now (503): the queue is full; try again in 7 s"),
        ("limit", "the server cannot answer now (429): slower; try again later"),
        ("bad", "the server refuses this (400): top_p is [31mbad (top_q)"),
        ("text", "the server failed (500): out of memory"),
        ("page", "the server failed (500): Internal Server Error"),
        ("moved", "URL/v1 is elsewhere: http://elsewhere/v1"),
        ("html", "URL/v1 is no server with OpenAI's API: it answers with text/html"),
        ("nonsense", "the server sent what is no event of an answer: '{nonsense'"),
        ("error", "the server gave the answer up: no room"),
        ("hang up", "no server answers at URL/v1: Remote end closed connection without response"),
    ],
)
def test_trouble_is_one_line(stub: str, what: str, message: str, capsys: Any) -> None:
    with pytest.raises(ValueError) as error:
        chat(what, url=stub)
    assert str(error.value) == message.replace("URL", stub)
    assert capsys.readouterr().out == ""
    talk = Talk(Remote(stub), SamplingParams(), None)
    with pytest.raises(ValueError):
        talk.take(what)
    assert talk.messages == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", "the connection ended before the answer did"),
        ("reset", "the connection broke before the answer ended: Connection reset by peer"),
        ("given up", "the server gave the answer up: a processor raised"),
    ],
)
def test_what_came_before_a_break_is_kept(stub: str, what: str, message: str, capsys: Any) -> None:
    anyhow = {message, "the connection ended before the answer did"} if what == "reset" else {message}
    with pytest.raises(BrokenError) as error:
        chat(what, url=stub)
    assert str(error.value) in anyhow
    out = capsys.readouterr().out
    assert out == TEXT + "\n" or what == "reset"  # a reset throws away what was not read
    if what == "reset":
        return
    with pytest.raises(BrokenError):
        chat(what, url=stub, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["finish_reason"]) == (TEXT, None)
    talk = Talk(Remote(stub), SamplingParams(), None)
    talk.take(what)
    assert talk.messages == [{"role": "user", "content": what}, {"role": "assistant", "content": TEXT}]
    err = capsys.readouterr().err
    assert "broken off" in err and f"forerun: {message}; what came is kept, /retry asks again" in err
    talk.take("hello")
    assert len(talk.messages) == 4


def test_addresses_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"^no server answers at {url}/v1: Connection refused$"):
            chat("x", url=url)
    for url in (
        "localhost:8000",
        "ftp://a",
        "http://",
        "http://a:b",
        "http://a b",
        "http://a/?x=1",
        "http://[",
        "",
        "ä",
    ):
        with pytest.raises(ValueError, match="--url takes an address as http://"):
            chat("x", url=url)
    with pytest.raises(ValueError, match="--url takes no user and password"):
        chat("x", url="http://me:mine@a")
    local: Any = {"target": "smollm2", "draft_weights": "int8", "threads": 2, "method_arg": ["gamma=2"]}
    with pytest.raises(
        ValueError, match="--target, --method-arg, --draft-weights, --threads: with --url the server has"
    ):
        chat("x", url="http://127.0.0.1:9", **local)
    for name, option in (("model", "--model"), ("api_key", "--api-key")):
        with pytest.raises(ValueError, match=f"{option} is for --url"):
            chat("x", **{name: "y"})
    with pytest.raises(ValueError, match="the system prompt has a NUL character"):
        chat("x", url="http://127.0.0.1:9", system="\0")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(ValueError, match="--json is for one answer"):
        chat(None, url="http://127.0.0.1:9", as_json=True)


def test_it_imports_no_torch_and_errors_are_status_2(stub: str) -> None:
    program = (
        "import sys; from forerun.cli import _run; status = _run()\n"
        "print([each for each in ('torch', 'transformers', 'numpy') if each in sys.modules], status)"
    )
    for what, wanted in (("hello", f"{TEXT}\n[] 0\n"), ("busy", "[] 2\n")):
        done = subprocess.run(
            [sys.executable, "-c", program, "chat", what, "--url", stub], capture_output=True, text=True
        )
        assert done.stdout == wanted
        assert done.stderr.count("\n") == (what == "busy")


# All of it: the embedded pair in a server's process, and a terminal.


@pytest.mark.slow
def test_a_conversation_with_a_server_in_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "talker"
    shutil.copytree(FOLDER / "target", folder)
    config = folder / "tokenizer_config.json"
    template = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    options = ("--target", str(folder), "--draft", str(FOLDER / "draft"), "--method", "sd", "--no-guard", "--log-json")
    with started(*options) as (process, url):
        until(lambda: health(url) == 200)
        terminal = Terminal("chat", "--url", url, "--stop", "zzzz", term="xterm-256color")
        assert b"talker at http://127.0.0.1" in terminal.wait(b"> ")
        terminal.type(b"def add(a, b):\n")
        terminal.wait(b"\x1b[32m")  # a drafted token
        terminal.type(b"\x03")
        terminal.wait(b"cut by Ctrl-C")
        terminal.wait(b"> ")
        terminal.type(b"/stats\n")
        terminal.wait(b"1 answers")
        terminal.wait(b"> ")
        terminal.type(b"/quit\n")
        assert terminal.end() == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0 and process.stderr is not None
        logged = [json.loads(line) for line in process.stderr.read().splitlines()]
    (line,) = [each for each in logged if "tokens" in each]
    assert line["reason"] == "abort" and line["tau"] >= 1
