"""The benchmarks of the server: clients against a real one, and the figures of their pages."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.local import LOCAL
from tests.support.serving import live

if find_spec("psutil") is None:
    pytest.skip("the benchmarks of the server need psutil", allow_module_level=True)
from benchmarks.serving import endure, load, servers, soak, soak_requests
from benchmarks.serving.soak import Question


def request(number: int, begin: float, **fields: Any) -> dict[str, Any]:
    return {
        "number": number,
        "begin": begin,
        "first": begin + 1,
        "last": begin + 3,
        "end": begin + 3,
        "late": 0,
        "error": None,
        "usage": None,
        "queue_ms": None,
        "text": "abcde",
        **fields,
    }


def test_figures_count_what_came_in_time_and_leave_failures_out() -> None:
    late = request(1, 8.0, late=2, usage=5)  # two of five characters after the end
    failed = request(2, 0.0, error="broken", text="")
    results = {"requests": [request(0, 0.0, usage=5), late, failed], "errors": 1, "wall": 12.0}
    row = load.figures(results, 10.0, len)
    assert row["tokens_per_s"] == pytest.approx((5 + 3) / 10)
    assert (row["requests_per_s"], row["errors"], row["error"]) == (0.1, 1, "broken")
    assert (row["ttft_ms_p50"], row["tpot_ms_p99"]) == (1000, 500)
    assert row["told_over_counted"] == 1 and row["queue_ms_p50"] is None


def test_texts_are_compared_with_plain_decoding_at_the_same_load() -> None:
    texts = servers.questions()
    asked = [servers.question(number, texts) for number in range(3 * len(texts))]
    assert len(set(asked)) == len(asked) and asked[: len(texts)] == texts  # none comes twice
    cells = [
        {"system": "forerun-ar", "clients": 4, "round": 0, "texts": {"0": "a", "1": "b"}},
        {"system": "forerun", "clients": 4, "round": 0, "texts": {"0": "a", "1": "c", "2": "d"}},
        {"system": "forerun", "clients": 1, "round": 0, "texts": {"0": "a"}},
    ]
    assert [cell["same_text"] for cell in load.gather(cells)] == [1, 0.5, None]


def test_memory_growth_is_that_after_the_beginning() -> None:
    grows = [{"t": t, "rss_mb": 100.0 + t} for t in range(0, 90, 5)]
    settles = [{"t": t, "rss_mb": min(100.0 + t, 120.0)} for t in range(0, 90, 5)]
    assert soak.growth(settles, 0.0, 90.0) == 0 and soak.growth(grows, 0.0, 90.0) > 0.2
    assert soak.growth([], 0.0, 90.0) is None


def test_a_soak_fails_where_an_answer_is_wrong_or_a_request_is_lost(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("")
    run = soak.Soak(servers.System("forerun", ()), tmp_path, [0], {"8": ["right"]})
    greedy = Question(0, 8, greedy=True, stream=True, leaves_after=1)
    sampled = Question(0, 8, greedy=False, stream=True, leaves_after=1)
    assert run.compare("right", greedy) == "answer" == run.compare("another", sampled)
    assert run.compare("rig", greedy) == "wrong answer to question 0" and run.compared == 2
    run.up = [[0, 50], [60, 110]]
    run.samples = [{"t": t, "rss_mb": 100.0} for t in range(0, 110, 5)]
    empty = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}
    assert all(soak.checks(run, empty | {"status": 0}, 0.03).values())
    assert run.is_up(10, 40) and not run.is_up(40, 60)
    run.trouble.append("wrong")
    run.outcomes["plain"] = Counter(lost=1)
    failed = [ok for ok in soak.checks(run, {"status": 1}, 0.03).values() if not ok]
    assert len(failed) == 4


def test_the_number_of_a_request_decides_its_question(tmp_path: Path) -> None:
    run = soak.Soak(servers.System("forerun", ()), tmp_path, [0], {"8": [], "16": []})
    asked = [run.question_of(request, "plain") for request in range(300)]
    assert asked == [run.question_of(request, "plain") for request in range(300)]
    assert {question.length for question in asked} == {8, 16}
    assert 0.7 < sum(question.greedy for question in asked) / 300 < 0.9
    assert {question.stream for question in asked} == {True, False}
    assert all(run.question_of(request, "slow").stream for request in range(300))


def test_what_has_grown_since_a_server_had_settled_is_a_share() -> None:
    samples = [
        {"requests": 100 * i, "rss": size, "uss": 2 * size, "files": 9, "threads": size}
        for i, size in enumerate([50, 90, 100, 100, 104, 110])
    ]
    assert endure.summary(samples[:5])["holds"]
    figures = endure.summary(samples)
    assert not figures["holds"]
    assert figures["growth"] == {"rss": 0.1, "uss": 0.1, "files": 0, "threads": 0.1}
    assert figures["bytes_per_request"] == 0.1


@pytest.mark.slow
def test_a_server_answers_requests_of_all_kinds_and_lets_others_go() -> None:
    seen: Counter[str] = Counter()
    texts = ["the cat", "the mat"]
    with live() as server:
        asyncio.run(endure.send_all(server.url, range(60), 4, texts, seen))
        asyncio.run(endure.until_rest(server.url))
        assert not server.rows
    assert seen.total() == 60
    assert {name.partition(": ")[0] for name in seen} >= {"leaves", "leaves at once", "refused"}
    assert {name for name in seen if ": 5" in name} == set()
    assert seen["refused: 400"] and not seen["chat: 400"]


@pytest.mark.slow
def test_a_server_refuses_all_rubbish() -> None:
    count = len(soak_requests.BODIES) + len(soak_requests.RAW)

    async def send_all(url: str) -> list[str]:
        async with httpx.AsyncClient(timeout=60, **LOCAL) as client:
            return [await soak_requests.send(client, url, number) for number in range(count)]

    with live() as server:
        assert not any(asyncio.run(send_all(server.url)))


# To import locust here would patch sockets.
@pytest.mark.slow
@pytest.mark.skipif(find_spec("locust") is None, reason="the load needs locust")
def test_clients_see_whole_answers(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    options = {"clients": 3, "requests": 7, "max_tokens": 8}
    with live() as server:
        results = servers.run_clients(server.url, {}, tmp_path / "out.json", cores, **options)
    requests = results["requests"]
    assert results["errors"] == 0
    assert [one["number"] for one in requests] == list(range(7))
    for one in requests:
        assert one["begin"] < one["first"] <= one["last"] <= one["end"]
        assert (one["text"] and one["queue_ms"] is None) or one["queue_ms"] >= 0
