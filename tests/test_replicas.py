"""Many engines for one app: answers that go on elsewhere are those of a single engine. Most tests stand on engines
in this process, which are lost on purpose; the last ones on Ray."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from serving import CHAT, NAME, PLAIN, events, make_decoder
from transformers import GenerationConfig

from forerun.scale import fleet as fleets
from forerun.scale import messages
from forerun.scale.fleet import Fleet, LostError
from forerun.scale.messages import ModelInfo, SentRequest, Steps, decode
from forerun.server.app import Settings, create_app
from forerun.server.backend import Backend, until_ready
from forerun.server.errors import ApiError
from forerun.server.readers import Readers
from forerun.server.worker import Worker

LONG = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}


class Engines:
    """Replicas in this process. Each loses its callers after N lists of steps, as if it had died."""

    def __init__(self, count: int = 2, lists: float = inf, make: Any = make_decoder) -> None:
        self.workers = {f"r{i}": Worker(make) for i in range(count)}
        self.readers, self.lists = Readers(), lists
        self.silent: set[str] = set()
        self.asked: list[tuple[str, tuple[SentRequest, ...]]] = []

    async def model(self) -> ModelInfo:
        for worker in self.workers.values():
            worker.start()
        for worker in self.workers.values():
            await until_ready(worker)
        return ModelInfo.of(worker)

    def figures(self) -> dict[str, dict[str, float]]:
        return {name: {"running": 1, "waiting": 2, "hits": 3, "used": 1, "allocated": 4} for name in self.workers}

    async def decode(self, name: str, sent: Sequence[SentRequest]) -> AsyncGenerator[Steps, None]:
        self.asked.append((name, tuple(sent)))
        if name in self.silent:
            await asyncio.sleep(600)
        left = self.lists
        async with aclosing(decode(self.workers[name], self.readers, sent)) as stream:
            async for found in stream:
                if found and not left:
                    raise LostError("killed")
                left -= bool(found)
                yield found


def ask(worker: Backend, act: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Run `act` with a client of an app in front of `worker`."""

    async def main() -> Any:
        app = create_app(worker, Settings(NAME))
        async with app.router.lifespan_context(app):
            await until_ready(worker)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://fleet", timeout=120) as http:
                found = await act(http)
        replicas = getattr(worker, "_replicas", None)
        for each in replicas.workers.values() if isinstance(replicas, Engines) else ():
            await each.stop()
        return found

    return asyncio.run(main())


