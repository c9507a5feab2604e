"""Build the tokenizer of a GGUF file from its tokens, as llama.cpp does.

transformers reads these tokens too. But it knows the pre-tokenizers of few models (for example, it
merges SmolLM2's spaces before digits in another way), and its versions differ in special tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forerun.zoo.gguf_file import GgufFile, open_gguf

# Pre-tokenizers: how a text is split before pairs are merged, by llama.cpp's names
# (`tokenizer.ggml.pre`). None stands for GPT-2's way.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2")),
    **dict.fromkeys(_DIGITS, r"\p{N}"),  # and then in GPT-2's way
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _WORDS % "{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _WORDS % ""),
    "tekken": _TEKKEN,
}
# With these pre-tokenizers a word that is a token needs no merges.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")

# ggml's types of tokens.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER = 4
UNUSED = 5

_SPACE = "\u2581"  # SentencePiece's character for a space

# The special tokens: transformers' names by those of the metadata.
_SPECIAL = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a file, with its special tokens and chat template.

    Raises:
        ValueError: the file has no tokenizer, a damaged one, or an unknown pre-tokenizer.
    """
    file = open_gguf(path)
    kind = file.value("tokenizer.ggml.model", str)
    tokens: list[str] = file.value("tokenizer.ggml.tokens", list, [])
    if kind is None or not tokens:
        raise file.error("it has no tokenizer")
    makers = {"gpt2": _byte_level, "llama": _sentence_pieces}
    if kind not in makers:
        raise file.error(f"its tokenizer is of kind {kind!r}; known are {', '.join(makers)}")
    types: list[int] = file.value("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise file.error(f"its tokenizer has {len(tokens)} tokens and {len(types)} types of them")
    ids = _special_ids(file, len(tokens))
    cut = _pre_tokenizer(file)
    begins = file.value(
        "tokenizer.ggml.add_bos_token", bool, kind == "llama" or cut in _WHOLE_WORDS
    )
    try:
        backend: Any = makers[kind](file, tokens, types)
        _add_special_tokens(backend, tokens, types)
        bos = ids["bos"]
        if begins and bos is not None:
            text = tokens[bos]
            backend.post_processor = processors.TemplateProcessing(
                f"{text} $A", f"{text} $A $B", [(text, bos)]
            )
        names = {_SPECIAL[name]: None if id is None else tokens[id] for name, id in ids.items()}
        return _wrapped(file, backend, names)
    except Exception as error:  # damaged vocabularies may raise anything
        if str(file.path) in str(error):
            raise
        reason = (str(error) or repr(error)).splitlines()[0]
        raise file.error(f"its tokenizer is damaged: {reason}") from None


def _pre_tokenizer(file: GgufFile) -> str:
    """Return llama.cpp's name of a file's pre-tokenizer."""
    return str(file.value("tokenizer.ggml.pre", str, "default"))


def _special_ids(file: GgufFile, tokens: int) -> dict[str, int | None]:
    """Return the ids of the special tokens by their names in the metadata; None for a missing one.

    Raises:
        ValueError: an id is not below the number of tokens.
    """
    ids: dict[str, int | None] = {}
    for name in _SPECIAL:
        id = file.value(f"tokenizer.ggml.{name}_token_id", int)
        if id is not None and not 0 <= id < tokens:
            raise file.error(f"tokenizer.ggml.{name}_token_id is {id}; there are {tokens} tokens")
        ids[name] = id
    return ids


def _add_special_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Add the tokens that are never split: control tokens as special ones, then the user's."""
    for chosen, is_special in (((_UNKNOWN, _CONTROL), True), ((_USER,), False)):
        added = []
        for token, type in zip(tokens, types, strict=True):
            if type in chosen:
                added.append(AddedToken(token, normalized=False, special=is_special))
        backend.add_tokens(added)


def _wrapped(
    file: GgufFile, backend: Any, special: dict[str, str | None]
) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer of a tokenizer, with its special tokens."""
    # transformers would copy the backend, which takes as long as building it.
    backend.__deepcopy__ = lambda memo: backend
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.value("tokenizer.chat_template", str),
        clean_up_tokenization_spaces=False,
        **special,
    )
    del backend.__deepcopy__
    # transformers takes a name that it is given at once for one of the hub: it asks there whether
    # a large vocabulary is Mistral's, and without network it refuses a path as a wrong name.
    tokenizer.name_or_path = str(file.path)
    return tokenizer


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return {token: id} without unused tokens, which models' own tokenizers do not have."""
    pairs = zip(tokens, types, strict=True)
    return {token: id for id, (token, type) in enumerate(pairs) if type != UNUSED}


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return a BPE tokenizer of bytes, as GPT-2 has."""
    cut = _pre_tokenizer(file)
    if cut not in _SPLITS:
        raise file.error(f"its pre-tokenizer is {cut!r}; known are {', '.join(_SPLITS)}")
    lines = file.value("tokenizer.ggml.merges", list, [])
    merges: Any = [tuple(line.split(" ", 1)) for line in lines]
    vocabulary = _vocabulary(tokens, types)
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut in _WHOLE_WORDS))
    split = _SPLITS[cut]
    steps: list[Any] = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    as_gpt2 = split is None or cut in _DIGITS
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=as_gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentence_pieces(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return SentencePiece's BPE tokenizer."""
    vocabulary = _vocabulary(tokens, types)
    merges = _best_merges(file, tokens, types, vocabulary)
    unknown = next(
        (token for token, type in zip(tokens, types, strict=True) if type == _UNKNOWN), None
    )
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    normalisers: list[Any] = [normalizers.Replace(" ", _SPACE)]
    steps: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if has_prefix:
        normalisers.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normalisers)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _best_merges(
    file: GgufFile, tokens: list[str], types: list[int], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Return the pairs in the order in which they are merged.

    The pair that makes the piece with the best score comes first.
    """
    scores = file.value("tokenizer.ggml.scores", list, [])
    merges = []
    for token, type, score in zip(tokens, types, scores, strict=True):
        for place in range(1, len(token) if type == _NORMAL else 0):
            first = token[:place]
            second = token[place:]
            if first in vocabulary and second in vocabulary:
                pair = first, second
                merges.append((-score, vocabulary[first], vocabulary[second], pair))
    return [pair for *_, pair in sorted(merges)]
