"""The options that several commands share, each declared once.

A command names an alias, or takes a whole dataclass of options through `grouped`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from forerun import zoo
from forerun.api.choose import resolve
from forerun.api.options import ModelOptions
from forerun.files import private_folder, read_text
from forerun.methods import METHODS, Method
from forerun.sampling.params import SamplingParams

TargetOption = Annotated[
    str,
    typer.Option(help="Hub id, folder or GGUF file of the target; the embedded one by default."),
]
MaxRowsOption = Annotated[
    int, typer.Option(min=1, help="Sequences decoded at once, by each engine.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(METHODS)}. Default: what comes with the target, else pacer with a draft and its "
        "pre-verifier, sd with a draft, suffix without."
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option(help="Most tokens to generate.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option(help="1 is all.")]
PreVerifierOption = Annotated[
    Path | None, typer.Option(help="Folder of the draft's trained layer.")
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help="What the target's weights are stored as on a CPU: float32, bfloat16, int8, int4, or auto: as the "
        "checkpoint is. The model in few bits is the target then."
    ),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, ...")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the checkpoint.")
]
GuardOption = Annotated[
    bool | None,
    typer.Option(
        "--guard/--no-guard",
        help="Leave drafts out while they do not pay. On by default.",
        show_default=False,
    ),
]
PromptCacheOption = Annotated[
    Path | None,
    typer.Option(
        help="A folder of your own that keeps what was computed of texts, so that it is not computed again after a "
        "restart. It holds their tokens too."
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads to compute with.")]


@dataclass(frozen=True)
class LoadOptions:
    """How the models are loaded. Raises ValueError for bad values."""

    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft.")] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or auto. On a CPU float32 by default; bfloat16 is not exact to it."
        ),
    ] = None
    weights: WeightsOption = None
    draft_weights: Annotated[
        str | None,
        typer.Option(
            help="Likewise of the draft, for which any is lossless; int8 by default on a CPU."
        ),
    ] = None
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            help="The draft proposes N tokens only, the most frequent ones, and those of the text: faster, and as "
            "lossless. Default: as the draft's folder says. 0: all tokens."
        ),
    ] = None
    device: DeviceOption = None
    trust_remote_code: TrustOption = False
    threads: ThreadsOption = None

    def __post_init__(self) -> None:
        ModelOptions(
            **{
                each.name: vars(self)[each.name]
                for each in fields(ModelOptions)
                if each.name in vars(self)
            }
        )

    def for_load(self) -> dict[str, Any]:
        """Return the options that `forerun.load` takes as they are."""
        rest = ("threads", "method", "gamma", "method_arg", "target", "model_name")
        return {name: value for name, value in vars(self).items() if name not in rest}


@dataclass(frozen=True)
class DecodeOptions(LoadOptions):
    """The method and its trained parts."""

    method: MethodOption = None
    gamma: Annotated[
        int | None, typer.Option(help="Draft length; short for the setting gamma of --method-arg.")
    ] = None
    method_arg: Annotated[
        list[str] | None, typer.Option(help="A setting of the method, NAME=VALUE; repeatable.")
    ] = None
    pre_verifier: PreVerifierOption = None
    head: Annotated[
        Path | None, typer.Option(help="Folder of the target's head: of lyanna, eagle or EAGLE-3.")
    ] = None
    guard: GuardOption = None
    prompt_cache: PromptCacheOption = None
    prompt_cache_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of that folder.")] = (
        2**32
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_cache is not None:
            private_folder(self.prompt_cache.expanduser())

    def chosen_method(self, target: str) -> Method | None:
        """Return the method that the options name; None leaves the choice to `forerun.load`.

        Raises ValueError for bad settings, for models that do not exist, and if the method lacks a part.
        """
        settings = [
            *([f"gamma={self.gamma}"] if self.gamma is not None else []),
            *(self.method_arg or []),
        ]
        parts: dict[str, Any] = {"pre_verifier": self.pre_verifier, "head": self.head}
        found = resolve(target, self.draft, self.method, settings, **parts)
        for part, source in (("target", target), ("draft", self.draft)):
            if source is not None:
                zoo.locate(source, part)
        return found.method if self.method is not None or settings else None


@dataclass(frozen=True)
class ServingOptions(DecodeOptions):
    """The target and its memory. For `forerun serve` and `forerun batch`."""

    target: Annotated[
        str | None,
        typer.Option(
            help="Hub id, folder or GGUF file; smollm2 if it is installed, else the embedded one by default."
        ),
    ] = None
    model_name: Annotated[
        str | None, typer.Option(help="Its name in answers; the target's by default.")
    ] = None
    kv_memory: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bytes for the target's keys and values. Half of what is free by default."
        ),
    ] = None

    @property
    def model(self) -> str:
        """The target that is named, or the best one that needs no download: a name, or an absolute path."""
        return _absolute(
            self.target or (zoo.SMOLLM2 if zoo.find(zoo.SMOLLM2) is not None else zoo.EMBEDDED)
        )

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.model_name or (
            Path(self.model).name if Path(self.model).exists() else self.model
        )

    def for_load(self) -> dict[str, Any]:
        """Return the same with absolute paths, for processes in other folders."""
        options = super().for_load()
        named = "draft", "pre_verifier", "head", "prompt_cache"
        return options | {key: _absolute(options[key]) for key in named if options[key]}


def _absolute(model: str | Path) -> str:
    if model == zoo.EMBEDDED or model in zoo.MODELS:
        return str(model)
    path = Path(model).expanduser()
    return str(
        path.absolute() if path.exists() else model
    )  # not resolved: a link's target may have no suffix


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, and the form of the output."""

    temperature: TemperatureOption = 0.0
    top_k: Annotated[int, typer.Option(help="0 is all.")] = 0
    top_p: TopPOption = 1.0
    min_p: Annotated[float, typer.Option(help="0 is all.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="1 is none.")] = 1.0
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text; repeatable.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = (
        False
    )
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes sampling repeatable: the same seed, prompt and settings give the same text, by every "
            "method. Greedy decoding ignores it."
        ),
    ] = None
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="The output follows this JSON schema.")
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="The whole output matches this regular expression.")
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            help="The output follows the grammar of this file: Lark as llguidance has it, or GBNF."
        ),
    ] = None

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Return the parameters of a request. Raises ValueError for bad values."""
        forms = "json_schema", "regex", "grammar"
        values = {name: value for name, value in vars(self).items() if name not in forms}
        given = [name for name in forms if vars(self)[name] is not None]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(f'--{name}' for name in given)}: one form at a time".replace(
                    "_", "-"
                )
            )
        form = self._form(given[0]) if given else None
        values |= {"max_new_tokens": max_new_tokens, "response_format": form}
        return SamplingParams(**values)

    def _form(self, kind: str) -> dict[str, Any]:
        if kind == "regex":
            return {"type": kind, kind: self.regex}
        if self.grammar is not None:
            return {"type": kind, kind: read_text(self.grammar.expanduser())}
        text = str(self.json_schema)
        try:
            found = json.loads(
                text if text.lstrip()[:1] in ("", "{", "[") else read_text(Path(text).expanduser())
            )
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"--json-schema {text[:40]!r} is not JSON: {error}") from None
        return {"type": kind, kind: {"schema": found}}


def check_packages(command: str, extra: str, *names: str) -> None:
    """Raise ValueError for packages that a command needs and that are missing."""
    if missing := [each for each in names if find_spec(each) is None]:
        raise ValueError(
            f"{command} needs {', '.join(missing)}: pip install '.[{extra}]' in the clone"
        )


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options, whose fields typer and callers see as options of the command."""
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                parameter.replace(name=field.name, default=default, annotation=hints[field.name])
            )
    flat = Signature(parameters)

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        bound = flat.bind(*args, **options)
        bound.apply_defaults()
        values = bound.arguments
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = flat  # type: ignore[attr-defined]
    return run
