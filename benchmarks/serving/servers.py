"""Servers of chat models as processes, one at a time, and what the scripts of this folder share."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import psutil

from forerun.files import home
from forerun.zoo import SMOLLM2, find

HERE = Path(__file__).parent
TEST = HERE.parent / "chat" / "test.jsonl"
READY = 900  # seconds until a server must be there; one that ends is noticed at once
PAGE = 32  # tokens of a page of transformers' cache
LONGEST = 512  # tokens of a prompt and its answer, at most
OURS = {"forerun": (), "forerun-ar": ("--method", "ar")}
SYSTEMS = (*OURS, "llama-cpp", "transformers")


@dataclass(frozen=True)
class System:
    """A server's command, without its port, and what its requests need beside the common fields.

    Attributes:
        metrics: whether /metrics has forerun's figures.
    """

    name: str
    command: tuple[str, ...]
    body: dict[str, Any] = field(default_factory=dict)
    metrics: bool = False


def system(
    name: str,
    threads: int,
    clients: int,
    max_tokens: int,
    temperature: float,
    options: tuple[str, ...] = (),
):
    """One of SYSTEMS. `options` are more of our server's. Raises ValueError where the model's file is not there."""
    path = find(SMOLLM2)
    if path is None:
        raise ValueError("smollm2 is not here: forerun fetch smollm2")
    if name in OURS:
        command = [
            sys.executable,
            "-m",
            "forerun",
            "serve",
            "--target",
            SMOLLM2,
            "--threads",
            str(threads),
        ]
        body = {"stream_options": {"include_usage": True}}
        return System(
            name, (*command, "--log-level", "warning", *OURS[name], *options), body, metrics=True
        )
    if name == "llama-cpp":
        # Without the first of these a new request would end the one that runs. Nobody reads the logits of prompts.
        own: dict[str, Any] = {
            "interrupt_requests": False,
            "logits_all": False,
            "verbose": False,
            "n_ctx": 2048,
        }
        own |= {"n_threads": threads, "n_threads_batch": threads, "model": path}
        command = [
            sys.executable,
            "-m",
            "llama_cpp.server",
            *(f"--{key}={each}" for key, each in own.items()),
        ]
        return System(
            name, tuple(command), {"repeat_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        )
    assert name == "transformers"
    # A forward of theirs takes longer in a larger cache, so it has room for these clients and no more.
    blocks = clients * -(-(LONGEST + 1) // PAGE) + 1
    command = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(whole_model(path)),
    ]
    command += [
        "--continuous-batching",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--cb-max-batch-tokens",
        "512",
    ]
    command += ["--cb-block-size", str(PAGE), "--cb-num-blocks", str(blocks)]
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    drawing = drawn if temperature else {"do_sample": False}
    config = {"max_new_tokens": max_tokens, "eos_token_id": 2, "pad_token_id": 2, **drawing}
    return System(name, tuple(command), {"generation_config": json.dumps(config)})


def whole_model(path: Path) -> Path:
    """A folder with the file's model in float32, made when it is first asked for."""
    folder = home() / "models" / f"{path.stem}-float32"
    if not (folder / "tokenizer_config.json").is_file():  # what is written last
        from forerun.api.loading import load_model, load_tokenizer

        load_model(str(path), "target", plain=True).save_pretrained(folder)
        load_tokenizer(str(path)).save_pretrained(folder)
    return folder


def questions() -> list[str]:
    return [json.loads(line)["messages"][-1]["content"] for line in TEST.read_text().splitlines()]


def question(number: int, texts: list[str]) -> str:
    """That of a request. From the second time on a number stands before a text: no server knows a prompt already."""
    turn, at = divmod(number, len(texts))
    return f"{turn}. {texts[at]}" if turn else texts[at]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_on_signals() -> None:
    """Lets SIGTERM end a script as Ctrl-C does: servers that it started are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def start(wanted: System, port: int, cores: list[int], log: Path) -> subprocess.Popen[bytes]:
    """A server's process, bound to these cores."""
    environment = os.environ | {"OMP_NUM_THREADS": str(len(cores)), "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(
            [*wanted.command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=file,
            stderr=file,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Raises RuntimeError where the server ends or is not there in time."""
    end = monotonic() + READY
    path = "/v1/models" if "llama_cpp.server" in process.args else "/health"  # type: ignore[operator]
    while True:
        try:
            if httpx.get(url + path, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if process.poll() is not None or monotonic() > end:
            raise RuntimeError(f"the server did not start: see {log}")
        sleep(0.2)


@contextmanager
def started(
    wanted: System, cores: list[int], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that is ready, and its address; it is ended behind the block."""
    port = free_port()
    url, process = f"http://127.0.0.1:{port}", start(wanted, port, cores, log)
    try:
        wait_ready(process, url, log)
        yield process, url
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """Ends a server, by force where it takes long; its status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def family(pid: int) -> list[psutil.Process]:
    """A process and those it started; none where it has ended."""
    try:
        one = psutil.Process(pid)
        return [one, *one.children(recursive=True)]
    except psutil.Error:
        return []


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children."""
    return sum(sum(each.cpu_times()[:2]) for each in family(pid))


def gauges(url: str) -> dict[str, float]:
    """forerun's figures without labels, by their names without `forerun:`; empty where nobody answers."""
    try:
        text = httpx.get(url + "/metrics", timeout=5, trust_env=False).text
    except httpx.HTTPError:
        return {}
    lines = [
        line.split()
        for line in text.splitlines()
        if line.startswith("forerun:") and "{" not in line
    ]
    return {name.removeprefix("forerun:"): float(value) for name, value in lines}


def drive(
    url: str,
    body: dict[str, Any],
    out: Path,
    cores: list[int],
    say: Callable[[str], None],
    **options: Any,
):
    """Runs clients.py to its end in a process of its own; what it wrote."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving.clients",
        "--url",
        url,
        "--body",
        json.dumps(body),
    ]
    command += ["--out", str(out.resolve())]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with out.with_suffix(".log").open("ab") as log:
        done = subprocess.run(
            command,
            stdout=log,
            stderr=log,
            check=False,
            cwd=HERE.parents[1],
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    if done.returncode:
        raise RuntimeError(f"the clients failed: see {out.with_suffix('.log')}")
    found = json.loads(out.read_text())
    say(f"{len(found['requests'])} requests, {found['errors']} errors")
    return found
