"""`forerun serve --ray`: whole servers on a Ray cluster."""

import os
import re
import signal
import subprocess
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import httpx
import pytest

from forerun.server.app import Settings
from tests.support import commands
from tests.support.local import LOCAL
from tests.support.serving import PLAIN, make_decoder
from tests.support.toys import refuses

pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")

ADDRESS: dict[str, Any] = {"host": "127.0.0.1", "port": 0}
BODY = {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def test_replicas_have_their_share_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.scale import replicas

    nodes = [
        {"Alive": alive, "Resources": {"CPU": cores}}
        for alive, cores in ((True, 3.0), (True, 2.0), (False, 8.0))
    ]
    nodes.append({"Alive": True, "Resources": {}})
    monkeypatch.setattr(replicas, "cluster", lambda *options: nullcontext())
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 2.0})
    shares = {
        (1, None): 1,
        (2, "cuda"): 1,
        (3, None): 0.5,
        (5, None): 0.3333,
        (12, None): 0.1666,
        (3, "cpu"): 0,
    }
    assert {arguments: replicas.gpus_per_replica(*arguments) for arguments in shares} == shares
    parts = {1: 1, 2: 1, 3: 1 / 2, 4: 1 / 2, 5: 1 / 3}  # on two machines
    assert {count: replicas.machine_share(count) for count in parts} == parts

    def run(count: int, cpus: int) -> None:
        plan = replicas.ReplicaPlan(count, capacity=8, cpus=cpus, device=None, drain=1.0)
        replicas.run("auto", make_decoder, Settings("tiny"), plan, **ADDRESS, started_at=0.0)

    refuses("--replicas 3 with 2 threads each do not fit into 5 cores", run, 3, 2)
    # What cannot start is one line, and its application is deleted, even if the cluster is gone.
    monkeypatch.setattr(signal, "signal", Mock())
    started = Mock(side_effect=RuntimeError("Deploying failed"))
    failed = SimpleNamespace(
        deployments={"Replica": SimpleNamespace(message="Traceback\n\nValueError: no model\n")}
    )
    status = SimpleNamespace(applications=MagicMock(__getitem__=lambda self, name: failed))
    deleted = Mock(side_effect=replicas.RayServeException("gone"))
    for name, stand_in in (
        ("start", Mock()),
        ("run", started),
        ("delete", deleted),
        ("status", lambda: status),
    ):
        monkeypatch.setattr(replicas.serve, name, stand_in)
    refuses("^--ray: the replicas did not start: ValueError: no model$", run, 5, 1)
    assert started.call_args.args[0]._bound_deployment.ray_actor_options == {
        "num_cpus": 1,
        "num_gpus": 0.3333,
    }
    assert deleted.call_args.args == (started.call_args.kwargs["name"],)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_answer_and_come_back() -> None:
    """A killed replica is replaced, and another one answers meanwhile.

    Running answers end before the server does.
    """
    command = ["serve", "--ray", "local", "--replicas", "2", "--port", "0"]
    command += ["--target", "embedded"]
    env = os.environ | {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}
    with commands.running(*command, env=env) as server:
        lines = []
        while not (
            match := re.search(r"ready in .*(http://\S+)", line := server.stderr.readline())
        ):
            assert line, lines
            lines.append(line)
        with httpx.Client(base_url=match[1], timeout=120, **LOCAL) as http:
            assert http.get("/health").json() == {"status": "ok"}
            first = http.post(PLAIN, json=BODY, headers={"x-request-id": "mine"})
            assert first.headers.get_list("x-request-id") == ["mine"]
            refused = http.post(PLAIN, json=BODY | {"temperature": -1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
            victims = engines()
            assert len(victims) == 2
            os.kill(victims[0], signal.SIGKILL)
            answers = []
            while len(now := engines()) < 2 or victims[0] in now or len(answers) < 4:
                answers.append(http.post(PLAIN, json=BODY))
                time.sleep(0.5)
            texts = [
                answer.json()["choices"][0]["text"]
                for answer in answers
                if answer.status_code == 200
            ]
            assert len(texts) >= len(answers) - 1 and set(texts) == {
                first.json()["choices"][0]["text"]
            }
            with http.stream(
                "POST", PLAIN, json=BODY | {"max_tokens": 300, "stream": True}
            ) as stream:
                events = stream.iter_lines()
                assert next(events).startswith("data: ")
                server.send_signal(signal.SIGTERM)
                assert [event for event in events if event][-1] == "data: [DONE]"
        assert server.wait(120) == 0


def engines() -> list[int]:
    shown = subprocess.run(
        ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    return [
        int(line.split()[0]) for line in shown.splitlines() if "ray::ServeReplica:forerun-" in line
    ]
