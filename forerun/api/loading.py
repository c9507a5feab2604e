"""Models and tokenizers from their sources, with one clear error for what cannot be loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from forerun.backends import is_as_made
from forerun.backends.gguf.model import gguf_config, load_gguf
from forerun.backends.gguf.tokenizer import UNUSED, gguf_tokenizer
from forerun.backends.stored import store
from forerun.kinds import check_kind
from forerun.model.causal_lm import context_of
from forerun.text.vocabularies import Translation, translate
from forerun.zoo import ModelSource
from forerun.zoo.gguf_file import open_gguf
from forerun.zoo.quantise import WEIGHTS, load_quantised

_LOG = logging.getLogger("forerun")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")

# Texts that tokenizers of equal vocabularies may split differently, because of spaces, digits,
# case, contractions, normal forms or rare characters.
_PROBES = (
    "The quick brown fox doesn't jump; SHE'LL say: \u201cdon't\u201d... over  two   spaces!",
    "def f(x):\n\tif x >= 10_000:\r\n        return x[3:] + 1234567.89  # ok\n\n\n",
    " cafe\u0301 caf\u00e9 Stra\u00dfe \ufb01n \u6771\u4eac\u3067\u3059 \u043c\u0438\u0440 \u2460",
    "\U0001f600\U0001f44d\U0001f3fd\u200b <b>&amp;</b> a@b.c #1 \u00a0 ",
)


@dataclass(frozen=True)
class LoadSettings:
    """How a model is loaded.

    Attributes:
        dtype: the dtype of weights. Default: float32 on a CPU, the checkpoint's elsewhere.
        weights: the format that weights are stored in on a CPU, instead of a dtype: one of
            `forerun.kinds.WEIGHT_FORMATS`. None: as a GGUF file has them, else by `dtype`. "auto":
            the same, but a draft in 8 bits.
        device: the device to load to. Default: cuda if there is one, else the CPU.
        trust_remote_code: passed on to transformers.
        plain: make ordinary modules, as training and transformers' own decoding need them; a GGUF
            file gives a model in float32.
    """

    dtype: str | torch.dtype | None = None
    weights: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    plain: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """A model with the source that it was loaded from, before it is prepared for decoding."""

    source: ModelSource
    model: PreTrainedModel


@dataclass(frozen=True)
class _Storage:
    """What a model is loaded as, after the settings were checked against the source.

    Attributes:
        device: where the model runs.
        weights: the format of a GGUF file's weights, None for the file's own.
        dtype: what a checkpoint is loaded in, a dtype or "auto".
        stored: the format that a loaded checkpoint is converted to, None for no conversion. "auto":
            8 bits if it can be.
    """

    device: str
    weights: str | None
    dtype: torch.dtype | str = "auto"
    stored: str | None = None

    @property
    def is_on_cpu(self) -> bool:
        return _is_cpu(self.device)


def load_model(
    source: str | Path | PreTrainedModel | ModelSource,
    part: str,
    *,
    dtype: str | torch.dtype | None = None,
    weights: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    plain: bool = False,
) -> PreTrainedModel:
    """Load the model of a hub id, folder or GGUF file; return a model as it is.

    Args:
        source: what the user names.
        part: "target" or "draft": which of the pair "embedded" means, and its name in errors.
        dtype: see `LoadSettings`, as for the other options.
        weights: likewise.
        device: likewise.
        trust_remote_code: likewise.
        plain: likewise.

    Raises:
        ValueError: no such folder, device or dtype; a configuration or weights that are missing,
            broken or do not belong together; weights in few bits that are not for a CPU, or whose
            blocks do not fit.
    """
    settings = LoadSettings(dtype, weights, device, trust_remote_code, plain)
    return load_source(ModelSource.parse(source, part), settings).model


def load_source(source: ModelSource, settings: LoadSettings) -> LoadedModel:
    """Load the model of a source. A model that is given as an object is returned as it is.

    Raises ValueError as `load_model` does.
    """
    check_kind(settings.weights)
    if source.kind == "object":
        if settings.weights not in (None, "auto"):
            raise ValueError(
                f"weights {settings.weights!r} are for models that are loaded by name; "
                f"this {source.role} is an object"
            )
        return LoadedModel(source, source.given)
    location = source.location
    storage = _storage(source, settings, _usable_device(settings.device))
    if source.gguf is not None:
        return LoadedModel(source, _from_gguf(source.gguf, storage))
    if isinstance(location, Path) and (location / WEIGHTS).exists():
        return LoadedModel(source, _from_quantised(source, location, storage))
    model = _from_pretrained(source, storage, settings.trust_remote_code)
    return LoadedModel(source, model)


def _is_cpu(device: str) -> bool:
    return device.partition(":")[0] == "cpu"


def _usable_device(device: str | None) -> str:
    """Return the device to load to. Raises ValueError if it cannot be used."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use device {device!r}: {first_line(error)}") from None
    if device.partition(":")[0] == "meta":
        raise ValueError("cannot use device 'meta': it computes nothing")
    return device


