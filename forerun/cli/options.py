"""The options that several commands share, each declared once.

A command names an alias, or takes a whole dataclass of options through `grouped`.
"""

from __future__ import annotations

import json
import re
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

_UNITS = ("K", "M", "G", "T")


def byte_size(text: str | int) -> int:
    """Return the bytes that a text says, such as 1000000, 256MiB or 1.5 GB, but not 0.

    Defaults of options come as numbers. Raises typer.BadParameter.
    """
    size = byte_size_or_0(text)
    if size < 1:
        raise typer.BadParameter(f"{text!r} is less than a byte")
    return size


def byte_size_or_0(text: str | int) -> int:
    """Return the bytes that a text says, as `byte_size` does, or 0."""
    pattern = r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?"
    match = re.fullmatch(pattern, str(text).strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size, such as 1000000, 256MiB or 1.5GB")
    number, unit, binary = match.groups()
    power = _UNITS.index(unit.upper()) + 1 if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


TargetOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "Hub id, folder or GGUF file of the target model. Default: the best known model that "
            "is fetched, else the embedded one."
        )
    ),
]
MaxRowsOption = Annotated[
    int, typer.Option(min=1, help="How many sequences an engine decodes at once.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help=(
            f"Decoding method: {', '.join(METHODS)}, or package.module:Class. Default: the method "
            "that ships with the target; for other targets pacer with a draft and its "
            "pre-verifier, sd with a draft, and suffix without a draft."
        )
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option(help="Generate at most this many tokens.")]
TemperatureOption = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopPOption = Annotated[
    float,
    typer.Option(help="Sample from the smallest set of tokens with this probability; 1 is all."),
]
PreVerifierOption = Annotated[
    Path | None, typer.Option(help="Folder of the draft's pre-verifier, a trained layer.")
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "How the target's weights are stored on a CPU: float32, bfloat16, int8, int4, or auto "
            "for the format of the checkpoint. With fewer bits the rounded model is the target."
        )
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Device to compute on, for example cpu or cuda.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint contains.")
]
GuardOption = Annotated[
    bool | None,
    typer.Option(
        "--guard/--no-guard",
        help="Stop drafting while drafts do not pay. On by default.",
        show_default=False,
    ),
]
PromptCacheOption = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Private folder that keeps what was computed for texts, so that it is not computed "
            "again after a restart. The folder also holds the tokens of the texts."
        )
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads to compute with.")]

# Options that are not passed to `forerun.load` as they are.
NOT_FOR_LOAD = ("threads", "method", "gamma", "method_arg", "target", "model_name")
OUTPUT_FORMS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True)
class LoadOptions:
    """How the models are loaded. Raises ValueError for bad values."""

    draft: Annotated[
        str | None, typer.Option(help="Hub id, folder or GGUF file of the draft model.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help=(
                "float32, bfloat16, float16 or auto. Default on a CPU: float32. The output in "
                "bfloat16 may differ from that in float32."
            )
        ),
    ] = None
    weights: WeightsOption = None
    draft_weights: Annotated[
        str | None,
        typer.Option(
            help=(
                "How the draft's weights are stored on a CPU. Default: int8. Any format is "
                "lossless, because the target checks every draft."
            )
        ),
    ] = None
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            help=(
                "Let the draft propose only its N most frequent tokens and those in the text, "
                "which is faster and still lossless. Default: the list in the draft's folder, if "
                "it has one. 0: all tokens."
            )
        ),
    ] = None
    device: DeviceOption = None
    trust_remote_code: TrustOption = False
    threads: ThreadsOption = None

    def __post_init__(self) -> None:
        given = vars(self)
        names = [field.name for field in fields(ModelOptions) if field.name in given]
        ModelOptions(**{name: given[name] for name in names})  # checks the values

    def for_load(self) -> dict[str, Any]:
        """Return the options that `forerun.load` takes as they are."""
        return {name: value for name, value in vars(self).items() if name not in NOT_FOR_LOAD}


@dataclass(frozen=True)
class DecodeOptions(LoadOptions):
    """The method and its trained parts."""

    method: MethodOption = None
    gamma: Annotated[
        int | None, typer.Option(help="Length of drafts; short for --method-arg gamma=N.")
    ] = None
    method_arg: Annotated[
        list[str] | None,
        typer.Option(help="A setting of the method, as NAME=VALUE. May be repeated."),
    ] = None
    pre_verifier: PreVerifierOption = None
    head: Annotated[
        Path | None,
        typer.Option(help="Folder of the target's head, of the kind lyanna, eagle or EAGLE-3."),
    ] = None
    guard: GuardOption = None
    prompt_cache: PromptCacheOption = None
    prompt_cache_bytes: Annotated[
        int,
        typer.Option(
            parser=byte_size,
            metavar="SIZE",
            help="Most bytes that the folder of --prompt-cache may take.",
        ),
    ] = 2**32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_cache is not None:
            private_folder(self.prompt_cache.expanduser())

    def chosen_method(self, target: str) -> Method | None:
        """Return the method that the options name; None leaves the choice to `forerun.load`.

        Raises ValueError for bad settings, for models that do not exist, and if the method lacks a
        part.
        """
        settings = list(self.method_arg or [])
        if self.gamma is not None:
            settings.insert(0, f"gamma={self.gamma}")
        choice = resolve(
            target,
            self.draft,
            self.method,
            settings,
            pre_verifier=self.pre_verifier,
            head=self.head,
        )
        zoo.ModelSource.parse(target, "target").check()
        if self.draft is not None:
            zoo.ModelSource.parse(self.draft, "draft").check()
        return choice.method if self.method is not None or settings else None


