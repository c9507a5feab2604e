"""Servers of chat models as processes, one at a time, and what the scripts of this folder share."""

from __future__ import annotations

import argparse
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
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import httpx
import psutil

from forerun.bench.report import provenance
from forerun.files import home, write_text
from forerun.zoo import find

BENCHMARKS = Path(__file__).parents[1]
TEST_PROMPTS = BENCHMARKS / "speed" / "chat" / "test.jsonl"
READY_SECONDS = 900  # until a server must be there; one that ends is noticed at once
STOP_SECONDS = 60  # until a server is ended by force
PAGE = 32  # tokens of a page of transformers' cache
LLAMA_CONTEXT = 1024  # tokens of a client's prompt and answer in llama.cpp's server
LONGEST = 512  # tokens of a prompt and its answer, at most
OURS = {"forerun": (), "forerun-ar": ("--method", "ar")}  # with their options
SYSTEMS = (*OURS, "llama-server", "transformers")


@dataclass(frozen=True)
class System:
    """A server's command, without its port, and the fields that its requests need.

    Attributes:
        body: fields beside those that all requests have.
        metrics: whether /metrics has forerun's figures.
    """

    name: str
    command: tuple[str, ...]
    body: dict[str, Any] = field(default_factory=dict)
    metrics: bool = False


@dataclass(frozen=True)
class Service:
    """What a server is asked for.

    Attributes:
        target: a known name of a target with a GGUF file.
        threads: of the server.
        clients: how many requests it must answer at once.
        max_tokens: of an answer.
        temperature: of the sampling; 0 for greedy decoding.
    """

    target: str
    threads: int
    clients: int
    max_tokens: int
    temperature: float = 0.0


def system(name: str, service: Service) -> System:
    """Return one of SYSTEMS. Raises ValueError if the model's file is not there."""
    path = find(service.target)
    if path is None:
        raise ValueError(f"{service.target} is not here: forerun fetch {service.target}")
    if name in OURS:
        return _forerun(name, service)
    if name == "llama-server":
        return _llama(path, service)
    assert name == "transformers"
    return _transformers(path, service)


def _forerun(name: str, service: Service) -> System:
    command = (
        *(sys.executable, "-m", "forerun", "serve", "--target", service.target),
        *("--threads", str(service.threads), "--log-level", "warning", *OURS[name]),
    )
    return System(name, command, {"stream_options": {"include_usage": True}}, metrics=True)