def _storage(source: ModelSource, settings: LoadSettings, device: str) -> _Storage:
    """Return what a source is loaded as. Raises ValueError for settings that exclude another."""
    is_auto = settings.weights == "auto"
    weights = None if is_auto else settings.weights
    dtype = settings.dtype
    if weights is not None and dtype is not None:
        raise ValueError(f"give dtype or weights, not both ({dtype} and {weights})")
    is_gguf = source.gguf is not None
    if is_gguf and settings.plain:
        weights = "float32"
        dtype = None
    has_few_bits = weights in ("int4", "int8") or (is_gguf and weights is None)
    if has_few_bits and not _is_cpu(device):
        bits = weights or "the bits of its file"
        raise ValueError(
            f"the {source.role} {source.name!r} in {bits} needs a CPU: there is no kernel for "
            f"{device}; choose weights float32 or bfloat16"
        )
    if not is_gguf:
        return _checkpoint_storage(source.role, settings, device)
    if dtype is not None:
        raise ValueError(f"{source.role} {source.name!r} is a GGUF file: give weights, not dtype")
    return _Storage(device, weights)


def _checkpoint_storage(role: str, settings: LoadSettings, device: str) -> _Storage:
    """Return what a checkpoint of transformers is loaded as."""
    is_on_cpu = _is_cpu(device)
    dtype = settings.dtype
    stored = None
    if settings.weights not in (None, "auto"):
        dtype = "float32" if is_on_cpu else settings.weights
        if is_on_cpu and settings.weights != "float32":
            stored = settings.weights
    elif settings.weights == "auto" and dtype is None and role == "draft" and is_on_cpu:
        stored = "auto"
    default: torch.dtype | str = torch.float32 if is_on_cpu else "auto"
    return _Storage(device, None, _torch_dtype(dtype or default), stored)


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    """Return the dtype of a name; "auto" is left to transformers. Raises ValueError for others."""
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    named = getattr(torch, dtype, None)
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(f"unknown dtype {dtype!r}; there are float32, bfloat16, float16 and auto")
    return named


def _from_gguf(file: Path, storage: _Storage) -> PreTrainedModel:
    if storage.is_on_cpu:
        model, note = load_gguf(file, storage.weights)
    else:
        model, note = load_gguf(file, "float32")
    if note is not None:
        _LOG.warning(note)
    if storage.is_on_cpu:
        return model
    dtype = torch.bfloat16 if storage.weights == "bfloat16" else None
    return nn.Module.to(model, storage.device, dtype)


def _from_quantised(source: ModelSource, folder: Path, storage: _Storage) -> PreTrainedModel:
    """Load a model whose weights are stored as those of the embedded pair are."""
    with loading(f"{source.role} {source.name!r}"):
        model: Any = load_quantised(folder)
    dtype = torch.float32 if storage.dtype == "auto" else storage.dtype
    return _converted(model.to(device=storage.device, dtype=dtype), storage.stored)


def _from_pretrained(
    source: ModelSource, storage: _Storage, trust_remote_code: bool
) -> PreTrainedModel:
    what = f"{source.role} {source.name!r}"
    with loading(what):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            dtype=storage.dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        model, report = loaded
        context_of(model.config.get_text_config(decoder=True))  # raises for too long ones
    if report["missing_keys"]:  # transformers fills these with random numbers
        first, *rest = sorted(report["missing_keys"])
        more = f" and {len(rest)} more" if rest else ""
        raise ValueError(f"cannot load {what}: no weights for {first}{more}")
    return _converted(model.to(storage.device), storage.stored)


def _converted(model: PreTrainedModel, stored: str | None) -> PreTrainedModel:
    """Return a float32 model stored in a format. "auto", for drafts: in 8 bits if it can be."""
    if stored is None:
        return model
    if stored != "auto":
        return store(model, stored)
    if not is_as_made(model):
        return model
    try:
        return store(model, "int8")
    except ValueError:
        return model


