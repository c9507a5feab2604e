"""Replicas by Ray Serve, an engine in each, for `forerun serve --ray`. See docs/replicas.md.

The app chooses the replica for a prompt, as it knows the prompt and what is in flight. Serve keeps replicas alive,
starts more of them and carries the calls; its request router follows the app's choice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict
from secrets import token_hex
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ApplicationStatus, ReplicaState

from forerun.api.decoder import Decoder
from forerun.scale.cluster import cluster, cores, first_line, gpus_each
from forerun.scale.fleet import Fleet, LostError
from forerun.scale.messages import ModelInfo, SentRequest, Steps, decode
from forerun.server.backend import until_ready
from forerun.server.errors import ApiError
from forerun.server.readers import Readers
from forerun.server.worker import Worker

LOOK = 0.25  # seconds between two looks whether a replica has started
_LOG = logging.getLogger("forerun.server")

routers: dict[str, RequestRouter] = {}  # of this process, by application


class Engine:
    """A replica: a worker with its engine. It has begun when its model is loaded."""

    async def __init__(self, make: Callable[[], Decoder]) -> None:  # type: ignore[misc]  # Serve awaits it
        self.worker, self.readers = Worker(make), Readers()
        self.worker.start()
        await until_ready(self.worker)

    async def model(self) -> ModelInfo:
        return ModelInfo.of(self.worker)

    async def decode(self, sent: list[SentRequest], to: str) -> AsyncGenerator[Steps | tuple[Any, ...], None]:
        """Yield what `messages.decode` does, and its ApiError as a tuple. `to` is for the router."""
        try:
            async with aclosing(decode(self.worker, self.readers, sent)) as stream:
                async for steps in stream:
                    yield steps
        except ApiError as error:
            yield error.status, error.message, error.param, error.code

    def check_health(self) -> None:
        if self.worker.failed is not None:
            raise RuntimeError("its engine has failed") from self.worker.failed

    def record_routing_stats(self) -> dict[str, int]:
        return asdict(self.worker.load())


class Router(RequestRouter):
    """Sends a call to the replica that its argument `to` names, or to any if that one is gone."""

    def initialize_state(self, **kwargs: Any) -> None:
        from forerun.scale.replicas import routers  # Ray copies this class; its own globals would be copies too

        routers[self.app_name] = self

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        to = None if pending_request is None else pending_request.kwargs.get("to")
        named = [each for each in candidate_replicas if each.replica_id.unique_id == to]
        return [named, candidate_replicas] if named else [candidate_replicas]


class ServeReplicas:
    """The `Replicas` of an application, which starts with them."""

    def __init__(self, application: serve.Application, name: str) -> None:
        self._application, self._name = application, name
        self._handle: DeploymentHandle

    async def model(self) -> ModelInfo:
        """Start the application; return what its first replica answers. Raises ValueError if none can start."""
        _LOG.info("the Serve application is %s", self._name)
        try:
            self._handle = await asyncio.to_thread(self._deploy)
            await self._started()
            while True:
                try:
                    found = await self._handle.model.remote()
                    assert isinstance(found, ModelInfo)
                    return found
                except RayActorError as error:  # the replica that was asked died: Serve starts another one
                    _LOG.warning("a replica was lost: %s", type(error).__name__)
                    await asyncio.sleep(1)
        except (RayError, RayServeException) as error:
            raise ValueError(f"--ray: the cluster is gone: {first_line(error)}") from None

    def _deploy(self) -> DeploymentHandle:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        target = serve.RunTarget(self._application, self._name, route_prefix=None)
        return serve.run_many([target], wait_for_applications_running=False)[0]

    async def _started(self) -> None:
        """Wait for a replica in the event loop: a thread that waits would hold up the end of the process."""
        shown = ""
        while True:
            found = (await asyncio.to_thread(serve.status)).applications.get(self._name)
            replicas = None if found is None else found.deployments.get("Engine")
            if found is None or replicas is None:
                raise ValueError("--ray: somebody else has ended the Serve application")
            if replicas.replica_states.get(ReplicaState.RUNNING):
                return
            lines = [line.strip() for line in (replicas.message or found.message).splitlines() if line.strip()]
            last = lines[-1] if lines else str(found.status)
            if found.status == ApplicationStatus.DEPLOY_FAILED:
                raise ValueError(f"--ray: the replicas did not start: {last}")
            if lines and last != shown:
                shown = last
                _LOG.warning("no replica has started: %s", last)
            await asyncio.sleep(LOOK)

    def figures(self) -> dict[str, Mapping[str, float]]:
        router = routers.get(self._name)
        known = [] if router is None else list(router.curr_replicas.items())
        return {each.unique_id: replica.routing_stats for each, replica in known}

    async def decode(self, name: str, sent: Sequence[SentRequest]) -> AsyncGenerator[Steps, None]:
        stream: Any = self._handle.options(stream=True).decode.remote(list(sent), to=name)
        try:
            async for found in stream:
                if isinstance(found, tuple):
                    raise ApiError(*found)
                yield found
        except ApiError:
            raise
        except Exception as error:  # the actor or its node died, or what ran there raised
            raise LostError(type(error).__name__) from error
        finally:
            stream.cancel()


def engines(
    make: Callable[[], Decoder], *, replicas: int, room: int, cpus: float, device: str | None = None
) -> serve.Application:
    """Return an application of replicas on the cluster that Ray is connected to.

    A replica holds `room` requests. It has `cpus` cores, and its share of the GPUs unless its device is a CPU.
    """
    routing: dict[str, Any] = {"request_router_class": Router, "request_routing_stats_period_s": 2.0}
    deployment = serve.deployment(
        name="Engine",
        num_replicas=replicas,
        max_ongoing_requests=2 * room,  # the app keeps count; a few more calls must not wait at Serve's door
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus_each(replicas, device)},
        request_router_config=RequestRouterConfig(**routing),
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=30,
        max_constructor_retry_count=3,  # in all; a model that cannot be loaded ends the server
    )
    return deployment(Engine).bind(make)


@contextmanager
def serving(address: str, make: Callable[[], Decoder], *, replicas: int, cpus: int, **options: Any) -> Iterator[Fleet]:
    """Connect to a cluster, and yield a backend whose replicas there end with the connection.

    The arguments are those of `engines`. Raises ValueError if the replicas do not fit.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with cluster(address, 100 * 2**20, cpus * replicas):
        found = cores()
        if sum(each // cpus for each in found) < replicas:
            raise ValueError(f"--replicas {replicas} with {cpus} threads each do not fit into {sum(found)} cores")
        name = f"forerun-{token_hex(4)}"
        try:
            yield Fleet(ServeReplicas(engines(make, replicas=replicas, cpus=cpus, **options), name))
        finally:
            with suppress(Exception):  # the cluster may be gone; the error to show is what ended the server
                serve.delete(name, _blocking=False)
                serve.status()  # waits until Serve has the request to delete