def _llama(path: Path, service: Service) -> System:
    # It divides its context among the clients, who are answered together.
    options = {
        "model": path,
        "threads": service.threads,
        "threads-batch": service.threads,
        "parallel": service.clients,
        "ctx-size": service.clients * LLAMA_CONTEXT,
    }
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    body = {"repeat_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return System("llama-server", ("llama-server", *words), body)


def _transformers(path: Path, service: Service) -> System:
    # Its forward takes longer in a larger cache, so the cache has room for these clients alone.
    blocks = service.clients * -(-(LONGEST + 1) // PAGE) + 1
    program = "transformers.cli.transformers"
    command = (
        *(sys.executable, "-m", program, "serve", str(whole_model(path))),
        *("--continuous-batching", "--device", "cpu", "--dtype", "float32"),
        *("--cb-max-batch-tokens", "512"),
        *("--cb-block-size", str(PAGE), "--cb-num-blocks", str(blocks)),
    )
    drawing: dict[str, Any] = {"do_sample": False}
    if service.temperature:
        drawing = {
            "do_sample": True,
            "temperature": service.temperature,
            "top_k": 0,
            "top_p": 1.0,
        }
    config = {"max_new_tokens": service.max_tokens, "eos_token_id": 2, "pad_token_id": 2, **drawing}
    return System("transformers", command, {"generation_config": json.dumps(config)})


def whole_model(path: Path) -> Path:
    """Return a folder with the file's model in float32, which is made when it is first needed."""
    folder = home() / "models" / f"{path.stem}-float32"
    if not (folder / "tokenizer_config.json").is_file():  # the file that is written last
        from forerun.api.loading import load_model, load_tokenizer

        load_model(str(path), "target", plain=True).save_pretrained(folder)
        load_tokenizer(str(path)).save_pretrained(folder)
    return folder


def questions() -> list[str]:
    """Return the questions of the chat model's test prompts."""
    lines = TEST_PROMPTS.read_text().splitlines()
    return [json.loads(line)["messages"][-1]["content"] for line in lines]


def question(number: int, texts: list[str]) -> str:
    """Return the question of a request.

    From the second turn on a number stands before a text, so that no server knows a prompt already.
    """
    turn, place = divmod(number, len(texts))
    return f"{turn}. {texts[place]}" if turn else texts[place]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_on_signals() -> None:
    """Let SIGTERM end a script as Ctrl-C does, so that servers that it started end too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def numbers(text: str) -> list[int]:
    """Return the numbers of an option, as in 1,4,16."""
    return [int(part) for part in text.split(",")]


def shown(arguments: list[str], name: str) -> list[str]:
    """Return a command's arguments with `name` for the path of --out, which is this machine's."""
    return [
        name if place and arguments[place - 1] == "--out" else argument
        for place, argument in enumerate(arguments)
    ]


def measure(
    parser: argparse.ArgumentParser, measured: Callable[[argparse.Namespace, Path], dict[str, Any]]
) -> None:
    """Read the arguments, measure with a folder for logs, and report the results."""
    args = parser.parse_args()
    end_on_signals()
    with TemporaryDirectory(prefix="forerun-serving-") as folder:
        results = measured(args, Path(folder))
    report(results, args)


def report(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Print what a script measured with how and where, and write it to the file of --out."""
    given = {name: value for name, value in vars(args).items() if name != "out"}
    whole = results | provenance(given)
    if args.out:
        write_text(args.out, json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole))


def start(wanted: System, port: int, cores: list[int], log: Path) -> subprocess.Popen[bytes]:
    """Start a server's process on these cores."""
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
    """Wait for a server. Raises RuntimeError if it ends or is not there in time."""
    end = monotonic() + READY_SECONDS
    while True:
        try:
            if httpx.get(url + "/health", timeout=5, trust_env=False).status_code == 200:
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
    """Yield a server that is ready, and its address; end it after the block."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start(wanted, port, cores, log)
    try:
        wait_ready(process, url, log)
        yield process, url
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """End a server, by force if it takes long, and return its status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def family(pid: int) -> list[psutil.Process]:
    """Return a process and those that it started; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    return sum(sum(process.cpu_times()[:2]) for process in family(pid))


def gauges(url: str) -> dict[str, float]:
    """Return forerun's figures without labels, by their names without `forerun:`.

    They are empty if nobody answers.
    """
    try:
        text = httpx.get(url + "/metrics", timeout=5, trust_env=False).text
    except httpx.HTTPError:
        return {}
    values = {}
    for line in text.splitlines():
        if line.startswith("forerun:") and "{" not in line:
            name, value = line.split()
            values[name.removeprefix("forerun:")] = float(value)
    return values


def run_clients(
    url: str, body: dict[str, Any], out: Path, cores: list[int], **options: Any
) -> dict[str, Any]:
    """Run clients.py to its end in a process of its own, and return the results that it wrote.

    Args:
        url: the server's address.
        body: more fields of all requests.
        out: the file of results; beside it lies a log.
        cores: those on which the clients run.
        options: other options of clients.py.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-m", "benchmarks.serving.clients", "--url", url]
    command += ["--body", json.dumps(body), "--out", str(out.resolve())]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with out.with_suffix(".log").open("ab") as log:
        done = subprocess.run(
            command,
            stdout=log,
            stderr=log,
            check=False,
            cwd=BENCHMARKS.parent,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    if done.returncode:
        raise RuntimeError(f"the clients failed: see {out.with_suffix('.log')}")
    return json.loads(out.read_text())
