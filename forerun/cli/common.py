"""What several commands share: options, method settings from strings, and how tokens are shown."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.kinds import WAYS, check_kind, check_way
from forerun.methods import METHODS, Method, method, method_class, parse_value
from forerun.params import SamplingParams
from forerun.zoo import EMBEDDED, SMOLLM2, find_smollm2

# Colour of a token by where it came from. What the target chose itself stays plain.
STYLES = {
    "draft": "green",
    "lookup": "cyan",
    "phrase": "magenta",
    "window": "magenta",
    "reused": "yellow",
    "correction": "bold red",
    "bonus": "",
}

METHOD_HELP = (
    f"{', '.join(METHODS)}, or package.module:Class of your own; what `forerun tune` chose by default, else "
    "pacer-ouroboros, sd without a pre-verifier, or suffix without a draft."
)
TargetOption = Annotated[
    str, typer.Option(help="Hub id, folder or GGUF file of the target; the embedded one by default.")
]
BestTargetOption = Annotated[
    str | None,
    typer.Option(help="Hub id, folder or GGUF file; smollm2 where it is there, else the embedded one by default."),
]
ModelNameOption = Annotated[str | None, typer.Option(help="Its name in answers; the target's by default.")]
RayOption = Annotated[
    str | None, typer.Option(help="A Ray cluster: local for this machine, auto, or HOST:PORT. One engine without.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")]
SystemOption = Annotated[str | None, typer.Option(help="The system prompt; the chat template's own by default.")]
MethodOption = Annotated[str | None, typer.Option(help=METHOD_HELP)]
GammaOption = Annotated[int | None, typer.Option(help="Draft length of the method; short for --method-arg gamma=N.")]
MethodArgOption = Annotated[list[str] | None, typer.Option(help="A setting of the method, NAME=VALUE; repeatable.")]
MaxNewTokensOption = Annotated[int, typer.Option(help="Most tokens to generate.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="0 is all.")]
TopPOption = Annotated[float, typer.Option(help="1 is all.")]
MinPOption = Annotated[float, typer.Option(help="0 is all.")]
RepetitionPenaltyOption = Annotated[float, typer.Option(help="1 is none.")]
StopOption = Annotated[list[str] | None, typer.Option(help="A string that ends the text; repeatable.")]
SeedOption = Annotated[
    int | None,
    typer.Option(
        help="Makes sampling repeatable: the same seed, prompt and settings give the same text, by every "
        "method. Nothing to greedy decoding."
    ),
]
JsonSchemaOption = Annotated[str | None, typer.Option(metavar="FILE|JSON", help="The output follows this JSON schema.")]
RegexOption = Annotated[str | None, typer.Option(help="The whole output matches this regular expression.")]
GrammarOption = Annotated[
    Path | None, typer.Option(help="The output follows the grammar of this file: Lark as llguidance has it, or GBNF.")
]
DraftOption = Annotated[str | None, typer.Option(help="Hub id or folder of the draft.")]
PreVerifierOption = Annotated[Path | None, typer.Option(help="Folder of the draft's trained layer.")]
HeadOption = Annotated[Path | None, typer.Option(help="Folder of the target's head, for lyanna and eagle.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16 or auto. On a CPU float32 by default; bfloat16 is not exact to it."),
]


def _kind(value: str | None) -> str | None:
    check_kind(value)
    return value


def _way(value: str | None) -> str | None:
    check_way(value)
    return value


WeightsOption = Annotated[
    str | None,
    typer.Option(
        callback=_kind,
        help="What the target's weights are stored as on a CPU: float32, bfloat16, int8, int4, or auto: as the "
        "checkpoint is. The model in few bits is the target then.",
    ),
]
DraftWeightsOption = Annotated[
    str | None,
    typer.Option(callback=_kind, help="Likewise of the draft, for which any is lossless; int8 by default on a CPU."),
]
DraftVocabularyOption = Annotated[
    int | None,
    typer.Option(
        help="The draft proposes so many tokens only, the most frequent ones, and those of the text: faster, and as "
        "lossless. Default: as the draft's folder says. 0: all tokens."
    ),
]
DraftTokensOption = Annotated[
    str | None,
    typer.Option(
        callback=_way,
        metavar="|".join(WAYS),
        help="How a draft with another tokenizer drafts: the tokens that both have, or by text. By default what their "
        "tokens suggest, which is said.",
    ),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, ...")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the checkpoint.")]
GuardOption = Annotated[
    bool | None,
    typer.Option(
        "--guard/--no-guard",
        help="Leave drafts out while they do not pay. On by default.",
        show_default=False,
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads to compute with.")]


def parse_method(name: str, gamma: int | None = None, settings: list[str] | None = None) -> Method:
    """The method of these options. Raises ValueError."""
    method_class(name)  # whether there is one of that name
    options: dict[str, Any] = {} if gamma is None else {"gamma": gamma}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--method-arg takes NAME=VALUE, not {setting!r}")
        options[key] = parse_value(name, key, value)
    return method(name, **options)


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Of a command's options, its `locals()`, those that SamplingParams has. Raises ValueError for bad values."""
    return SamplingParams(**{name: options[name] for name in SamplingParams.__dataclass_fields__ if name in options})


