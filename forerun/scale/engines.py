"""Engines by Ray Serve, one in each replica.

The app itself says which replica a prompt goes to, as it knows the prompt and what is in flight. Serve keeps replicas
alive, starts more of them and carries the calls; its request router does as it is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from forerun.api.decoder import Decoder
from forerun.scale.fleet import LostError
from forerun.scale.parts import Face, Found, Part, decoded
from forerun.server.backend import until_ready
from forerun.server.errors import ApiError
from forerun.server.readers import Readers
from forerun.server.worker import Worker

routers: dict[str, RequestRouter] = {}  # of this process, by application


class Engine:
    """What a replica is: a worker with its engine. It is there when its model is loaded."""

    async def __init__(self, make: Callable[[], Decoder]) -> None:  # type: ignore[misc]  # Serve awaits it
        self.worker, self.readers = Worker(make), Readers()
        self.worker.start()
        await until_ready(self.worker)

    async def face(self) -> Face:
        assert self.worker.decoder is not None
        return Face.of(self.worker.decoder, self.worker.engine)

    async def decode(self, parts: list[Part], to: str) -> AsyncGenerator[Found | tuple[Any, ...], None]:
        """`decoded`, and what it raises for the client as a tuple. `to` is for the router."""
        try:
            async with aclosing(decoded(self.worker, self.readers, parts)) as stream:
                async for found in stream:
                    yield found
        except ApiError as error:
            yield error.status, error.message, error.param, error.code

    def check_health(self) -> None:
        if self.worker.failed is not None:
            raise RuntimeError("its engine has failed") from self.worker.failed

    def record_routing_stats(self) -> dict[str, int]:
        return asdict(self.worker.load())


class Router(RequestRouter):
    """Sends a call to the replica that its argument `to` names, or to any where that is not there."""

    def initialize_state(self, **kwargs: Any) -> None:
        from forerun.scale.engines import routers  # Ray copies this class; its own globals would be copies too

        routers[self.app_name] = self

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        to = None if pending_request is None else pending_request.kwargs.get("to")
        named = [each for each in candidate_replicas if each.replica_id.unique_id == to]
        return [named, candidate_replicas] if named else [candidate_replicas]


class ServeReplicas:
    """The replicas of an application, as `Fleet` asks them."""

    def __init__(self, start: Callable[[], Awaitable[DeploymentHandle]], application: str) -> None:
        """`start` may wait until there is a replica. What it raises ends the server."""
        self._start, self._application = start, application
        self._handle: DeploymentHandle

    async def face(self) -> Face:
        self._handle = await self._start()
        while True:
            try:
                found = await self._handle.face.remote()
                assert isinstance(found, Face)
                return found
            except RayActorError as error:  # the replica that was asked died: another one will be there
                logging.getLogger("forerun.server").warning("a replica was lost: %s", type(error).__name__)
                await asyncio.sleep(1)
            except (RayError, RayServeException) as error:
                raise ValueError(
                    f"--ray: the replicas are gone: {(str(error) or repr(error)).splitlines()[0]}"
                ) from None

    def _known(self) -> dict[str, RunningReplica]:
        router = routers.get(self._application)
        return {} if router is None else {each.unique_id: known for each, known in list(router.curr_replicas.items())}

    def names(self) -> list[str]:
        return list(self._known())

    def figures(self) -> dict[str, Mapping[str, float]]:
        return {name: known.routing_stats for name, known in self._known().items()}

    async def decode(self, name: str, parts: Sequence[Part]) -> AsyncGenerator[Found, None]:
        stream: Any = self._handle.options(stream=True).decode.remote(list(parts), to=name)
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
    make: Callable[[], Decoder], *, least: int, most: int, rows: int, room: int, cpus: float, gpus: float = 0
) -> serve.Application:
    """Replicas, from `least` to `most`: more of them while more than `rows` requests a replica are in flight, so that
    some wait. `room`: requests that a replica holds."""
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        config = AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=rows)
        scaling = {"autoscaling_config": config}
    routing: dict[str, Any] = {"request_router_class": Router, "request_routing_stats_period_s": 2.0}
    deployment = serve.deployment(
        name="Engine",
        max_ongoing_requests=2 * room,  # the app keeps count; a few more calls must not wait at Serve's door
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(**routing),
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=30,
        max_constructor_retry_count=3,  # in all; a model that cannot be loaded ends the server
        **scaling,
    )
    return deployment(Engine).bind(make)
