"""`forerun serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.api.choose import resolve
from forerun.api.options import ModelOptions
from forerun.cli.common import quiet
from forerun.cli.options import (
    MaxRowsOption,
    ServingOptions,
    byte_size,
    byte_size_or_0,
    check_packages,
    grouped,
)
from forerun.cli.writing import say_default
from forerun.methods import Method
from forerun.text.tool_calls import FORMS
from forerun.text.tools import NO_PARSER
from forerun.zoo import ModelSource

if TYPE_CHECKING:
    from forerun.api.decoder import Decoder
    from forerun.server.app import Settings
    from forerun.server.models import Models

LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_REPLICAS = 2
# Options that fit one target alone.
TARGETS_OWN = ("draft", "method", "gamma", "method_arg", "pre_verifier", "head")


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
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help=(
                "A model to serve by this name, beside or instead of --target. It is loaded when a "
                "request asks for it. PATH may also be a hub id or a model that forerun knows. May "
                "be repeated."
            ),
        ),
    ] = None
    models_memory: Annotated[
        int | None,
        typer.Option(
            parser=byte_size,
            metavar="SIZE",
            help=(
                "Most bytes of models that are loaded at once, for example 8GiB: weights, trained "
                "layers and --prefix-bytes. Beyond them the least recently used model is unloaded. "
                "Default: no limit."
            ),
        ),
    ] = None
    prefix_bytes: Annotated[
        int | None,
        typer.Option(
            parser=byte_size_or_0,
            metavar="SIZE",
            help=(
                "Most bytes of keys and values of a model's earlier texts, for example 1GiB; 0 for "
                "none. A prompt that begins like one of them is read from there on. Its draft "
                "model takes its own for as many tokens. Default: room for a whole context, within "
                "a quarter of the free memory."
            ),
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
        if self.models_memory is not None and not self.model:
            raise ValueError("--models-memory is for several models: give --model as well")
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
        if self.model:
            raise ValueError("--model is for one process: leave out --ray")


def _can_be_sent(key: str) -> bool:
    """Return whether a key can stand in an HTTP header as it is."""
    return key.isascii() and key.isprintable() and key != "" and key == key.strip()


@dataclass(frozen=True)
class ServedModel:
    """One of the models to serve.

    Attributes:
        options: how it is loaded, with its name.
        method: the method that the user chose for it, or None.
    """

    options: ServingOptions
    method: Method | None


def served_models(serving: ServingOptions, options: ServerOptions) -> list[ServedModel]:
    """Return the models to serve, the default one first.

    Draft, method, trained layers and name belong to --target. The models of --model have those that
    ship with them. Raises ValueError for models that do not exist and for names that cannot be.
    """
    named = [_named(given) for given in options.model or []]
    servings = [] if named and serving.target is None else [serving]
    if not servings:
        for name in (*TARGETS_OWN, "model_name"):
            if vars(serving)[name] is not None:
                raise ValueError(f"--{name.replace('_', '-')} belongs to --target: give it as well")
    nothing: dict[str, Any] = dict.fromkeys(TARGETS_OWN)
    alone = replace(serving, **nothing)
    servings += [replace(alone, target=path, model_name=name) for name, path in named]
    names = Counter(model.name for model in servings)
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"{count} models have the name {name!r}")
    return [ServedModel(model, model.chosen_method(model.model)) for model in servings]


def _named(given: str) -> tuple[str, str]:
    """Return the name and the path of a --model."""
    name, _, path = given.partition("=")
    if not (name and path and name.isprintable() and name == name.strip()):
        raise ValueError(f"--model must be NAME=PATH, not {given!r}")
    return name, path


@grouped
def serve(serving: ServingOptions, options: ServerOptions) -> None:
    """Serve models with OpenAI's API, and a page to try them. See docs/guide/serve.md."""
    started_at = perf_counter()
    check_packages("forerun serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    options.check()
    models = served_models(serving, options)
    from forerun.server.listening import listen, set_up_log

    listening = listen(options.host, options.port)
    port = listening.getsockname()[1]
    set_up_log(options.log_level)
    first = models[0].options
    logging.getLogger("forerun.server").info("loading %s ...", first.model)
    if first.target is None:
        say_default(first.model)
    quiet(serving.threads)
    from forerun.server import run
    from forerun.server.app import Settings, create_app
    from forerun.server.worker import Worker

    settings = Settings(
        first.name,
        options.api_key,
        tuple(options.allow_origin or ()),
        tuple(options.allowed_hosts or ()),
        options.max_body,
        max_seconds=options.max_seconds,
        tool_parser=options.tool_parser,
    )
    make = _decoder_maker(models[0], options)
    process = {"started_at": started_at, "drain": options.drain}
    if options.model:
        several = _models(models, options, settings)
        from forerun.server.dispatch import create_models_app

        run.serve(create_models_app(several, settings), several, listening, **process)
    elif options.ray is None:
        app = create_app(Worker(make), settings)
        run.serve(app, app.state.service, listening, **process)
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


def _models(models: list[ServedModel], options: ServerOptions, settings: Settings) -> Models:
    """Return several models, none of which is loaded yet."""
    from forerun.server.memory import MemoryShare
    from forerun.server.model import Model
    from forerun.server.models import Models

    share = MemoryShare(1 / len(models), options.models_memory)
    made = [
        Model(
            _decoder_maker(served, options),
            replace(settings, model=served.options.name),
            _file_bytes(served),
            share,
        )
        for served in models
    ]
    return Models(made, options.models_memory)


def _file_bytes(served: ServedModel) -> int:
    """Return the bytes of the files of a model, of its draft, and of its trained layers."""
    serving = served.options
    target = ModelSource.parse(serving.model, "target")
    choice = resolve(
        target,
        serving.draft,
        served.method,
        pre_verifier=serving.pre_verifier,
        head=serving.head,
        models=ModelOptions(draft_vocabulary=serving.draft_vocabulary),
    )
    parts = (target, choice.draft, choice.pre_verifier, choice.head)
    return sum(part.file_bytes for part in parts if part is not None)


def _decoder_maker(served: ServedModel, options: ServerOptions) -> Callable[[], Decoder]:
    """Return what loads the decoder, in the thread or on the node that computes."""
    from forerun.server.worker import loaded

    serving = served.options
    loading = serving.for_load() | {
        name: vars(options)[name] for name in ("max_rows", "max_queue", "prefix_bytes")
    }
    # Outputs may show one client's words to another (EngineOptions), so they are shared only if the
    # user sets `warm`. A method whose `warm` is false shares nothing all the same.
    loading["share_outputs"] = any(
        setting.startswith("warm=") for setting in serving.method_arg or []
    )
    return partial(loaded, serving.model, served.method, loading, serving.threads)
