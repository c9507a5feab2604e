"""`load`: a target, perhaps a draft and trained layers, by name, as a Decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun import zoo
from forerun.api.completion import Chunk, Completion
from forerun.api.decoder import Decoder
from forerun.api.loading import load_model, load_tokenizer, translation_for
from forerun.api.options import EngineOptions, ModelOptions, split_options
from forerun.api.resolve import resolve
from forerun.backends import prepare
from forerun.backends.hot import prepare_draft
from forerun.heads.heads import HiddenDrafter
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import Method
from forerun.model.causal_lm import CausalLM
from forerun.zoo import EMBEDDED

__all__ = ["Chunk", "Completion", "Decoder", "EngineOptions", "ModelOptions", "load"]


def load(
    target: str | Path | PreTrainedModel = EMBEDDED,
    draft: str | Path | PreTrainedModel | None = None,
    *,
    method: str | Method | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    pre_verifier: str | Path | PreVerifier | None = None,
    head: str | Path | HiddenDrafter | None = None,
    models: ModelOptions | None = None,
    engine: EngineOptions | None = None,
    **options: Any,
) -> Decoder:
    """Load a target, and a draft if there is one, for decoding by `method`.

    Args:
        target: hub id, folder, GGUF file or model; "embedded" is the pair that comes with the package, "smollm2" the
            chat model that `forerun fetch` gets.
        draft: likewise; the draft that comes with forerun for a target of that name is the default.
        method: a name from `forerun.methods.METHODS`, its dataclass with settings, or "package.module:Class" and an
            instance of one's own (docs/methods.md). Default: see `forerun.api.resolve.resolve`.
        tokenizer: the target's own by default; needed for text.
        pre_verifier: the trained layer of "pacer", a folder or the layer. Default: that which comes with forerun.
        head: what "lyanna" and methods like it draft with: a folder, an EAGLE-3 head's too, or the head. Default:
            likewise.
        models, engine: how models are loaded, and how they are run.
        **options: fields of `models` and `engine`, given singly, such as weights="int8" or guard=False; and settings of
            the method, such as gamma=6.

    Raises:
        ValueError: an unknown method or setting, a model that cannot be loaded or decoded; a draft with another
            tokenizer that shares too few of the target's tokens, or for a method that cannot do with it. Tokenizers
            are compared before weights are loaded. A draft folder without one is taken at its word; embeddings of
            different sizes must then, as ever, differ by padding alone. A layer or head for other models.
    """
    models, engine, settings = split_options(options, models, engine)
    found = resolve(
        target, draft, method, settings, pre_verifier=pre_verifier, head=head, models=models
    )
    if tokenizer is None and isinstance(target, str | Path):
        tokenizer = target
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=models.trust_remote_code)
    translation = None
    if tokenizer is not None and isinstance(found.draft, str | Path):
        both = [each for each in (found.method, found.sampling_method) if each is not None]
        strict = next((f"method {each.name!r}" for each in both if not each.any_tokenizer), None)
        translation = translation_for(
            tokenizer, found.draft, strict, trust_remote_code=models.trust_remote_code
        )
    return Decoder(
        ready(target, "target", models),
        tokenizer,
        ready(found.draft, "draft", models) if found.draft is not None else None,
        found.method,
        sampling_method=found.sampling_method,
        pre_verifier=found.pre_verifier,
        head=found.head,
        costs=found.costs,
        translation=translation,
        **vars(engine),
    )


def ready(source: str | Path | PreTrainedModel, part: str, models: ModelOptions) -> CausalLM:
    """Load a model, the "target" or "draft" part of a pair, and prepare it for decoding."""
    model = load_model(
        source,
        part,
        dtype=models.dtype,
        weights=models.weights if part == "target" else models.draft_weights or "auto",
        device=models.device,
        trust_remote_code=models.trust_remote_code,
    )
    if part == "target":
        return prepare(model, models.fast)
    folder = zoo.hot_folder(source) if isinstance(source, str | Path) else None
    return prepare_draft(model, folder, models.draft_vocabulary, models.fast)