def answers(worker: Backend, bodies: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """All at once."""

    async def act(http: httpx.AsyncClient) -> list[Any]:
        found = await asyncio.gather(*(http.post(path, json=body) for path, body in bodies))
        return [each.json() for each in found]

    return ask(worker, act)


def same(one: Any, other: Any) -> None:
    """Log probabilities are computed in other shapes when a text goes on elsewhere."""
    if isinstance(one, dict | list):
        assert type(one) is type(other) and len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            same(one[key], other[key])
    else:
        assert one == (pytest.approx(other, abs=1e-3) if isinstance(one, float) else other)


PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "seed": 8, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "greedy penalties": {"frequency_penalty": 2.0, "repetition_penalty": 1.3},
    "choices": {"temperature": 1.0, "seed": 9, "n": 3, "logprobs": 2, "echo": True},
    "prompts": {"prompt": ["the cat", "def add(", "for i in"], "temperature": 1.0, "seed": 1},
    "biases": {"logit_bias": {"70": 3.0}, "logprobs": 1},
    "plain": {"forerun_method": "ar"},
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses come thick and fast."""
    for name, value in (("LOSSES", 1000), ("AWAY", 0.02), ("LOOK", 0.01)):
        monkeypatch.setattr(fleets, name, value)


def test_answers_that_lose_their_replicas_are_those_of_one_engine(quick: None) -> None:
    bodies = [(PLAIN, LONG | {"prompt": "the cat sat on"} | each) for each in PARAMETERS.values()]
    chat = {"messages": [{"role": "user", "content": "mat"}], "logprobs": True}
    bodies.append((CHAT, LONG | PARAMETERS["seeded"] | chat))
    if find_spec("llguidance"):
        form = {"type": "regex", "regex": "(cat|mat|sat){9}"}
        bodies.append((PLAIN, LONG | {"prompt": "the", "ignore_eos": False, "response_format": form}))
    wanted = answers(Worker(make_decoder), bodies)
    stop = wanted[0]["choices"][0]["text"][8:12]  # a text in the middle of the greedy answer
    stopping = [(PLAIN, bodies[0][1] | {"stop": stop})]
    wanted += answers(Worker(make_decoder), stopping)

    engines = Engines(lists=2)
    fleet = Fleet(engines)
    found = answers(fleet, bodies + stopping)
    assert fleet.resumed > len(bodies) and not +fleet.loads
    for one, other in zip(found, wanted, strict=True):
        assert "choices" in one, one
        for each, its in zip(one["choices"], other["choices"], strict=True):
            same(each, its)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert one["usage"][key] == other["usage"][key]
        speculation = one["metrics"]["speculative_decoding"]
        assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
        emitted = speculation["num_spec_steps"] + speculation["num_accepted_draft_tokens"]
        assert emitted >= one["usage"]["completion_tokens"]
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(each.own["seed"] is not None for _, parts in engines.asked for each in parts if each.params.temperature)


def test_without_a_seed_it_goes_on_as_well_with_one_that_was_drawn(quick: None) -> None:
    engines = Engines(lists=2)
    fleet, usage = Fleet(engines), {"stream_options": {"include_usage": True}}
    body = LONG | usage | {"prompt": "the cat", "temperature": 1.0, "n": 2}
    *chunks, last = events(ask(fleet, lambda http: http.post(PLAIN, json=body | {"stream": True})))
    assert last["usage"]["completion_tokens"] == 2 * body["max_tokens"]
    assert [each["choices"][0]["finish_reason"] for each in chunks].count("length") == 2
    seeds = {(each.own["seed"], each.own["stream"]) for _, sent in engines.asked for each in sent}
    assert len(seeds) == 2 and None not in {seed for seed, _ in seeds}
    assert len(fleet.recovered) == fleet.resumed > 0


def test_an_answer_that_loses_every_replica_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "AWAY", 0.0)
    engines, body = Engines(lists=0), LONG | {"prompt": "the cat"}

    async def act(http: httpx.AsyncClient) -> Any:
        return [await http.post(PLAIN, json=body | {"stream": stream}) for stream in (True, False)]

    streamed, whole = ask(Fleet(engines), act)
    assert events(streamed)[-1]["error"]["code"] == whole.json()["error"]["code"] == "replica_lost"
    assert whole.status_code == 500 and len(engines.asked) == 2 * (fleets.LOSSES + 1)


def test_a_replica_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "SILENCE", 3.0)
    engines = Engines()
    engines.silent = {"r0"}
    fleet = Fleet(engines)
    found = answers(fleet, [(PLAIN, LONG | {"prompt": f"{i} the cat"}) for i in range(6)])
    assert all(each["choices"][0]["finish_reason"] == "length" for each in found)
    assert "r0" in {name for name, _ in engines.asked} and fleet.resumed


def test_prompts_with_one_beginning_meet_and_errors_keep_their_shape() -> None:
    shared = list(range(3, 80))

    async def act(http: httpx.AsyncClient) -> Any:
        for i in range(4):
            await http.post(PLAIN, json=LONG | {"prompt": [*shared, 100 + i]})
        for param, body in (
            ("max_tokens", {"n": 128, "max_tokens": 0}),
            ("n", {"n": 100}),
            ("max_tokens", {"max_tokens": 500}),
            ("max_tokens", {"max_tokens": 500, "stream": True}),
            ("response_format", {"response_format": {"type": "regex", "regex": "("}}),
        ):
            refused = await http.post(PLAIN, json=body | {"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await http.get("/health")).status_code == 200
        return (await http.get("/metrics")).text

    engines = Engines(3, make=lambda: make_decoder(max_rows=4, max_queue=60, kv_memory=100_000))
    figures = ask(Fleet(engines), act)
    assert len({name for name, _ in engines.asked[:4]}) == 1
    for name, value in {"num_requests_running": 3, "num_requests_waiting": 6, "prefix_cache_hits_total": 9}.items():
        assert f"forerun:{name} {value}.0" in figures
    assert "forerun:kv_cache_usage_perc 0.25" in figures


def test_more_than_all_replicas_hold_is_refused_and_a_reader_that_goes_frees_them() -> None:
    engines = Engines(make=lambda: make_decoder(max_rows=1, max_queue=1))
    fleet = Fleet(engines)

    async def act(http: httpx.AsyncClient) -> Any:
        body = LONG | {"prompt": "the cat", "max_tokens": 400}
        asked = [asyncio.ensure_future(http.post(PLAIN, json=body)) for _ in range(4)]
        while sum(fleet.loads.values()) < 4:
            await asyncio.sleep(0.01)
        assert set(fleet.loads.values()) == {2}
        refused = await http.post(PLAIN, json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["Retry-After"]
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        while +fleet.loads or any(worker.engine.busy for worker in engines.workers.values()):
            await asyncio.sleep(0.01)

    ask(fleet, act)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    fleet = Fleet(SimpleNamespace(model=AsyncMock(side_effect=ValueError("no such model"))))  # type: ignore[arg-type]
    fleet.on_failure = ended = Mock()

    async def main() -> None:
        fleet.start()
        with pytest.raises(ValueError, match="no such model"):
            await until_ready(fleet)
        with pytest.raises(ApiError, match="being loaded"):
            fleet.submit([], 0.0)

    asyncio.run(main())
    assert ended.called and isinstance(fleet.failed, ValueError)


def test_an_answer_that_nobody_waits_for_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        reading = asyncio.get_running_loop().create_future()
        readers: Any = SimpleNamespace(call=lambda *_: reading)
        stream = decode(SimpleNamespace(decoder=object()), readers, [])  # type: ignore[arg-type]
        assert [await anext(stream) for _ in range(2)] == [[], []]
        await stream.aclose()
        await asyncio.sleep(0)
        assert reading.cancelled()

    monkeypatch.setattr(messages, "BEAT", 0.01)
    asyncio.run(main())


def test_replicas_that_cannot_start_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a replica is tried again, and nothing else."""
    pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")
    from ray.exceptions import ActorDiedError, RayActorError

    from forerun.scale import replicas

    answer = Mock()  # by Serve: statuses, and then what the replica does
    handle = SimpleNamespace(model=SimpleNamespace(remote=AsyncMock(side_effect=answer)))

    def application(status: str, message: str = "", running: int = 0) -> Any:
        engine = SimpleNamespace(message=message, replica_states={"RUNNING": running})
        found = SimpleNamespace(status=status, message="", deployments={"Engine": engine})
        return SimpleNamespace(applications={"one": found})

    monkeypatch.setattr(replicas, "LOOK", 0.0)
    for name, own in (("start", Mock()), ("run_many", Mock(return_value=[handle])), ("status", answer)):
        monkeypatch.setattr(replicas.serve, name, own)
    waits, partly = application("DEPLOYING"), application("DEPLOYING", running=1)
    failed = application("DEPLOY_FAILED", "Traceback\n\n  ValueError: no model\n")
    info = ModelInfo(None, GenerationConfig(), None, 1, None)

    def start(*answers: Any) -> ModelInfo:
        answer.side_effect = answers
        return asyncio.run(replicas.ServeReplicas(None, "one").model())  # type: ignore[arg-type]

    for answers, message in (
        ([waits, waits, failed], "--ray: the replicas did not start: ValueError: no model"),
        ([waits, RayActorError()], "--ray: the cluster is gone: "),
        ([waits, SimpleNamespace(applications={})], "--ray: somebody else has ended the Serve application"),
        ([partly, ActorDiedError(), TypeError("strange"), info], "strange"),
    ):
        with pytest.raises((ValueError, TypeError)) as raised:
            start(*answers)
        assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
    assert next(answer.side_effect) is info
    assert start(waits, partly, ActorDiedError(), info) is info  # one replica is enough


def test_an_application_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")
    from forerun.scale import replicas

    nodes = [{"Alive": alive, "Resources": {"CPU": cores}} for alive, cores in ((True, 3.0), (True, 2.0), (False, 8.0))]
    nodes.append({"Alive": True, "Resources": {}})
    delete = Mock(side_effect=ConnectionError("the cluster is gone"))
    monkeypatch.setattr(replicas, "cluster", lambda *options: nullcontext())
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 2.0})
    monkeypatch.setattr(replicas.serve, "delete", delete)

    def serving(count: int, cpus: int) -> Any:
        return replicas.serving("auto", make_decoder, replicas=count, room=8, cpus=cpus)

    shares = {(1, None): 1, (2, "cuda"): 1, (3, None): 0.5, (5, None): 0.3333, (12, None): 0.1666, (3, "cpu"): 0}
    assert {each: replicas.gpus_each(*each) for each in shares} == shares

    message = "--replicas 3 with 2 threads each do not fit into 5 cores"
    with pytest.raises(ValueError, match=message), serving(3, 2):
        pass
    assert not delete.called
    message = "what ended the server"
    with pytest.raises(ValueError, match=message), serving(2, 2):
        raise ValueError(message)
    with serving(5, 1) as fleet:
        assert fleet._replicas._application._bound_deployment.ray_actor_options["num_gpus"] == 0.3333
    first, second = (call.args[0] for call in delete.call_args_list)
    assert fleet._replicas._name == second != first