@dataclass(frozen=True)
class ServingOptions(DecodeOptions):
    """The target and its memory, for `forerun serve` and `forerun batch`."""

    target: TargetOption = None
    model_name: Annotated[
        str | None,
        typer.Option(help="Name of the model in answers. Default: the name of the target."),
    ] = None
    kv_memory: Annotated[
        int | None,
        typer.Option(
            parser=byte_size,
            metavar="SIZE",
            help=(
                "Bytes for the target's keys and values, for example 2GiB. Default: half of the "
                "free memory that earlier texts leave."
            ),
        ),
    ] = None

    @property
    def model(self) -> str:
        """The target: the given one, else the best one that needs no download.

        It is a name or an absolute path.
        """
        if self.target:
            return _absolute(self.target)
        return zoo.best_fetched()

    @property
    def name(self) -> str:
        """The model's name in answers."""
        if self.model_name:
            return self.model_name
        path = Path(self.model)
        return path.name if path.exists() else self.model

    def for_load(self) -> dict[str, Any]:
        """Return the same with absolute paths, for processes in other folders."""
        options = super().for_load()
        for name in ("draft", "pre_verifier", "head", "prompt_cache"):
            if options[name]:
                options[name] = _absolute(options[name])
        return options


def _absolute(model: str | Path) -> str:
    """Return the absolute path of a file or folder; other names stay as they are.

    Links are kept, because the file that a link points to may lack the suffix .gguf.
    """
    if model == zoo.EMBEDDED or model in zoo.MODELS:
        return str(model)
    path = Path(model).expanduser()
    return str(path.absolute() if path.exists() else model)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, and the form of the output."""

    temperature: TemperatureOption = 0.0
    top_k: Annotated[
        int, typer.Option(help="Sample from this many of the likeliest tokens; 0 is all.")
    ] = 0
    top_p: TopPOption = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            help="Leave out tokens less probable than this share of the likeliest one; 0 is all."
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Penalty for tokens that are in the text already; 1 is none.")
    ] = 1.0
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text. May be repeated.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the end token.")
    ] = False
    seed: Annotated[
        int | None,
        typer.Option(
            help=(
                "Makes sampling repeatable: the same seed, prompt and settings give the same text "
                "with every method. Greedy decoding ignores it."
            )
        ),
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help="JSON schema that the output must follow."),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole output must match.")
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with a grammar that the output must follow, in llguidance's form of Lark "
                "or in GBNF."
            )
        ),
    ] = None

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Return the parameters of a request. Raises ValueError for bad values."""
        values = {name: value for name, value in vars(self).items() if name not in OUTPUT_FORMS}
        given = [name for name in OUTPUT_FORMS if vars(self)[name] is not None]
        if len(given) > 1:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{options} exclude each other: give one of them")
        form = self._form(given[0]) if given else None
        return SamplingParams(**values, max_new_tokens=max_new_tokens, response_format=form)

    def _form(self, kind: str) -> dict[str, Any]:
        """Return the form of the output, `kind` of OUTPUT_FORMS, as a `response_format`."""
        if kind == "regex":
            return {"type": kind, kind: self.regex}
        if self.grammar is not None:
            return {"type": kind, kind: read_text(self.grammar.expanduser())}
        text = str(self.json_schema)
        is_json = text.lstrip()[:1] in ("", "{", "[")
        try:
            schema = json.loads(text if is_json else read_text(Path(text).expanduser()))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"--json-schema {text[:40]!r} is not JSON: {error}") from None
        return {"type": kind, kind: {"schema": schema}}


def check_packages(command: str, extra: str, *names: str) -> None:
    """Raise ValueError if packages that a command needs are missing.

    Args:
        command: what needs the packages.
        extra: the extra of forerun that installs them.
        *names: the packages.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{command} needs {', '.join(missing)}: "
            f"pip install '.[{extra}]' in the clone of forerun"
        )


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options.

    typer and callers see the fields of the dataclasses as options of the command.
    """
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
