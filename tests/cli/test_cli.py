"""The command line as a user runs it: in processes."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import gguf
import pytest

import forerun
from forerun.cli.options import DecodeOptions, ServingOptions, byte_size
from tests.support.commands import run

COMMAND = [sys.executable, "-m", "forerun"]
SHORT_DEMO = (
    *("demo", "--target", "embedded", "--prompts", "1", "--max-new-tokens", "24"),
    *("--threads", "1"),
)
# Two rounds in place of five: one that is shown, and one in the other order.
TWO_ROUNDS = """
from forerun.cli import demo, main

demo.MAX_ROUNDS = 2
main()
"""


def apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """By an interpreter that imports all it needs, and nothing before."""
    return subprocess.run(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "x", "--method", "turbo"],
            "unknown method 'turbo'; there are ar, sd, pacer, suffix",
        ),
        (["generate", "x", "--gamma", "0"], "gamma must be an integer of at least 1, not 0"),
        (
            ["generate", "x", "--weights", "int3"],
            "unknown weights 'int3'; there are float32, bfloat16, int8, int4",
        ),
        (["generate", "x", "--method", "ar", "--gamma", "3"], "method 'ar' has no setting 'gamma'"),
        (["generate", "x", "--method-arg", "gamma"], "--method-arg takes NAME=VALUE"),
        (
            ["generate", "x", "--method-arg", "gamma=x"],
            "sd.gamma must be of type int | None, not 'x'",
        ),
        (
            ["generate", "x", "--temperature", "-1"],
            "temperature must be 0 (greedy) or at least 0.00001, not -1.0",
        ),
        (["generate", "x", "--tempreature", "1"], "No such option: --tempreature"),
        (
            ["generate", "--file", "nothing.txt"],
            "cannot read nothing.txt: No such file or directory",
        ),
        (["generate", "x", "--target", "./nothing"], "no model folder './nothing' for the target"),
        (["generate", "x", "--draft", "./nothing"], "no model folder './nothing' for the draft"),
        (["generate", "word " * 2000], "the target's context of 1024"),
        (["generate", ""], "the prompt is empty"),
        (
            ["demo", "--target", "embedded", "--method", "eagle"],
            "train one with `forerun train lyanna --kind eagle`",
        ),
        (
            ["fetch", "gpt"],
            "there is no model 'gpt' to fetch; there is smollm2, qwen-coder, qwen-coder-draft",
        ),
        (["train", "draft", "--data", "nothing", "--out", "x"], "no such file or folder: nothing"),
        (
            ["train", "draft", "--data", "stdlib", "--out", "x", "--width", "100"],
            "--width must be a multiple of 64",
        ),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    done = (apart if arguments[0] in ("fetch", "fly") else run)(
        *arguments
    )  # those two import nothing slow
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("forerun: ")


@pytest.mark.parametrize("begin", [0.05, 0.6, 1.5, 2.5])
def test_interrupts_are_one_line_and_exit_130(begin: float) -> None:
    """So are many interrupts, wherever they come.

    They come in imports, in torch's code, while another one is handled, and at the end.
    """
    chance = random.Random(begin)
    program = "from forerun.cli import main; print('ready', flush=True); main()"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            program,
            "generate",
            "x",
            "--target",
            "embedded",
            "--max-new-tokens",
            "1000",
            "--ignore-eos",
            "--method",
            "ar",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # tests in the background ignore it
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(begin)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(chance.choice([0.001, 0.01, 0.2]))
    error = process.communicate()[1]
    assert (process.returncode, error) == (130, "forerun: interrupted\n")


@pytest.mark.slow
def test_a_prompt_comes_from_an_argument_a_file_or_stdin(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def add(a, b):")
    options = ["--max-new-tokens", "24"]
    wanted = forerun.load(method="ar").generate("def add(a, b):", max_new_tokens=24).text
    by_argument = apart("generate", "def add(a, b):", *options)
    assert (by_argument.returncode, by_argument.stdout) == (0, wanted + "\n")
    chosen = "the target is embedded, the best known model that is fetched (--target takes another)"
    assert by_argument.stderr == f"forerun: {chosen}\n"
    named = run("generate", "def add(a, b):", "--target", "embedded", *options)
    assert (named.stdout, named.stderr) == (wanted + "\n", "")
    assert run("generate", *options, stdin="def add(a, b):").stdout == by_argument.stdout
    result = json.loads(
        run("generate", "--file", str(file), *options, "--gamma", "3", "--json").stdout
    )
    assert set(result) == {"text", "tokens", "origins", "finish_reason", "method", "stats"}
    assert len(result["tokens"]) == len(result["origins"]) == result["stats"]["tokens"]
    assert (result["text"], result["method"]) == (wanted, "sd")


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize(
    "options", ["--method sd", "--method suffix", "--method pacer", "--temperature 1"]
)
def test_demo_shows_equal_output(options: str) -> None:
    done = run(*SHORT_DEMO, *options.split(), "--no-guard", "--json", program=TWO_ROUNDS)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["rounds"]) == 2
    (row,) = result["prompts"]
    assert row["equal"] is True and row["tau"] > 1 and row["speedup"] > 0


@pytest.mark.slow
@pytest.mark.versions
def test_a_demo_of_plain_decoding_says_why_it_is_no_faster() -> None:
    done = run(*SHORT_DEMO, "--method", "ar", program=TWO_ROUNDS)
    assert (
        "because nothing was drafted; the same words." in done.stdout and " - \u2502" in done.stdout
    )


@pytest.mark.slow
def test_info_and_version_tell_the_facts() -> None:
    facts = json.loads(apart("info", "--json").stdout)
    assert set(facts["methods"]) == {
        *(
            "ar",
            "sd",
            "pacer",
            "confidence",
            "cumulative",
            "ouroboros",
            "pacer-ouroboros",
            "suffix",
            "hybrid",
        ),
        *("lyanna", "pacer-lyanna", "eagle", "pacer-eagle"),
    }
    assert apart("--version").stdout == f"forerun {forerun.__version__}\n"
    assert "transformers" in run("info").stdout


@pytest.mark.slow
def test_a_terminal_shows_the_prompt_and_figures() -> None:
    """The prompt is dim, the answer follows, then a line of figures on stderr.

    Here stderr is the terminal too.
    """
    master, end = pty.openpty()
    command = [
        *COMMAND,
        "generate",
        "def add(a, b):",
        "--max-new-tokens",
        "8",
        "--method",
        "suffix",
    ]
    env = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=end, stderr=end, env=env
    ) as process:
        os.close(end)
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while part := os.read(master, 4096):
                shown += part
    os.close(master)
    assert process.returncode == 0
    assert b"\x1b[2mdef add(a, b):\x1b[0m" in shown and b"loading embedded" in shown
    assert re.search(rb"8 tokens, .*tokens/s, suffix", shown.splitlines()[-1])


def test_a_link_to_a_file_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blob").write_text("")
    (tmp_path / "a.gguf").symlink_to("blob")
    monkeypatch.chdir(tmp_path)
    assert ServingOptions(target="a.gguf").model == str(tmp_path / "a.gguf")


def test_a_command_without_options_loads_what_load_does() -> None:
    """Of everything that decides how fast it is: the method, and how both models are stored."""
    options = DecodeOptions()
    found = forerun.load("embedded", method=options.chosen_method("embedded"), **options.for_load())
    assert found.info() == forerun.load("embedded").info()


# What a command does while a thread computes, as that of the engine does when `forerun batch` ends.
COMPUTING = """
import importlib
import threading
import torch
from forerun import cli