# What the commands' options and `load` call by the same names.
_LOADING = (
    "draft",
    "dtype",
    "weights",
    "draft_weights",
    "draft_vocabulary",
    "draft_tokens",
    "device",
    "device_map",
    "tensor_parallel",
    "trust_remote_code",
    "guard",
    "pre_verifier",
    "head",
    "max_rows",
    "max_queue",
    "kv_memory",
)


def best_target(target: str | None) -> str:
    """What is named, or the best model that is there without a download."""
    return target or (SMOLLM2 if find_smollm2() is not None else EMBEDDED)


def shown_name(target: str, model_name: str | None) -> str:
    """What answers call a model."""
    return model_name or (Path(target).name if Path(target).exists() else target)


def needs(command: str, **extras: list[str]) -> None:
    """Raises ValueError where packages are missing, by the extra that brings them."""
    for extra, names in extras.items():
        missing = [each for each in names if find_spec(each) is None]
        if missing:
            raise ValueError(f"{command} needs {', '.join(missing)}: pip install 'forerun[{extra}]'")


def check_ray(address: str | None, **options: int | None) -> None:
    """Raises ValueError for options that are given without a cluster, and for an empty address."""
    for name, value in options.items():
        if address is None and value is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for --ray")
    if address == "":
        raise ValueError("--ray takes local, auto or HOST:PORT")


def whole(model: str | Path) -> str:
    """A model's name, or the whole name of its file or folder: others read it from another folder."""
    if model in (EMBEDDED, SMOLLM2):
        return str(model)
    path = Path(model).expanduser()
    return str(path.resolve() if path.exists() else model)


def whole_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of `load` with the whole names of files and folders."""
    return options | {key: whole(options[key]) for key in ("draft", "pre_verifier", "head") if options.get(key)}


def load_options(options: dict[str, Any]) -> dict[str, Any]:
    """Of a command's options, its `locals()`, those that `load` takes as they are."""
    return {name: options[name] for name in _LOADING if name in options}


def quiet(threads: int | None = None) -> None:
    """Keeps transformers' progress bars and warnings out of the output. Sets torch's threads."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)


LARGE = 100_000_000  # bytes of a target whose user is told of fewer bits


def hint(target: str, weights: str | None, dtype: str | None, device: str | None) -> str | None:
    """One line about what fewer bits would bring a float target on a CPU, before it is loaded; None for others."""
    import torch

    from forerun.gguf import find
    from forerun.zoo import resolve

    folder = resolve(target, "target")
    on_cpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0] == "cpu"
    if weights is not None or dtype is not None or not on_cpu or not isinstance(folder, Path) or find(folder):
        return None
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if size < LARGE:
        return None
    return (
        "forerun: the target stays in float32; --weights int8 would read about a quarter of the bytes a token "
        "(docs/results/bits.md has what that costs in loss)"
    )