def slow_decoder() -> Any:
    """One whose answers take seconds, so that there is a middle to be killed in."""
    decoder = make_decoder(kv_memory=2**28)  # else a worker would replace it
    advance = decoder.engine.advance
    decoder.engine.advance = lambda: time.sleep(0.03) or advance()
    return decoder


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster on this machine, which can import the tests."""
    ray = pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")
    from ray import serve
    from ray.cluster_utils import Cluster

    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent)]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # its monitor would kill where the machine is full
        patch.setenv("RAY_worker_niceness", "0")
        small = {"num_cpus": 2, "object_store_memory": 100 * 10**6, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=small)
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_ends_before_its_replicas_start_takes_its_application_along(ray_cluster: Any) -> None:
    from ray import serve

    address = ray_cluster.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "forerun", "serve", "--port", "0", "--ray", address, "--target", "embedded"]
    held = ray_cluster.util.placement_group([{"CPU": 2}])  # so that no replica finds room
    ray_cluster.get(held.ready())
    server = subprocess.Popen([*command, "--replicas", "2"], stderr=subprocess.PIPE, text=True)
    try:
        while not (names := [each for each in serve.status().applications if each.startswith("forerun-")]):
            assert server.poll() is None
            time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=300)
    finally:
        server.kill()
    assert server.returncode == 0 and "Traceback" not in errors
    ended = serve.status().applications.get(names[0])
    assert ended is None or ended.status == "DELETING"
    ray_cluster.util.remove_placement_group(held)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streams_go_on_when_a_replica_is_killed(ray_cluster: Any) -> None:
    from forerun.scale.replicas import ServeReplicas, engines

    bodies = [LONG | {"prompt": f"{i} the cat sat on", "max_tokens": 100} for i in range(6)]
    bodies = [each | ({"temperature": 1.0, "seed": i} if i % 2 else {}) for i, each in enumerate(bodies)]
    wanted = answers(Worker(make_decoder), [(PLAIN, each) for each in bodies])
    application = engines(slow_decoder, replicas=2, room=300, cpus=1)
    worker = Fleet(ServeReplicas(application, "streams"))

    async def act(http: httpx.AsyncClient) -> Any:
        while len(worker.available()) < 2:
            await asyncio.sleep(0.05)
        worker._take = taken = Mock(wraps=worker._take)  # type: ignore[method-assign]
        streams = [asyncio.ensure_future(http.post(PLAIN, json=each | {"stream": True})) for each in bodies]
        while len({call.args[0] for call in taken.call_args_list}) < len(bodies):
            await asyncio.sleep(0.01)
        assert len(worker.loads) == 2
        victim = max(worker.loads, key=lambda name: worker.loads[name])
        for each in ray_cluster.util.list_named_actors(all_namespaces=True):
            if victim in each["name"]:
                ray_cluster.kill(ray_cluster.get_actor(each["name"], namespace=each["namespace"]))
        found = [events(each) for each in await asyncio.gather(*streams)]
        assert victim not in worker.available()
        return found

    found = ask(worker, act)
    assert worker.resumed >= 3 and len(worker.recovered) == worker.resumed
    for chunks, other in zip(found, wanted, strict=True):
        assert "error" not in chunks[-1] and chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert "".join(each["choices"][0]["text"] for each in chunks) == other["choices"][0]["text"]