def load_config(
    source: str | Path | ModelSource, part: str, *, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Load the text configuration of a hub id, folder or GGUF file.

    Raises ValueError if there is none or it is broken.
    """
    parsed = ModelSource.parse(source, part)
    location = parsed.location
    if parsed.gguf is not None:
        return gguf_config(open_gguf(parsed.gguf))
    with loading(f"{part} {parsed.name!r}"):
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        config = config.get_text_config(decoder=True)
        context_of(config)  # raises for too long ones
    return config


def load_tokenizer(
    source: str | Path | ModelSource, part: str = "target", *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id, folder or GGUF file. Raises ValueError if it has none."""
    parsed = ModelSource.parse(source, part)
    location = parsed.location
    if parsed.gguf is not None:
        return gguf_tokenizer(parsed.gguf)
    # Without this check transformers makes up an empty tokenizer for some configurations.
    if not _may_have_tokenizer(parsed):
        raise ValueError(
            f"cannot load the tokenizer of {parsed.name!r}: the folder has no tokenizer files"
        )
    with loading(f"the tokenizer of {parsed.name!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            location, trust_remote_code=trust_remote_code
        )
    return tokenizer


def _may_have_tokenizer(source: ModelSource) -> bool:
    """Return False for a folder without tokenizer files. Hub ids may always have one."""
    if source.kind != "folder" or source.path is None:
        return True
    return any(any(source.path.glob(pattern)) for pattern in _TOKENIZER_FILES)


def translation_for(
    target: PreTrainedTokenizerBase,
    draft: str | Path | ModelSource,
    strict: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Translation | None:
    """Return how a draft drafts whose tokenizer differs from the target's; None if it is the same.

    A folder without a tokenizer is assumed to have the target's.

    Args:
        target: the target's tokenizer.
        draft: the draft whose tokenizer is compared.
        strict: what requires the target's tokenizer, in words, for example "method 'pacer'".
        trust_remote_code: passed on to transformers.

    Raises:
        ValueError: a tokenizer that shares too few tokens with the target's, or that differs at all
            where `strict` is given, with the first difference.
    """
    source = ModelSource.parse(draft, "draft")
    source.check()
    if _is_from_equal_file(target, source) or not _may_have_tokenizer(source):
        return None
    other = load_tokenizer(source, "draft", trust_remote_code=trust_remote_code)
    difference = _difference(target, other)
    if difference is None:
        return None
    if strict is not None:
        raise ValueError(
            f"{strict} needs a draft with the target's tokenizer, and that of {source.name!r} "
            f"differs: {difference}; in forerun's own engine sd, cumulative and others that draft "
            "a plain chain can do with another"
        )
    translation = translate(target, other, source.name)
    share = f"{translation.overlap:.0%} of a sample's tokens"
    _LOG.warning(
        f"draft {source.name!r} has another tokenizer: it proposes tokens that both have ({share})"
    )
    return translation


def _is_from_equal_file(target: PreTrainedTokenizerBase, draft: ModelSource) -> bool:
    """Return whether both tokenizers come from GGUF files that describe them alike.

    Then the draft's tokenizer need not be made.
    """
    ours = Path(target.name_or_path)
    if draft.gguf is None or ours.suffix.lower() != ".gguf" or not ours.is_file():
        return False
    file = open_gguf(ours)
    types = file.value("tokenizer.ggml.token_type", list, [])
    # The user may have added tokens to the target's tokenizer, or given another one.
    has_tokens_of_file = len(target) == len(types) - types.count(UNUSED)
    return has_tokens_of_file and file.has_tokenizer_of(open_gguf(draft.gguf))


def _difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """Return the first difference of a draft's tokenizer from the target's; None if they are equal.

    All tokens with their ids are compared, added ones too. Then a few texts are encoded by both,
    because tokenizers of equal vocabularies may still merge or normalise differently. Which tokens
    begin, end or pad a text is not compared, because only the target's are used.
    """
    ours = _tokens_by_id(target)
    theirs = _tokens_by_id(draft)
    if ours != theirs:
        first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        here = repr(ours[first]) if first in ours else "missing"
        there = repr(theirs[first]) if first in theirs else "missing"
        return f"token {first} is {there} there and {here} in the target's"
    for text in _PROBES:
        our_ids = target.encode(text, add_special_tokens=False)
        their_ids = draft.encode(text, add_special_tokens=False)
        # To the end of the longer one, so that a text that is a prefix of the other differs too.
        for place, (here, there) in enumerate(zip_longest(our_ids, their_ids)):
            if here != there:
                return (
                    f"of the text {text!a}, token number {place} is {there} there "
                    f"and {here} in the target's"
                )
    return None


def check_vocabularies(target: int, draft: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that embeddings of these sizes differ by nothing but padding after the tokenizer's ids.

    Raises ValueError if they do, and if there is no tokenizer that says what is padding.
    """
    if target == draft:
        return
    used = max(_tokens_by_id(tokenizer), default=0) + 1 if tokenizer is not None else None
    if used is None or min(target, draft) < used:
        why = "no tokenizer says that this is padding" if used is None else f"the tokenizer {used}"
        raise ValueError(
            f"the draft's vocabulary has {draft} entries, the target's {target}, and {why}"
        )


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    # Sorted, so that of two tokens with one id always the same is kept.
    return {i: token for token, i in sorted(tokenizer.get_vocab().items())}


def first_line(error: Exception) -> str:
    """Return the first line of an error's text.

    The name of its class comes first unless the text was written to be read alone.
    """
    name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return name + (str(error).strip() or "no reason given").splitlines()[0]


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Raise a ValueError of one line for any error.

    Broken files and remote code may raise anything.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"cannot load {what}: {first_line(error)}") from error
