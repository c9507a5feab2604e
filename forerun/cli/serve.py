"""`forerun serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.common import quiet
from forerun.cli.options import (
    MaxRowsOption,
    ServingOptions,
    byte_size,
    check_packages,
    grouped,
)
from forerun.cli.writing import say_default
from forerun.methods import Method
from forerun.text.tool_calls import FORMS
from forerun.text.tools import NO_PARSER

if TYPE_CHECKING:
    from forerun.api.decoder import Decoder

LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_REPLICAS = 2


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, its limits, and its engines."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is all addresses of the machine.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is any free port.")
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="FORERUN_API_KEY", help="The key that clients must send.", show_envvar=True
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may send requests; * is any site. May be repeated."),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A public name under which the server may be asked without a key; * is any. May be "
                "repeated. Addresses and names of the local network need not be given."
            )
        ),
    ] = None
    max_rows: MaxRowsOption = 64
    max_queue: Annotated[
        int,
        typer.Option(
            min=1, help="How many sequences may wait. Further requests get the status 503."
        ),
    ] = 256
    max_body: Annotated[
        int,
        typer.Option(parser=byte_size, metavar="SIZE", help="Most bytes of a request's body."),
    ] = 4 * 2**20
    max_seconds: Annotated[
        float, typer.Option(help="Most seconds of a request, including its time in the queue.")
    ] = 600
    drain: Annotated[
        float,
        typer.Option(help="Seconds that running requests get when the server is told to end."),
    ] = 30
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help=(
                f"How the model writes tool calls: {', '.join(FORMS)}; or none, to refuse tools. "
                "Default: as its chat template shows."
            )
        ),
    ] = None
    log_level: Annotated[
        str, typer.Option(help=f"What the log holds at least: {', '.join(LOG_LEVELS)}.")
    ] = "info"
    ray: Annotated[
        str | None,
        typer.Option(
            help=(
                "Ray cluster that runs several engines: local for this machine, auto, or "
                "HOST:PORT. Without it there is one engine, in this process."
            )
        ),
    ] = None
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of engines on the cluster. Default: {DEFAULT_REPLICAS}."),
    ] = None

    def check(self) -> None:
        """Raise ValueError for bad values and for missing packages."""
        self._check_ray()
        if self.log_level not in LOG_LEVELS:
            raise ValueError(
                f"--log-level must be one of {', '.join(LOG_LEVELS)}, not {self.log_level!r}"
            )
        parsers = (*FORMS, NO_PARSER)
        if self.tool_parser not in (None, *parsers):
            raise ValueError(
                f"--tool-parser must be one of {', '.join(parsers)}, not {self.tool_parser!r}"
            )
        if not 0 < self.max_seconds < math.inf:
            raise ValueError(
                f"--max-seconds must be a number of seconds above 0, not {self.max_seconds}"
            )
        if not 0 <= self.drain < math.inf:
            raise ValueError(f"--drain must be a number of seconds, at least 0, not {self.drain}")
        if self.api_key is not None and not _can_be_sent(self.api_key):
            raise ValueError("--api-key must be printable ASCII without spaces around it")

    def _check_ray(self) -> None:
        """Raise ValueError if the options of the cluster do not fit."""
        if self.ray is None:
            if self.replicas is not None:
                raise ValueError("--replicas is for --ray: give --ray as well")
            return
        check_packages("forerun serve --ray", "ray", "ray")
        if not self.ray:
            raise ValueError("--ray takes local, auto or HOST:PORT")


def _can_be_sent(key: str) -> bool:
    """Return whether a key can stand in an HTTP header as it is."""
    return key.isascii() and key.isprintable() and key != "" and key == key.strip()


@grouped
def serve(serving: ServingOptions, options: ServerOptions) -> None:
    """Serve a model with OpenAI's API, and a page to try it. See docs/guide/serve.md."""
    started_at = perf_counter()
    check_packages("forerun serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    options.check()
    method = serving.chosen_method(serving.model)
    from forerun.server.listening import end_on_sigterm, listen, set_up_log

    listening = listen(options.host, options.port)
    end_on_sigterm()
    port = listening.getsockname()[1]
    set_up_log(options.log_level)
    logging.getLogger("forerun.server").info("loading %s ...", serving.model)
    if serving.target is None:
        say_default(serving.model)
    quiet(serving.threads)
    from forerun.server import run
    from forerun.server.app import Settings
    from forerun.server.worker import Worker

    settings = Settings(
        serving.name,
        options.api_key,
        tuple(options.allow_origin or ()),
        tuple(options.allowed_hosts or ()),
        options.max_body,
        max_seconds=options.max_seconds,
        tool_parser=options.tool_parser,
    )
    make = _decoder_maker(serving, options, method)
    if options.ray is None:
        run.serve(Worker(make), settings, listening, started_at=started_at, drain=options.drain)
    else:
        from forerun.scale import replicas

        listening.close()  # it has shown that the address is free; Ray Serve listens itself
        plan = replicas.ReplicaPlan(
            count=options.replicas or DEFAULT_REPLICAS,
            capacity=options.max_rows + options.max_queue,
            cpus=serving.threads or 1,
            device=serving.device,
            drain=options.drain,
        )
        replicas.run(
            options.ray,
            make,
            settings,
            plan,
            host=options.host,
            port=port,
            started_at=started_at,
        )
    run.leave()


def _decoder_maker(
    serving: ServingOptions, options: ServerOptions, method: Method | None
) -> Callable[[], Decoder]:
    """Return what loads the decoder, in the thread or on the node that computes."""
    from forerun.server.worker import loaded

    loading = serving.for_load() | {"max_rows": options.max_rows, "max_queue": options.max_queue}
    # Outputs may show one client's words to another (EngineOptions), so they are shared only if the
    # user sets `warm`. A method whose `warm` is false shares nothing all the same.
    loading["share_outputs"] = any(
        setting.startswith("warm=") for setting in serving.method_arg or []
    )
    return partial(loaded, serving.model, method, loading, serving.threads)
