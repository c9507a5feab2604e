"""Clients that ask a chat server without a pause, by locust.

    python -m benchmarks.serving.clients --url http://127.0.0.1:8000 --clients 4 --seconds 60 \
        --out FILE

Each client asks its next question when the last one was answered. The file gets one JSON object: of
each request when it began, had its first text and ended, in seconds, with its text. Requests that
are open when the time is over are read to their end; `late` counts the characters that came after
it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from locust import User, constant, task  # isort: skip  first, as it patches sockets
import gevent
import psutil
from geventhttpclient import HTTPClient
from locust.env import Environment
from locust.exception import StopUser

from benchmarks.serving.servers import question, questions

DRAIN_SECONDS = 900  # for requests that are open at the end


class Asker(User):
    """A client. Its class has the options, the numbers of requests, and when the clock began."""

    wait_time = constant(0)
    options: argparse.Namespace
    texts: list[str]
    numbers: itertools.count
    started_at: float | None = None
    client: HTTPClient

    def on_start(self) -> None:
        self.client = HTTPClient.from_url(
            self.options.url, connection_timeout=30, network_timeout=DRAIN_SECONDS
        )

    @task
    def ask(self) -> None:
        cls = type(self)
        if cls.started_at is None:
            cls.started_at = perf_counter()
        begin = self.now()
        number = next(self.numbers)
        if self.options.seconds:
            is_over = begin >= self.options.seconds
        else:
            is_over = number >= self.options.requests
        if is_over:
            raise StopUser
        result = self._request(number + self.options.first, begin)
        self.environment.events.request.fire(
            request_type="SSE",
            name="chat",
            response_time=1000 * (result["end"] - result["begin"]),
            response_length=len(result["text"]),
            exception=RuntimeError(result["error"]) if result["error"] else None,
            context=result,
        )
        if result["error"]:
            gevent.sleep(0.2)

    def now(self) -> float:
        """Return the seconds since the clock began."""
        return perf_counter() - (type(self).started_at or 0.0)

    def _request(self, number: int, begin: float) -> dict[str, Any]:
        """Return what became of a request."""
        result: dict[str, Any] = {
            "number": number,
            "begin": begin,
            "first": None,
            "last": None,
            "late": 0,
            "error": None,
            "usage": None,
            "queue_ms": None,
            "text": "",
        }
        try:
            reason = None
            for event in self._events(number):
                reason = self._take(event, result) or reason
            if reason is None:
                raise RuntimeError("the stream ended without a reason")
        except Exception as error:  # whatever a server may do: it is counted
            result["error"] = f"{type(error).__name__}: {error}"[:300]
        return result | {"end": self.now()}

    def _events(self, number: int) -> Iterator[dict[str, Any]]:
        """Send a request, and yield the events of its stream."""
        body = {
            "messages": [{"role": "user", "content": question(number, self.texts)}],
            "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
            "stream": True,
            **({"seed": number} if self.options.temperature else {}),
            **json.loads(self.options.body),
        }
        headers = {"Content-Type": "application/json"}
        response = self.client.post("/v1/chat/completions", json.dumps(body), headers=headers)
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {bytes(response.read())[:200]!r}")
        while line := response.readline(b"\n"):
            at = self.now()
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield json.loads(line[5:]) | {"at": at}

    def _take(self, event: dict[str, Any], result: dict[str, Any]) -> str | None:
        """Add an event to the result; return the reason why the answer ended, if it did."""
        if "error" in event:
            raise RuntimeError(str(event["error"])[:200])
        reason = None
        at = event["at"]
        for choice in event["choices"]:
            reason = choice.get("finish_reason") or reason
            text = choice["delta"].get("content")
            if text:
                result["first"] = result["first"] or at
                result["last"] = at
                result["text"] += text
                if self.options.seconds and at > self.options.seconds:
                    result["late"] += len(text)
        if event.get("usage"):
            result["usage"] = event["usage"]["completion_tokens"]
        if event.get("metrics"):
            result["queue_ms"] = event["metrics"]["queue_time_ms"]
        return reason


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument(
        "--requests", type=int, default=0, help="so many in all, where there are no seconds"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first question")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--body", default="{}", help="more fields, JSON")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if bool(options.seconds) == bool(options.requests):
        parser.error("give --seconds or --requests")
    return options


def main() -> None:
    options = parsed()
    Asker.options = options
    Asker.texts = questions()
    Asker.numbers = itertools.count()
    results: list[dict[str, Any]] = []
    environment = Environment(user_classes=[Asker])
    environment.events.request.add_listener(lambda context, **_: results.append(context))
    runner = environment.create_local_runner()
    before = psutil.Process().cpu_times()
    started_at = perf_counter()
    runner.start(options.clients, spawn_rate=options.clients)
    end = started_at + options.seconds + DRAIN_SECONDS
    has_spawned = False
    while perf_counter() < end and not (has_spawned and runner.user_count == 0):
        has_spawned = has_spawned or runner.user_count == options.clients or bool(results)
        gevent.sleep(0.05)
    unanswered = runner.user_count
    wall = perf_counter() - started_at
    after = psutil.Process().cpu_times()
    runner.quit()
    record = {
        "requests": sorted(results, key=lambda result: result["number"]),
        "errors": sum(bool(result["error"]) for result in results) + unanswered,
        "unanswered": unanswered,
        "wall": wall,
        "cpu": after.user + after.system - before.user - before.system,
    }
    options.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
