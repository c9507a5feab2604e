"""`forerun serve`: the OpenAI-compatible server."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import common
from forerun.cli.chosen import chosen_method
from forerun.cli.common import load_options, quiet
from forerun.files import read_text
from forerun.zoo import EMBEDDED, SMOLLM2, find_smollm2

LEVELS = ("debug", "info", "warning", "error")


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
    target: Annotated[
        str | None,
        typer.Option(help="Hub id, folder or GGUF file; smollm2 where it is there, else the embedded one by default."),
    ] = None,
    draft: common.DraftOption = None,
    method: common.MethodOption = None,
    gamma: common.GammaOption = None,
    method_arg: common.MethodArgOption = None,
    pre_verifier: common.PreVerifierOption = None,
    head: common.HeadOption = None,
    model_name: Annotated[str | None, typer.Option(help="Its name for clients; the target's by default.")] = None,
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
    kv_memory: Annotated[int | None, typer.Option(min=1, help="Bytes for keys and values of the target.")] = None,
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
    ray: Annotated[
        str | None, typer.Option(help="A Ray cluster: local for this machine, auto, or HOST:PORT. One engine without.")
    ] = None,
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
    missing = [each for each in ("fastapi", "uvicorn", "prometheus_client") if find_spec(each) is None]
    if missing:
        raise ValueError(f"forerun serve needs {', '.join(missing)}: pip install 'forerun[serve]'")
    least, most = _replicas(ray, replicas, max_replicas)
    if log_level not in LEVELS:
        raise ValueError(f"--log-level must be one of {', '.join(LEVELS)}, not {log_level!r}")
    for name, seconds in (("max-seconds", max_seconds), ("drain", drain)):
        if not (0 <= seconds < math.inf) or (name == "max-seconds" and not seconds):
            raise ValueError(f"--{name} must be a number of seconds, not {seconds}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ValueError("--api-key must be printable ASCII without spaces around it")
    name = target or (SMOLLM2 if find_smollm2() is not None else EMBEDDED)
    settings, is_named = chosen_method(name, draft, method, gamma, method_arg, pre_verifier, head)
    # Rejected drafts, which a client may ask for, would be words of other clients' answers.
    if getattr(settings, "warm", False) and not any(each.startswith("warm=") for each in method_arg or []):
        settings = replace(settings, warm=False)  # type: ignore[arg-type]
    options = load_options(locals())
    from forerun.server.listening import listen

    found = listen(host, port)
    quiet(threads)
    from forerun.server.run import serve
    from forerun.server.service import Settings
    from forerun.server.worker import Worker

    shown = model_name or (Path(name).name if Path(name).exists() else name)
    serving = Settings(
        model=shown,
        api_key=api_key,
        allow_origin=tuple(allow_origin or ()),
        max_body=max_body,
        max_seconds=max_seconds,
        log_prompts=log_prompts,
    )
    how: dict[str, Any] = {"drain": drain, "log_level": log_level, "log_json": log_json}
    chosen = settings if is_named else None
    if ray is not None:
        from forerun.scale.engines import Loader, engines
        from forerun.scale.replicas import cluster, fleet

        options |= {each: _as_text(options[each]) for each in ("draft", "head", "pre_verifier") if options[each]}
        loader, cpus = Loader(_as_text(name), chosen, options, threads), threads or 1
        made = engines(loader, least=least, most=most, rows=max_rows, room=max_rows + max_queue, cpus=cpus)
        with cluster(ray, cpus * most):
            serve(fleet(made), serving, found, **how)
        return

    def make() -> Any:
        quiet(threads)  # torch's threads are set in the thread that computes
        from forerun.api import load

        return load(name, method=chosen, **options)

    serve(Worker(make), serving, found, **how)


def _replicas(ray: str | None, replicas: int | None, most: int | None) -> tuple[int, int]:
    """How many engines a cluster is to have, at least and at most. Raises ValueError."""
    if ray is None:
        for option, value in (("replicas", replicas), ("max-replicas", most)):
            if value is not None:
                raise ValueError(f"--{option} is for --ray")
        return 1, 1
    if ray == "":
        raise ValueError("--ray takes local, auto or HOST:PORT")
    if find_spec("ray") is None:
        raise ValueError("forerun serve --ray needs ray: pip install 'forerun[ray]'")
    least = replicas or min(2, most or 2)
    if most is not None and most < least:
        raise ValueError(f"--max-replicas must be at least --replicas, {least}, not {most}")
    return least, most or least


def _as_text(name: str | Path) -> str:
    """A folder's whole name: replicas run elsewhere."""
    return str(Path(name).resolve() if Path(name).exists() else name)
