"""Clients that ask a chat server without a pause, each its next question when the last one was answered (locust).

    python -m benchmarks.serving.clients --url http://127.0.0.1:8000 --clients 4 --seconds 60 --out FILE

Writes one JSON object: when each request began, had its first text and ended, in seconds, with its text. Requests that
are open when the time is over are read to their end; `late` counts the characters that came behind it.
"""

from __future__ import annotations

import argparse
import itertools
import json
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

DRAIN = 900  # seconds for requests that are open at the end


class Asker(User):
    """A client. Its class has the arguments, the numbers of requests, and when the clock began."""

    wait_time = constant(0)
    asked: argparse.Namespace
    texts: list[str]
    numbers: itertools.count
    begun: float | None = None

    def on_start(self) -> None:
        self.client = HTTPClient.from_url(
            self.asked.url, connection_timeout=30, network_timeout=DRAIN
        )

    @task
    def ask(self) -> None:
        cls = type(self)
        now = perf_counter()
        cls.begun = now if cls.begun is None else cls.begun
        number = next(self.numbers)
        over = (
            now - cls.begun >= self.asked.seconds
            if self.asked.seconds
            else number >= self.asked.requests
        )
        if over:
            raise StopUser
        found = self._request(number + self.asked.first, now - cls.begun)
        self.environment.events.request.fire(
            request_type="SSE",
            name="chat",
            response_time=1000 * (found["end"] - found["begin"]),
            response_length=len(found["text"]),
            exception=RuntimeError(found["error"]) if found["error"] else None,
            context=found,
        )
        if found["error"]:
            gevent.sleep(0.2)

    def _request(self, number: int, begin: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "number": number,
            "begin": begin,
            "first": None,
            "last": None,
            "late": 0,
            "error": None,
        }
        found |= {"usage": None, "queue_ms": None}
        parts: list[str] = []
        body = {
            "messages": [{"role": "user", "content": question(number, self.texts)}],
            "max_tokens": self.asked.max_tokens,
            "temperature": self.asked.temperature,
            "stream": True,
            **({"seed": number} if self.asked.temperature else {}),
            **json.loads(self.asked.body),
        }
        try:
            response = self.client.post(
                "/v1/chat/completions",
                json.dumps(body),
                headers={"Content-Type": "application/json"},
            )
            if response.status_code != 200:
                raise RuntimeError(
                    f"status {response.status_code}: {bytes(response.read())[:200]!r}"
                )
            reason = None
            while line := response.readline(b"\n"):
                at = perf_counter() - (type(self).begun or 0.0)
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:200])
                for choice in event["choices"]:
                    reason = choice.get("finish_reason") or reason
                    text = choice["delta"].get("content")
                    if text:
                        found["first"], found["last"] = found["first"] or at, at
                        found["late"] += (
                            len(text) if self.asked.seconds and at > self.asked.seconds else 0
                        )
                        parts.append(text)
                if event.get("usage"):
                    found["usage"] = event["usage"]["completion_tokens"]
                if event.get("metrics"):
                    found["queue_ms"] = event["metrics"]["queue_time_ms"]
            if reason is None:
                raise RuntimeError("the stream ended without a reason")
        except Exception as error:  # whatever a server may do: it is counted
            found["error"] = f"{type(error).__name__}: {error}"[:300]
        return found | {"text": "".join(parts), "end": perf_counter() - (type(self).begun or 0.0)}


def main() -> None:
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
    Asker.asked = asked = parser.parse_args()
    if bool(asked.seconds) == bool(asked.requests):
        parser.error("give --seconds or --requests")
    Asker.texts, Asker.numbers = questions(), itertools.count()
    environment, found = Environment(user_classes=[Asker]), []
    environment.events.request.add_listener(lambda context, **_: found.append(context))
    runner = environment.create_local_runner()
    used, begun = psutil.Process().cpu_times(), perf_counter()
    runner.start(asked.clients, spawn_rate=asked.clients)
    end, spawned = begun + asked.seconds + DRAIN, False
    while perf_counter() < end and not (spawned and runner.user_count == 0):
        spawned = spawned or runner.user_count == asked.clients or bool(found)
        gevent.sleep(0.05)
    left = runner.user_count
    wall = perf_counter() - begun
    now = psutil.Process().cpu_times()
    runner.quit()
    spent = now.user + now.system - used.user - used.system
    result = {
        "requests": sorted(found, key=lambda one: one["number"]),
        "errors": sum(bool(one["error"]) for one in found) + left,
        "unanswered": left,
        "wall": wall,
        "cpu": spent,
    }
    asked.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
