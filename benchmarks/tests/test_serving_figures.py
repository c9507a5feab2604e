"""The benchmarks of the server.

The clients run against a real server with a tiny model; the pages are made from figures.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import live

if find_spec("psutil") is None:
    pytest.skip("the benchmarks of the server need psutil", allow_module_level=True)
from benchmarks.serving import asking, load, servers, soak


def request(number: int, begin: float, **own: Any) -> dict[str, Any]:
    found = {
        "number": number,
        "begin": begin,
        "first": begin + 1,
        "last": begin + 3,
        "end": begin + 3,
        "late": 0,
    }
    return found | {"error": None, "usage": None, "queue_ms": None, "text": "abcde"} | own


def test_figures_count_what_came_in_time_and_leave_failures_out() -> None:
    late = request(1, 8.0, late=2, usage=5)  # two of five characters after the end
    failed = request(2, 0.0, error="broken", text="")
    found = {"requests": [request(0, 0.0, usage=5), late, failed], "errors": 1, "wall": 12.0}
    found_figures = load.figures(found, 10.0, len)
    assert found_figures["tokens_per_s"] == pytest.approx((5 + 3) / 10)
    assert (found_figures["requests_per_s"], found_figures["errors"], found_figures["error"]) == (
        0.1,
        1,
        "broken",
    )
    assert (found_figures["ttft_ms_p50"], found_figures["tpot_ms_p99"]) == (1000, 500)
    assert found_figures["told_over_counted"] == 1 and found_figures["queue_ms_p50"] is None


def test_texts_are_compared_with_plain_decoding_at_the_same_load() -> None:
    texts = servers.questions()
    asked = [servers.question(number, texts) for number in range(3 * len(texts))]
    assert len(set(asked)) == len(asked) and asked[: len(texts)] == texts  # none comes twice
    cells = [
        {"system": "forerun-ar", "clients": 4, "round": 0, "texts": {"0": "a", "1": "b"}},
        {"system": "forerun", "clients": 4, "round": 0, "texts": {"0": "a", "1": "c", "2": "d"}},
        {"system": "forerun", "clients": 1, "round": 0, "texts": {"0": "a"}},
    ]
    assert [each["same_text"] for each in load.gather(cells)] == [1, 0.5, None]


def test_memory_growth_is_that_after_the_beginning() -> None:
    grows = [{"t": t, "rss_mb": 100.0 + t} for t in range(0, 90, 5)]
    settles = [{"t": t, "rss_mb": min(100.0 + t, 120.0)} for t in range(0, 90, 5)]
    assert soak.growth(settles, 0.0, 90.0) == 0 and soak.growth(grows, 0.0, 90.0) > 0.2
    assert soak.growth([], 0.0, 90.0) is None


def test_a_soak_fails_where_an_answer_is_wrong_or_a_request_is_lost(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("")
    run = soak.Soak(servers.System("forerun", ()), tmp_path, [0], {"8": ["right"]})
    assert run.compare("right", 0, 8, True) == "answer" == run.compare("another", 0, 8, False)
    assert run.compare("rig", 0, 8, True) == "wrong answer to question 0" and run.compared == 2
    run.up = [[0, 50], [60, 110]]
    run.samples = [{"t": t, "rss_mb": 100.0} for t in range(0, 110, 5)]
    empty = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}
    assert all(soak.checks(run, empty | {"status": 0}, 0.03).values())
    assert run.is_up(10, 40) and not run.is_up(40, 60)
    run.trouble.append("wrong")
    run.outcomes["plain"] = Counter(lost=1)
    failed = [
        name for name, is_true in soak.checks(run, {"status": 1}, 0.03).items() if not is_true
    ]
    assert len(failed) == 4


def test_a_server_refuses_all_rubbish() -> None:

    async def all_of_it(url: str) -> list[str]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return [
                await asking.send(client, url, at)
                for at in range(len(asking.BODIES) + len(asking.RAW))
            ]

    with live() as server:
        assert not [each for each in asyncio.run(all_of_it(server.url)) if each]


@pytest.mark.skipif(
    find_spec("locust") is None, reason="the load needs locust"
)  # to import it would patch sockets
def test_clients_see_whole_answers(tmp_path: Path) -> None:
    with live() as server:
        out = tmp_path / "out.json"
        cores = sorted(os.sched_getaffinity(0))
        found = servers.drive(
            server.url, {}, out, cores, lambda line: None, clients=3, requests=7, max_tokens=8
        )
    assert found["errors"] == 0 and [one["number"] for one in found["requests"]] == list(range(7))
    assert all(
        one["begin"] < one["first"] <= one["last"] <= one["end"] for one in found["requests"]
    )
    assert all(
        (one["text"] and one["queue_ms"] is None) or one["queue_ms"] >= 0
        for one in found["requests"]
    )