def compute():
    numbers = torch.ones(300, 300)
    while True:
        numbers @ numbers

def command(**options):
    print("said")
    threading.Thread(target=compute, daemon=True).start()
    {ending}

importlib.import_module("forerun.cli.commands").app = command
cli.main()
"""


@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [
        ("return 3", 3, ""),
        ("raise ValueError('a mistake')", 2, "forerun: a mistake"),
        ("raise RuntimeError('a bug')", 1, "RuntimeError: a bug"),
        (
            "raise OSError(28, 'No space left on device', 'out/x')",
            2,
            "forerun: cannot write to out/x: No space left on device",
        ),
    ],
)
def test_a_thread_that_computes_does_not_abort_the_end(
    ending: str, status: int, error: str
) -> None:
    done = run(program=COMPUTING.format(ending=ending))
    assert done.returncode == status
    assert "said" in done.stdout or status == 2
    *trace, last = done.stderr.splitlines() or [""]
    assert last == error
    assert bool(trace) == (status == 1)


def test_output_on_a_full_disk_is_one_line() -> None:
    done = run(
        program="""
import sys
from forerun import cli

sys.stdout = open("/dev/full", "w")
sys.argv = ["forerun", "--help"]
cli.main()
"""
    )
    error = "forerun: cannot write to the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, error)


@pytest.mark.parametrize(("command", "status"), [("batch", 143), ("serve", 0)])
def test_sigterm_is_one_line(command: str, status: int) -> None:
    done = run(
        command,
        program="""
import os
import signal
import time
from forerun import cli

cli._run = lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(100)
cli.main()
""",
    )
    assert (done.returncode, done.stderr) == (status, "forerun: terminated\n")


def test_a_signal_ends_a_command_whose_output_is_closed() -> None:
    done = run(
        program="""
import os
import signal
import sys
import time
from forerun import cli

sys.stdout = None
cli._run = lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(100)
cli.main()
"""
    )
    assert (done.returncode, done.stderr) == (143, "forerun: terminated\n")


def test_a_file_without_tensors_has_no_facts(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = run("info", str(path))
    assert (done.returncode, done.stderr) == (2, f"forerun: '{path}' has no tensors\n")


def test_sizes_have_units() -> None:
    sizes = {"1000": 1000, "256MiB": 2**28, "1.5 GB": 1_500_000_000, "2gib": 2**31, "7B": 7}
    assert {text: byte_size(text) for text in sizes} == sizes
    for text in ("", "0", "-1", "1e9", "256MiBs", "MiB"):
        done = run("serve", "--target", "embedded", "--kv-memory", text)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "Invalid value for '--kv-memory'" in done.stderr
