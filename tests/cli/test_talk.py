"""A conversation in the terminal: how it is shown, typed, kept in files, and cut to the context."""

import io
import re
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from rich.markdown import Markdown

import forerun
from forerun.api.decoder import Decoder
from forerun.cli.conversation import as_block, first_that_fits
from forerun.cli.line_editor import history_file, make_editor, typed_by
from forerun.cli.markdown_stream import MarkdownStream, blocks
from forerun.cli.talk import Talk
from forerun.sampling.params import SamplingParams
from tests.support.ggufs import small, write
from tests.support.toys import refuses

TEXT = """\
Use **push**:

```python
def push(item):

    return item
```

| a | b |
|---|---|
| 1 | 2 |

1. one
   - two

> the end
"""


def on_screen(written: str) -> list[str]:
    """The lines that are left on a terminal: ESC [ n F and ESC [ J remove the last n."""
    lines: list[str] = []
    for part in re.split(r"(\x1b\[\d+F\x1b\[J)", re.sub(r"\x1b\[[\d;]*m", "", written)):
        if part.startswith("\x1b"):
            del lines[-int(part[2 : part.index("F")]) :]
        else:
            assert "\x1b" not in part
            lines += part.splitlines()
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_streamed_markdown_is_shown_once_and_whole(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.cli.markdown_stream._REDRAW_SECONDS", 0)
    console = Console(force_terminal=True, file=io.StringIO(), width=50, height=8)
    with MarkdownStream(console) as stream:
        for at in range(0, len(TEXT), length):
            stream.push(TEXT[at : at + length])
    whole = Console(file=io.StringIO(), width=50)
    whole.print(Markdown(TEXT))
    wanted = [line.rstrip() for line in whole.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    shown = on_screen(console.file.getvalue())  # type: ignore[attr-defined]
    assert [line for line in shown if line] == [line for line in wanted if line]
    blank = [number for number, line in enumerate(shown) if not line]
    assert all(after - before > 1 for before, after in pairwise(blank))


def test_markdown_steers_no_terminal_and_outlives_an_interrupt() -> None:
    console = Console(force_terminal=True, file=io.StringIO(), width=50)
    with pytest.raises(KeyboardInterrupt), MarkdownStream(console) as stream:
        stream.push("one \x1b[2J\x07two")
        raise KeyboardInterrupt
    assert on_screen(console.file.getvalue()) == ["one [2Jtwo"]  # type: ignore[attr-defined]


def test_html_of_an_answer_is_seen() -> None:
    console = Console(force_terminal=True, file=io.StringIO(), width=50)
    with MarkdownStream(console) as stream:
        stream.push("<div>\n\na <b>c</b>")
    assert on_screen(console.file.getvalue()) == ["<div>", "", "a <b>c</b>"]  # type: ignore[attr-defined]


def test_only_the_last_block_may_still_change() -> None:
    assert blocks("") == [""]
    assert blocks("one\ntwo") == ["one\ntwo"]
    assert blocks("one\n\ntwo\n") == ["one\n\n", "two\n"]
    assert blocks("```\none\n\ntwo\n") == ["```\none\n\ntwo\n"]
    assert blocks("a\u2028b\n\nc") == ["a\u2028b\n\n", "c"]
    assert "".join(blocks(TEXT)) == TEXT


@pytest.fixture
def typing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that types keys in a new editor, and gives what it sends."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys:

        def send(text: str) -> str | None:
            keys.send_text(text)
            return typed_by(make_editor(["/help", "/save"], input=keys, output=DummyOutput()))

        yield send


def test_lines_and_pasted_text_are_one_message(typing: Any) -> None:
    assert typing("one\r") == "one"
    assert typing("one\x1b\rtwo\\\rthree\r") == "one\ntwo\nthree"
    assert typing("see: \x1b[200~def f():\n    pass\n\x1b[201~\r") == "see: def f():\n    pass\n"
    assert typing("\x04") is None
    assert typing("half\x03") == ""


def test_what_was_typed_comes_back_in_later_sessions(typing: Any) -> None:
    typing("first\r")
    assert stat.S_IMODE(history_file().stat().st_mode) == 0o600
    typing("a\x1b\rb\r")
    assert typing("\x10\r") == "a\nb"  # Ctrl-P, as the up arrow


def test_the_oldest_questions_leave_a_full_context() -> None:
    messages = [{"role": "user", "content": "x" * 10} for _ in range(9)]

    def count(some: list[dict[str, str]]) -> int:
        return sum(len(message["content"]) for message in some)

    assert first_that_fits(messages, count, 100, 10) == 0
    assert first_that_fits(messages, count, 100, 11) == 4  # then the rest has half
    assert first_that_fits(messages, count, 100, 10_000) == 4
    assert first_that_fits(messages, count, 5, 1) == 8  # the last question stays


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("talk") / "model.gguf"
    return forerun.load(write(path, small(max_position_embeddings=2048)), method="ar")


@pytest.fixture
def talk(decoder: Decoder, capsys: Any) -> Talk:
    return Talk(decoder, SamplingParams(max_new_tokens=6))


def test_what_leaves_the_context_is_said(talk: Talk, capsys: Any) -> None:
    long = "low " * 400
    for _ in range(8):
        talk.take(long)
        err = capsys.readouterr().err
        if talk.left:
            break
    assert f"no longer sees {talk.left // 2} question" in err
    sent = [*talk.messages[talk.left : -1]]
    wanted = talk.decoder.chat(sent, max_new_tokens=6).text
    assert talk.messages[-1]["content"] == wanted
    count = len(talk.messages)
    talk.take("hello")
    assert "no longer" not in capsys.readouterr().err and len(talk.messages) == count + 2
    talk.take("/clear")
    assert talk.left == 0


def test_a_conversation_is_saved_and_loaded(talk: Talk, tmp_path: Path, capsys: Any) -> None:
    talk.take("/system the low")
    talk.take("hello")
    before = [*talk.messages]
    talk.take(f"/save {tmp_path / 'a.json'}")
    talk.take(f"/save {tmp_path / 'a.md'}")
    text = (tmp_path / "a.md").read_text()
    assert text.startswith("## System\n\nthe low\n\n## Question\n\nhello\n\n## Answer\n\n")
    other = Talk(talk.decoder, talk.params)
    other.take(f"/load {tmp_path / 'a.json'}")
    assert (other.messages, other.system) == (before, "the low")
    assert "loaded 1 question and its answer" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text('{"format": "forerun-chat", "messages": [{"role": "user"}]}')
    (tmp_path / "bad.bin").write_bytes(b"\xff\x00")
    for command, message in (
        ("/load", "/load takes a file's name"),
        (f"/load {tmp_path / 'none'}", "No such file"),
        (f"/load {tmp_path / 'bad.bin'}", "is not a text in UTF-8"),
        (f"/load {tmp_path / 'bad.json'}", "must be questions and answers in turns"),
        (f"/save {tmp_path}", "Is a directory"),
        ("/view html", "/view takes text or tokens, not 'html'"),
    ):
        refuses(message, other.take, command)
        assert other.messages == before and not other.files


def test_a_file_goes_along_with_the_next_message(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("low\n")
    talk.take(f"/load {path}")
    talk.take("hello")
    talk.take("hello")
    assert [message["content"] for message in talk.messages[::2]] == [
        "a.py:\n```\nlow\n```\n\nhello",
        "hello",
    ]
    assert as_block("a", "x ``` y").startswith("a:\n````\n")


def test_a_question_is_answered_again(talk: Talk, capsys: Any) -> None:
    refuses("/retry needs a question", talk.take, "/retry")
    talk.take("hello")
    before = [*talk.messages]
    talk.take("/retry")
    assert talk.messages == before
    assert "temperature 0 gives the same answer again" in capsys.readouterr().err
    talk.params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    talk.take("/retry")
    assert talk.messages[0] == before[0] and talk.messages != before and len(talk.messages) == 2
