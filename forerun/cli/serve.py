"""`forerun serve`: the OpenAI-compatible server."""

from __future__ import annotations

import math
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import common
from forerun.cli.chosen import chosen_method
from forerun.cli.common import load_options, quiet
from forerun.files import read_text

LEVELS = ("debug", "info", "warning", "error")
SPINS = "100000"  # turns that torch's threads wait in behind each product; with the usual 300,000 they keep their cores


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Options of a TOML file become defaults, so that the command line wins."""
    if path is None:
        return None
    try:
        given = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--config '{path}' is not TOML: {error}") from None
    known = {each.name: each for each in context.command.params if each.name != "config"}
    found: dict[str, Any] = {}
    for name, value in given.items():
        option = known.get(name.replace("-", "_"))
        if option is None:
            names = ", ".join(sorted(str(each).replace("_", "-") for each in known))
            raise ValueError(f"--config '{path}' has an unknown name {name!r}; there are {names}")
        if isinstance(value, dict) or (isinstance(value, list) and not getattr(option, "multiple", False)):
            raise ValueError(f"--config '{path}': {name} must be one value")
        is_one = getattr(option, "multiple", False) and not isinstance(value, list)
        found[str(option.name)] = [value] if is_one else value
    context.default_map = {**(context.default_map or {}), **found}
    return path


def serve(
    target: common.BestTargetOption = None,
    draft: common.DraftOption = None,
    method: common.MethodOption = None,
    gamma: common.GammaOption = None,
    method_arg: common.MethodArgOption = None,
    pre_verifier: common.PreVerifierOption = None,
    head: common.HeadOption = None,
    model_name: common.ModelNameOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="FORERUN_API_KEY", help="What clients must know.", show_envvar=True)
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may ask, * is any; repeatable. None by default.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, help="Sequences that may wait; more get status 503.")] = 256,
    kv_memory: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes for the target's keys and values; half of what is free by default."),
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = 4 * 2**20,
    max_seconds: Annotated[float, typer.Option(help="Seconds of a request, those in the queue included.")] = 600,
    drain: Annotated[float, typer.Option(help="Seconds for what runs when the server is to end.")] = 30,
    guard: common.GuardOption = None,
    dtype: common.DtypeOption = None,
    weights: common.WeightsOption = None,
    draft_weights: common.DraftWeightsOption = None,
    draft_vocabulary: common.DraftVocabularyOption = None,
    draft_tokens: common.DraftTokensOption = None,
    device: common.DeviceOption = None,
    threads: common.ThreadsOption = None,
    trust_remote_code: common.TrustOption = False,
    log_level: Annotated[str, typer.Option(help=", ".join(LEVELS))] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Lines of the log are JSON.")] = False,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="The log has prompts too.")] = False,
    ray: common.RayOption = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Engines on the cluster; 2 by default.")] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="So many while requests wait; as many as --replicas by default.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(callback=_read_config, is_eager=True, help="A TOML file with these names; options here win."),
    ] = None,
) -> None:
    """Serve a model with OpenAI's API, and a page to try it. See docs/serving.md."""
    common.needs("forerun serve", serve=["fastapi", "uvicorn", "prometheus_client"], ray=["ray"] if ray else [])
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded; the loop's thread needs a core too
    least, most = _replicas(ray, replicas, max_replicas)
    if log_level not in LEVELS:
        raise ValueError(f"--log-level must be one of {', '.join(LEVELS)}, not {log_level!r}")
    for name, seconds in (("max-seconds", max_seconds), ("drain", drain)):
        if not (0 <= seconds < math.inf) or (name == "max-seconds" and not seconds):
            raise ValueError(f"--{name} must be a number of seconds, not {seconds}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ValueError("--api-key must be printable ASCII without spaces around it")
    name = common.best_target(target)
    settings, is_named = chosen_method(name, draft, method, gamma, method_arg, pre_verifier, head)
    options = load_options(locals())
    from forerun.server.listening import listen

    found = listen(host, port)
    quiet(threads)
    from forerun.server.loader import Loader
    from forerun.server.run import leave, serve
    from forerun.server.service import Settings
    from forerun.server.worker import Worker

    serving = Settings(
        model=common.shown_name(name, model_name),
        api_key=api_key,
        allow_origin=tuple(allow_origin or ()),
        max_body=max_body,
        max_seconds=max_seconds,
        log_prompts=log_prompts,
    )
    how: dict[str, Any] = {"drain": drain, "log_level": log_level, "log_json": log_json}
    is_shared = not any(each.startswith("warm=") for each in method_arg or [])
    loader = Loader(name, settings if is_named else None, options, threads, is_shared)
    if ray is None:
        worker = Worker(loader)
        serve(worker, serving, found, **how)
    else:
        from forerun.scale import replicas as scale

        loader = replace(loader, target=common.whole(name), options=common.whole_options(options))
        count: dict[str, Any] = {"least": least, "most": most, "cpus": threads or 1}
        made = scale.engines(loader, rows=max_rows, room=max_rows + max_queue, **count)
        with scale.serving(ray, **count) as application:
            worker = scale.fleet(made, application)
            serve(worker, serving, found, **how)
    leave(worker)


def _replicas(ray: str | None, replicas: int | None, most: int | None) -> tuple[int, int]:
    """How many engines a cluster is to have, at least and at most. Raises ValueError."""
    common.check_ray(ray, replicas=replicas, max_replicas=most)
    least = replicas or min(2, most or 2)
    if most is not None and most < least:
        raise ValueError(f"--max-replicas must be at least --replicas, {least}, not {most}")
    return least, most or least
