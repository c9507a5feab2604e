"""`forerun serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import math
from functools import partial
from time import perf_counter
from typing import Annotated

import typer

from forerun.cli.common import quiet
from forerun.cli.options import MaxRowsOption, ServingOptions, check_packages, grouped
from forerun.text.tool_calls import FORMS

LEVELS = ("debug", "info", "warning", "error")


@grouped
def serve(
    serving: ServingOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="FORERUN_API_KEY", help="The key that clients must send.", show_envvar=True
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may send requests, * is any; repeatable."),
    ] = None,
    max_rows: MaxRowsOption = 64,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Sequences that may wait; more get status 503.")
    ] = 256,
    max_body: Annotated[int, typer.Option(min=1, help="Most bytes of a request's body.")] = 4
    * 2**20,
    max_seconds: Annotated[
        float, typer.Option(help="Most seconds of a request, with those in the queue.")
    ] = 600,
    drain: Annotated[
        float, typer.Option(help="Seconds for running requests when the server is to end.")
    ] = 30,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3, mistral. By its chat template."
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help=", ".join(LEVELS))] = "info",
    ray: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster: local for this machine, auto, or HOST:PORT. One engine without."
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines on the cluster; 2 by default.")
    ] = None,
) -> None:
    """Serve a model with OpenAI's API, and a page to try it. See docs/serving.md."""
    begun = perf_counter()
    check_packages("forerun serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    if ray is None and replicas is not None:
        raise ValueError("--replicas is for --ray")
    if ray is not None:
        check_packages("forerun serve --ray", "ray", "ray")
        if not ray:
            raise ValueError("--ray takes local, auto or HOST:PORT")
    if log_level not in LEVELS:
        raise ValueError(f"--log-level must be one of {', '.join(LEVELS)}, not {log_level!r}")
    if tool_parser not in (None, *FORMS):
        raise ValueError(f"--tool-parser must be one of {', '.join(FORMS)}, not {tool_parser!r}")
    for name, seconds in (("max-seconds", max_seconds), ("drain", drain)):
        if not (0 <= seconds < math.inf) or (name == "max-seconds" and not seconds):
            raise ValueError(f"--{name} must be a number of seconds, not {seconds}")
    if api_key is not None and not (
        api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""
    ):
        raise ValueError("--api-key must be printable ASCII without spaces around it")
    method = serving.chosen_method(serving.model)
    from forerun.server.listening import listen, set_up_log

    listening = listen(host, port)
    port = listening.getsockname()[1]
    set_up_log(log_level)
    logging.getLogger("forerun.server").info("loading %s ...", serving.model)
    quiet(serving.threads)
    from forerun.server.app import Settings
    from forerun.server.run import leave, serve
    from forerun.server.worker import Worker, loaded

    settings = Settings(
        serving.name,
        api_key,
        tuple(allow_origin or ()),
        max_body,
        max_seconds=max_seconds,
        tool_parser=tool_parser,
    )
    options = serving.for_load() | {"max_rows": max_rows, "max_queue": max_queue}
    options["share_outputs"] = any(each.startswith("warm=") for each in serving.method_arg or [])
    make = partial(loaded, serving.model, method, options, serving.threads)
    if ray is None:
        serve(Worker(make), settings, listening, started_at=begun, drain=drain)
    else:
        from forerun.scale.replicas import ReplicaPlan, run

        listening.close()  # it was to see that the address is free
        plan = ReplicaPlan(
            count=replicas or 2,
            capacity=max_rows + max_queue,
            cpus=serving.threads or 1,
            device=serving.device,
            drain=drain,
        )
        run(ray, make, settings, plan, host=host, port=port, started_at=begun)
    leave()
