"""Build the tokenizer of a GGUF file from its tokens, as llama.cpp does.

transformers reads them too, but knows the pre-tokenizers of few models (it merges SmolLM2's spaces before digits in
another way), and its versions differ in special tokens.
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

# Pre-tokenizers: how a text is split before pairs are merged, by llama.cpp's names (`tokenizer.ggml.pre`). None: as
# GPT-2 does.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2")),
    **dict.fromkeys(_DIGITS, r"\p{N}"),  # and then as GPT-2 does
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _WORDS % "{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _WORDS % ""),
    "tekken": _TEKKEN,
}
_WHOLE = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "tekken",
)  # a word that is a token needs no merges
_NORMAL, _UNKNOWN, _CONTROL, _USER, UNUSED = 1, 2, 3, 4, 5  # ggml's token types

_SPACE = "\u2581"  # SentencePiece's character for a space


def gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a file, with its special tokens and chat template.

    Raises ValueError for a file without a tokenizer, a damaged one, or an unknown pre-tokenizer.
    """
    file = open_gguf(path)
    kind = file.value("tokenizer.ggml.model", str)
    tokens: list[str] = file.value("tokenizer.ggml.tokens", list, [])
    if kind is None or not tokens:
        raise file.error("it has no tokenizer")
    makers = {"gpt2": _byte_level, "llama": _pieces}
    if kind not in makers:
        raise file.error(f"its tokenizer is of kind {kind!r}; known are {', '.join(makers)}")
    types: list[int] = file.value("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise file.error(f"its tokenizer has {len(tokens)} tokens and {len(types)} types of them")
    ids = {
        name: file.value(f"tokenizer.ggml.{name}_token_id", int)
        for name in ("bos", "eos", "unknown", "padding")
    }
    for name, token in ids.items():
        if token is not None and not 0 <= token < len(tokens):
            raise file.error(
                f"tokenizer.ggml.{name}_token_id is {token}; there are {len(tokens)} tokens"
            )
    cut = file.value("tokenizer.ggml.pre", str, "default")
    begins = file.value("tokenizer.ggml.add_bos_token", bool, kind == "llama" or cut in _WHOLE)
    try:
        backend: Any = makers[kind](file, tokens, types)
        for wanted, special in (((_UNKNOWN, _CONTROL), True), ((_USER,), False)):
            found = [token for token, type in zip(tokens, types, strict=True) if type in wanted]
            backend.add_tokens(
                [AddedToken(token, normalized=False, special=special) for token in found]
            )
        if begins and ids["bos"] is not None:
            first = tokens[ids["bos"]], ids["bos"]
            backend.post_processor = processors.TemplateProcessing(
                f"{first[0]} $A", f"{first[0]} $A $B", [first]
            )
        backend.__deepcopy__ = lambda memo: (
            backend
        )  # transformers' copy of it would take as long as building it
        names = {
            "bos": "bos_token",
            "eos": "eos_token",
            "unknown": "unk_token",
            "padding": "pad_token",
        }
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            name_or_path=str(file.path),
            chat_template=file.value("tokenizer.chat_template", str),
            clean_up_tokenization_spaces=False,
            **{
                names[name]: None if token is None else tokens[token] for name, token in ids.items()
            },
        )
        del backend.__deepcopy__
        return tokenizer
    except Exception as error:  # damaged vocabularies may raise anything
        if str(file.path) in str(error):
            raise
        raise file.error(
            f"its tokenizer is damaged: {(str(error) or repr(error)).splitlines()[0]}"
        ) from None


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return {token: id} without unused tokens, which models' own tokenizers lack."""
    return {
        token: i
        for i, (token, type) in enumerate(zip(tokens, types, strict=True))
        if type != UNUSED
    }


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    cut = file.value("tokenizer.ggml.pre", str, "default")
    if cut not in _SPLITS:
        raise file.error(f"its pre-tokenizer is {cut!r}; known are {', '.join(_SPLITS)}")
    merges: Any = [
        tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges", list, [])
    ]
    backend = Tokenizer(models.BPE(_vocabulary(tokens, types), merges, ignore_merges=cut in _WHOLE))
    split = _SPLITS[cut]
    steps: list[Any] = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    as_gpt2 = split is None or cut in _DIGITS
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=as_gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _pieces(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return SentencePiece's BPE: the pair that makes the piece with the best score is merged first."""
    scores = file.value("tokenizer.ggml.scores", list, [])
    known, merges = _vocabulary(tokens, types), []
    for token, type, score in zip(tokens, types, scores, strict=True):
        for place in range(1, len(token) if type == _NORMAL else 0):
            pair = token[:place], token[place:]
            if pair[0] in known and pair[1] in known:
                merges.append((-score, known[pair[0]], known[pair[1]], pair))
    best = [pair for *_, pair in sorted(merges)]
    unknown = next(
        (token for token, type in zip(tokens, types, strict=True) if type == _UNKNOWN), None
    )
    backend = Tokenizer(
        models.BPE(known, best, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), *spaces] if prefix else spaces
    )
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return backend
