"""Models and tokenizers by name, with one clear error for what cannot be loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
from forerun.zoo import locate
from forerun.zoo.gguf_file import find, open_gguf
from forerun.zoo.quantise import WEIGHTS, load_quantised

_LOG = logging.getLogger("forerun")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")

# Where tokenizers of equal vocabularies differ: spaces, digits, case, contractions, normal forms, rare characters.
_PROBES = (
    "The quick brown fox doesn't jump; SHE'LL say: \u201cdon't\u201d... over  two   spaces!",
    "def f(x):\n\tif x >= 10_000:\r\n        return x[3:] + 1234567.89  # ok\n\n\n",
    " cafe\u0301 caf\u00e9 Stra\u00dfe \ufb01n \u6771\u4eac\u3067\u3059 \u043c\u0438\u0440 \u2460",
    "\U0001f600\U0001f44d\U0001f3fd\u200b <b>&amp;</b> a@b.c #1 \u00a0 ",
)


def load_model(
    source: str | Path | PreTrainedModel,
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
        part: "target" or "draft": which of the pair "embedded" means, and its name in errors.
        dtype: default: float32 on a CPU, what the checkpoint has elsewhere.
        weights: what they are stored as on a CPU, in place of a dtype: one of `forerun.kinds.WEIGHT_FORMATS`. None: as
            a GGUF file has them, else by `dtype`. "auto": the same, but a draft in 8 bits.
        plain: ordinary modules, as training and transformers' own decoding need them: a GGUF file in float32.

    Raises:
        ValueError: no such folder, device or dtype; a configuration or weights that are missing, broken or do not
            belong together; weights in few bits that are not for a CPU, or whose blocks do not fit.
    """
    check_kind(weights)
    if not isinstance(source, str | Path):
        if weights not in (None, "auto"):
            raise ValueError(
                f"weights {weights!r} are for models that are loaded by name; this {part} is an object"
            )
        return source
    name, source = str(source), locate(source, part)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use device {device!r}: {first_line(error)}") from None
    if device.partition(":")[0] == "meta":
        raise ValueError("cannot use device 'meta': it computes nothing")
    auto, weights = weights == "auto", None if weights == "auto" else weights
    on_cpu = device.partition(":")[0] == "cpu"
    if weights is not None and dtype is not None:
        raise ValueError(f"give dtype or weights, not both ({dtype} and {weights})")
    file = _gguf_file(source)
    if file is not None and plain:
        weights, dtype = "float32", None
    few = weights in ("int4", "int8") or (file is not None and weights is None)
    if few and not on_cpu:
        raise ValueError(
            f"the {part} {name!r} in {weights or 'the bits of its file'} needs a CPU: there is no kernel for {device}; "
            "choose weights float32 or bfloat16"
        )
    if file is not None:
        if dtype is not None:
            raise ValueError(f"{part} {name!r} is a GGUF file: give weights, not dtype")
        model, note = load_gguf(file, weights if on_cpu else "float32")
        if note is not None:
            _LOG.warning(note)
        return (
            model
            if on_cpu
            else nn.Module.to(model, device, torch.bfloat16 if weights == "bfloat16" else None)
        )
    stored = weights if on_cpu and weights != "float32" else None
    if weights is not None:
        dtype = torch.float32 if on_cpu else weights
    elif dtype is None and auto and part == "draft" and on_cpu:
        stored = "auto"
    dtype = dtype or (torch.float32 if on_cpu else "auto")
    if isinstance(dtype, str) and dtype != "auto":
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype) or not named.is_floating_point:
            raise ValueError(
                f"unknown dtype {dtype!r}; there are float32, bfloat16, float16 and auto"
            )
        dtype = named
    small = (Path(source) / WEIGHTS).exists()
    if small:
        with loading(f"{part} {name!r}"):
            restored: Any = load_quantised(Path(source))
        return _kept(
            restored.to(device=device, dtype=torch.float32 if dtype == "auto" else dtype), stored
        )
    with loading(f"{part} {name!r}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        model, found = loaded
        context_of(model.config.get_text_config(decoder=True))  # raises for too long ones
    if found["missing_keys"]:  # transformers fills these with random numbers
        first, *rest = sorted(found["missing_keys"])
        more = f" and {len(rest)} more" if rest else ""
        raise ValueError(f"cannot load {part} {name!r}: no weights for {first}{more}")
    return _kept(model.to(device), stored)


def _kept(model: PreTrainedModel, kind: str | None) -> PreTrainedModel:
    """Return a float32 model stored as `kind`. "auto", for drafts: in 8 bits if it can be."""
    if kind != "auto":
        return model if kind is None else store(model, kind)
    if not is_as_made(model):
        return model
    try:
        return store(model, "int8")
    except ValueError:
        return model


def load_config(
    source: str | Path, part: str, *, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Load the text configuration of a hub id, folder or GGUF file. Raises ValueError for none or a broken one."""
    folder = locate(source, part)
    if (file := _gguf_file(folder)) is not None:
        return gguf_config(open_gguf(file))
    with loading(f"{part} {str(source)!r}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        config = config.get_text_config(decoder=True)
        context_of(config)  # raises for too long ones
    return config


def load_tokenizer(
    source: str | Path, part: str = "target", *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id, folder or GGUF file. Raises ValueError if it has none."""
    folder = locate(source, part)
    if (file := _gguf_file(folder)) is not None:
        return gguf_tokenizer(file)
    # Without this, transformers makes up an empty tokenizer for some configurations.
    if not _may_have_tokenizer(folder):
        raise ValueError(
            f"cannot load the tokenizer of {str(source)!r}: the folder has no tokenizer files"
        )
    with loading(f"the tokenizer of {str(source)!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    return tokenizer


def _gguf_file(source: str | Path) -> Path | None:
    return find(source) if isinstance(source, Path) else None


def _may_have_tokenizer(source: str | Path) -> bool:
    """Return False for a folder without tokenizer files. Hub ids may always have one."""
    if not isinstance(source, Path) or _gguf_file(source) is not None:
        return True
    return any(any(source.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """Return the first difference of a draft's tokenizer from the target's; None if they are equal.

    All tokens with their ids are compared, added ones too. Then the tokens of a few texts are: tokenizers of equal
    vocabularies may still merge or normalise differently. Which tokens begin, end or pad a text is not compared: only
    the target's are used.
    """
    ours, theirs = _tokens_by_id(target), _tokens_by_id(draft)
    if ours != theirs:
        first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        here, there = (
            repr(tokens[first]) if first in tokens else "missing" for tokens in (ours, theirs)
        )
        return f"token {first} is {there} there and {here} in the target's"
    for text in _PROBES:
        # Strictly by position, so that a text that is a prefix of the other differs where it ends.
        pairs = zip_longest(
            *(tokenizer.encode(text, add_special_tokens=False) for tokenizer in (target, draft))
        )
        for place, (here, there) in enumerate(pairs):
            if here != there:
                return f"of the text {text!a}, token number {place} is {there} there and {here} in the target's"
    return None


def _is_from_equal_file(target: PreTrainedTokenizerBase, draft: str | Path) -> bool:
    """Whether both tokenizers come from GGUF files that describe them alike: then the draft's need not be made."""
    ours, theirs = Path(target.name_or_path), _gguf_file(locate(draft, "draft"))
    if theirs is None or ours.suffix.lower() != ".gguf" or not ours.is_file():
        return False
    file = open_gguf(ours)
    types = file.value("tokenizer.ggml.token_type", list, [])
    used = len(types) - types.count(UNUSED)  # the user may have added some, or taken others
    return len(target) == used and file.has_tokenizer_of(open_gguf(theirs))


def translation_for(
    target: PreTrainedTokenizerBase,
    draft: str | Path,
    strict: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Translation | None:
    """Return how a draft with another tokenizer than the target's drafts; None for one with the same tokenizer.

    A folder without a tokenizer passes for one with the same. `strict`: what needs the target's tokenizer, if anything.

    Raises ValueError for a tokenizer that shares too few tokens with the target's, and one that differs if anything is
    strict, naming the first difference.
    """
    if _is_from_equal_file(target, draft) or not _may_have_tokenizer(locate(draft, "draft")):
        return None
    own = load_tokenizer(draft, "draft", trust_remote_code=trust_remote_code)
    if (found := _difference(target, own)) is None:
        return None
    if strict is not None:
        raise ValueError(
            f"{strict} needs a draft with the target's tokenizer, and that of {str(draft)!r} differs: {found}; in "
            "forerun's own engine sd, cumulative and others that draft a plain chain can do with another"
        )
    translation = translate(target, own, str(draft))
    share = f"{translation.overlap:.0%} of a sample's tokens"
    _LOG.warning(
        f"draft {str(draft)!r} has another tokenizer: it proposes tokens that both have ({share})"
    )
    return translation


def check_vocabularies(target: int, draft: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise ValueError if embeddings of these sizes differ by more than padding after the tokenizer's ids."""
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
    """Return the first line of an error's text, after its class if the text was not written to be read alone."""
    name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return name + (str(error).strip() or "no reason given").splitlines()[0]


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Raise a ValueError of one line for any error: broken files and remote code may raise anything."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"cannot load {what}: {first_line(error)}") from error
