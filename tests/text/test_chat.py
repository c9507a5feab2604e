"""Conversations: prompts, decoders, the command line, a terminal, and data sets."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from transformers import LogitsProcessorList

import forerun
from forerun.api.decoder import Decoder
from forerun.bench.datasets import Prompt, read_prompts, tokenised
from forerun.bench.models import load_prompts
from forerun.bench.plan import Plan
from forerun.cli.generate import chat
from forerun.cli.line_editor import ask
from forerun.cli.talk import Talk
from forerun.cli.writing import Answer, Reading
from forerun.methods import AR
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt, turn_ends
from tests.support.ggufs import TEMPLATE, small, write
from tests.support.serving import until
from tests.support.toys import refuses, tiny_tokenizer

END = 2
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "low"}
SYSTEM = {"role": "system", "content": "12 the"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small(max_position_embeddings=2048)
    return write(tmp_path_factory.mktemp("chat") / "model.gguf", model)


@pytest.fixture(scope="module")
def decoder(file: Path) -> Decoder:
    return forerun.load(file, method="ar")


def test_a_prompt_is_what_the_template_makes(tmp_path: Path) -> None:
    begins = {"tokenizer.chat_template": "{{ bos_token }}" + TEMPLATE}
    decoder = forerun.load(
        write(tmp_path / "m.gguf", small(), pre="pieces", metadata=begins), method="ar"
    )
    tokenizer: Any = decoder.tokenizer
    assert tokenizer("hello")["input_ids"][0] == tokenizer.bos_token_id  # it would put one in front
    ids = chat_prompt(tokenizer, [USER])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert (
        decoder.chat([USER], max_new_tokens=4).tokens
        == decoder.generate(ids, max_new_tokens=4).tokens
    )
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    ids = chat_prompt(tokenizer, [{"role": "user", "content": parts}], SYSTEM["content"])
    assert ids == chat_prompt(tokenizer, [SYSTEM, {"role": "user", "content": "hel\nlo"}])
    text = (
        "<|im_start|>system\n12 the<|im_end|>\n<|im_start|>user\nhel\nlo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids).endswith(text)


def test_messages_that_are_refused(decoder: Decoder) -> None:
    for messages, message in (
        ([], "there are no messages"),
        ("hello", "messages must be a list of {role, content}, not str"),
        (["hello"], "message 1 must be {role, content}, not str"),
        ([USER, {"role": "user"}], "message 2 has no content"),
        ([{"content": "x"}], "message 1 has no role"),
        (
            [USER | {"name": "Al"}],
            "message 1 has an unknown key 'name'; there are role and content",
        ),
        (
            [{"role": "wizard", "content": "x"}],
            "message 1 has the role 'wizard'; there are system, user, assistant",
        ),
        ([{"role": ["user"], "content": "x"}], "message 1 has the role ['user']; there are"),
        ([{"role": "user", "content": 3}], "the content of message 1 must be text, not int"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "message 1 has a part that is no text: 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "a part of message 1 must be text, not NoneType",
        ),
        ([{"role": "user", "content": "a\0"}], "the content of message 1 has a NUL character"),
        ([{"role": "user", "content": "a\ud800"}], "message 1 has half of a surrogate pair"),
        ([ANSWER | {"content": ""}], "the only message is an empty one from the assistant"),
    ):
        for call in (decoder.chat, decoder.stream_chat):
            refuses(re.escape(message), call, messages)


def test_chats_that_no_template_renders_are_refused(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = decoder.tokenizer
    refuses("a chat needs a tokenizer", chat_prompt, None, [USER])
    refuses("the model has no chat template", chat_prompt, tiny_tokenizer(), [USER])
    refuses(
        "there is a system prompt and a system message",
        chat_prompt,
        tokenizer,
        [SYSTEM, USER],
        "another",
    )
    for name in ("tokenize", "chat_template", "add_generation_prompt", "conversation"):
        refuses(
            f"'{name}' is not an argument of chat templates",
            chat_prompt,
            tokenizer,
            [USER],
            **{name: None},
        )
    monkeypatch.setattr(
        tokenizer, "chat_template", "{{ raise_exception('No system\n  prompts, please') }}"
    )
    message = "^the chat template refuses these messages: No system prompts, please$"
    refuses(message, chat_prompt, tokenizer, [USER])
    assert turn_ends(tokenizer) == frozenset()


def test_chat_is_generate_on_the_rendered_prompt(decoder: Decoder) -> None:
    conversations = [[USER], [USER, ANSWER, {"role": "user", "content": "1 2 3"}]]
    prompts = [
        chat_prompt(decoder.tokenizer, conversation, "the") for conversation in conversations
    ]
    wanted = decoder.generate(prompts, max_new_tokens=12)
    many = decoder.chat(conversations, system="the", max_new_tokens=12)
    assert [completion.tokens for completion in many] == [
        completion.tokens for completion in wanted
    ]
    one = decoder.chat(conversations[0], SamplingParams(max_new_tokens=12), system="the")
    assert one.tokens == wanted[0].tokens
    streamed = "".join(
        chunk.text
        for chunk in decoder.stream_chat(conversations[0], system="the", max_new_tokens=12)
    )
    assert streamed == one.text


def test_an_answer_ends_where_the_template_ends_a_turn(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert turn_ends(decoder.tokenizer) == {END}
    monkeypatch.setattr(
        decoder.target.model.generation_config, "eos_token_id", None
    )  # a checkpoint that says nothing
    length = len(chat_prompt(decoder.tokenizer, [USER])) + 3

    def end_there(ids: Any, scores: Any) -> Any:
        only_end = torch.full_like(scores, -torch.inf).index_fill_(-1, torch.tensor([END]), 0.0)
        return scores if ids.shape[1] < length else only_end

    how: dict[str, Any] = {
        "max_new_tokens": 9,
        "logits_processor": LogitsProcessorList([end_there]),
    }
    found = decoder.chat([USER], **how)
    assert (len(found.tokens), found.tokens[-1], found.finish_reason) == (4, END, "stop")
    assert "<|im_end|>" not in found.text
    assert [c.finish_reason for c in decoder.stream_chat([USER], **how)][-1] == "stop"
    assert len(decoder.chat([USER], ignore_eos=True, **how).tokens) == 9


def test_progress_counts_the_tokens_that_were_read(decoder: Decoder) -> None:
    seen: list[tuple[int, int]] = []
    decoder.close()
    how: dict[str, Any] = {"max_new_tokens": 1, "progress": lambda *each: seen.append(each)}
    prompt = chat_prompt(decoder.tokenizer, [{"role": "user", "content": "x" * 1500}])
    decoder.generate(prompt, **how)
    assert len(seen) > 1 and seen == sorted(seen)
    assert seen[-1] == (len(prompt) - 1, len(prompt))
    seen.clear()
    decoder.generate([*prompt, 5, 6, 7], **how)  # what is known already counts as read
    assert seen == [(len(prompt) + 2, len(prompt) + 3)]


def test_one_answer_is_printed_or_written_as_json(
    file: Path, decoder: Decoder, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decoder.chat([USER], system="the", max_new_tokens=8)
    options: Any = {"target": str(file), "system": "the", "max_new_tokens": 8}
    chat("hello", **options)
    assert capsys.readouterr() == (wanted.text + "\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    chat(None, as_json=True, method="suffix", **options)
    result = json.loads(capsys.readouterr().out)
    assert (result["tokens"], result["method"]) == (wanted.tokens, "suffix")


def test_mistakes_on_the_command_line_are_one_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt, options, message in (
        (
            "x",
            {"target": "embedded"},
            "the embedded model has no chat template; `forerun fetch qwen-coder`",
        ),
        ("", {}, "the prompt is empty"),
        ("x", {"method": "sd"}, "needs a draft model"),
        ("x", {"system": "\0"}, "has a NUL character"),
        ("x" * 3000, {}, "leaves room for at most 2047"),
        (None, {"as_json": True}, "--json is for one answer"),
    ):
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        refuses(message, chat, prompt, **{"target": str(file), **options})


@pytest.fixture
def talk(decoder: Decoder, capsys: Any) -> Any:
    return Talk(decoder, SamplingParams(max_new_tokens=6))


def test_turns_follow_each_other(talk: Any, capsys: Any) -> None:
    """Mistakes leave a conversation as it was."""
    talk.take("hello")
    first = [*talk.messages]
    assert first[0] == USER and first[1]["role"] == "assistant"
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == first[1]["content"].rstrip("\n")
    assert "6 tokens, tau 1.00" in err and "tokens/s, ar, context" in err
    assert "cut at 6 tokens" in err and len(err.splitlines()) == 1
    talk.take("the")
    wanted = talk.decoder.chat([*first, {"role": "user", "content": "the"}], max_new_tokens=6).text
    assert talk.messages[2:] == [
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": wanted},
    ]
    talk.take("/undo")
    assert talk.messages == first
    talk.take(" /etc is a folder")
    assert talk.messages[2]["content"] == "/etc is a folder"
    talk.take("/clear")
    assert talk.messages == []
    talk.take("/system the low")
    talk.take("hello")
    assert (
        talk.messages[1]["content"]
        == talk.decoder.chat([USER], system="the low", max_new_tokens=6).text
    )
    talk.take("/system")
    assert talk.system == "the low" and capsys.readouterr().err.endswith("system prompt: the low\n")
    talk.take("/system none")
    talk.take("/temperature 0.5")
    talk.take("/max")
    assert (talk.system, talk.params) == (None, SamplingParams(max_new_tokens=6, temperature=0.5))
    assert capsys.readouterr().err.endswith("temperature: 0.5\nmax_new_tokens: 6\n")
    talk.take("/undo")
    talk.take("/undo")  # of nothing
    talk.take("hello")
    before = [*talk.messages]
    for text, message in (
        ("/bogus", "unknown command /bogus; there are /help, /system, .*, /quit"),
        ("x" * 2100, "the message has .* tokens and fills the context of 2048: send less"),
        ("/system a\0", "has a NUL character"),
        ("/max 0", "max_new_tokens must be at least 1, not 0"),
        ("/temperature hot", "takes a number, not 'hot'"),
    ):
        refuses(message, talk.take, text)
        assert (talk.messages, talk.system) == (before, None)


def test_each_answer_has_a_seed(talk: Any) -> None:
    talk.params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    answers = []
    for who in (
        talk,
        Talk(talk.decoder, talk.params),
    ):  # and the whole conversation can be had again
        for command in ("hello", "/undo", "hello"):
            who.take(command)
            answers.append([*who.messages])
    assert answers[:3] == answers[3:] and answers[0] != answers[2]


def test_tokens_are_tinted_and_nothing_steers_the_terminal() -> None:
    pieces = [("Grüße", "draft"), (" \x1b[2Jthere", "bonus")]
    chunk = SimpleNamespace(
        text="Grüße \x1b[2Jthere", pieces=pieces, step=None, finish_reason="stop", tool_calls=[]
    )
    console = Console(
        force_terminal=True, file=io.StringIO(), color_system="standard", soft_wrap=True
    )
    answer = Answer()
    answer.write((each for each in [chunk]), console, Reading())
    assert console.file.getvalue() == "\x1b[32mGrüße\x1b[0m [2Jthere"
    assert answer.text == chunk.text and answer.finish_reason == "stop"


def test_an_interrupt_keeps_what_was_written(
    talk: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk.params = SamplingParams(max_new_tokens=40)
    stream, count = Decoder.stream_chat, 20

    def interrupted(*args: Any, **options: Any) -> Iterator[Any]:
        yield from islice(stream(*args, **options), count)
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "stream_chat", interrupted)
    whole = talk.decoder.chat([USER], max_new_tokens=40).text
    talk.take("hello")
    cut = talk.messages[1]["content"]
    assert cut and whole.startswith(cut) and len(cut) < len(whole)
    assert "cut by Ctrl-C" in capsys.readouterr().err
    count = 0
    talk.take("the")
    assert len(talk.messages) == 2 and "the conversation is as it was" in capsys.readouterr().err


def test_lines_go_on_after_a_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")
    for typed, wanted in (
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (["one\\", EOFError()], "one"),
        (["one\\", KeyboardInterrupt()], ""),
        ([KeyboardInterrupt()], ""),
        ([EOFError()], None),
        ([unreadable], ""),
    ):
        with mock.patch("builtins.input", side_effect=typed):
            assert ask() == wanted


def sleeps(pid: int) -> bool:
    """Whether a process waits for something, as readline does for a key."""
    command = ["ps", "-o", "state=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.startswith("S")


@pytest.mark.slow
def test_a_conversation_runs_in_a_terminal(file: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ |= {"TERM": "dumb", "INPUTRC": "/dev/null"}
        command = [
            sys.executable,
            "-m",
            "forerun",
            "chat",
            "--target",
            str(file),
            "--max-new-tokens",
            "8",
        ]
        os.execv(sys.executable, command)
    seen = b""
    end = time.monotonic() + 250

    def wait(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            assert time.monotonic() < end, (text, seen)
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096)
        _, _, seen = seen.partition(text)

    wait(b"loading ")
    for prompt, typed, *shown in (
        (b"> ", b"/bogus\n", b"unknown command /bogus"),
        (b"> ", b"hello \\\n"),
        (b"... ", b"the\n", b"the\r\n", b"tokens/s"),
        (b"> ", b"low", b"low"),
        (b"", b"\x03"),  # takes back what was typed
        (b"> ", b"/undo\n", b"0 questions are left"),
        (b"> ", b"/quit\n"),
    ):
        if prompt:
            wait(prompt)
        else:
            # Python sees a signal that comes while readline handles a key only at the next key.
            until(lambda: sleeps(pid))
        os.write(terminal, typed)
        for text in shown:
            wait(text)
    status = os.waitpid(pid, 0)[1]
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


def test_data_sets_of_conversations(file: Path, tmp_path: Path, decoder: Decoder) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(
        json.dumps({"messages": [SYSTEM, USER]}) + "\n" + json.dumps({"prompt": "hello"}) + "\n"
    )
    files = {str(path): read_prompts(path)}
    assert files[str(path)][0] == Prompt("1", messages=(SYSTEM, USER))
    rendered, message = (
        tuple(chat_prompt(decoder.tokenizer, each)) for each in ([SYSTEM, USER], [USER])
    )
    for is_chat in (False, True):
        plan = Plan({"ar": AR()}, (str(path),), target=str(file), chat=is_chat)
        ((first, second),) = load_prompts(plan, files)[0].values()
        assert first.tokens == rendered
        assert (second.tokens == message) is plan.arguments()["chat"] is is_chat
    path.write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n")
    refuses(r"talks.jsonl, line 1: .*the last message is from the assistant", read_prompts, path)


def test_conversations_are_not_cut(decoder: Decoder) -> None:
    prompt = Prompt("a", messages=(USER,))
    size = len(chat_prompt(decoder.tokenizer, [USER]))
    assert tokenised(prompt, decoder.tokenizer, size, 320).tokens is not None
    with pytest.raises(
        ValueError, match=f"prompt 'a' has {size} tokens as a chat; there is room for {size - 1}"
    ):
        tokenised(prompt, decoder.tokenizer, size - 1, 320)
    with pytest.raises(ValueError, match="prompt 'b': the model has no chat template"):
        tokenised(Prompt("b", text="x"), tiny_tokenizer(), None, 320, chat=True)
    ids = tuple(decoder.tokenizer("hello")["input_ids"])  # type: ignore[misc]
    found = tokenised(Prompt("c", tokens=ids), decoder.tokenizer, None, 320, chat=True)
    assert found.tokens == tuple(chat_prompt(decoder.tokenizer, [USER]))
