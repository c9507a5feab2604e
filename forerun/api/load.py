"""`load`: a target, perhaps a draft and trained layers, by name, as a Decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.api.choose import Choice, resolve
from forerun.api.completion import Chunk, Completion
from forerun.api.decoder import Decoder
from forerun.api.loading import LoadSettings, load_source, load_tokenizer, translation_for
from forerun.api.options import EngineOptions, ModelOptions, split_options
from forerun.backends import prepare
from forerun.backends.hot import prepare_draft
from forerun.heads.heads import HiddenDrafter
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import Method
from forerun.model.causal_lm import CausalLM
from forerun.text.vocabularies import Translation
from forerun.zoo import EMBEDDED, ModelSource

__all__ = ["Chunk", "Completion", "Decoder", "EngineOptions", "ModelOptions", "load"]


def load(  # noqa: PLR0913 - users give these by name, and each is documented here
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
        target: hub id, folder, GGUF file or model. "embedded" is the pair that ships with the
            package; "smollm2" and "qwen-coder" are models that `forerun fetch` downloads.
        draft: likewise. Default: the draft that belongs to a target of that name.
        method: a name from `forerun.methods.METHODS`, its dataclass with settings, or
            "package.module:Class" for a method of another package (docs/guide/add-a-method.md).
            Default: see `forerun.api.choose.resolve`.
        tokenizer: the target's by default; needed for text.
        pre_verifier: the trained layer of "pacer", a folder or the layer. Default: the one that
            ships with forerun.
        head: what "lyanna" and methods like it draft with: a folder, which may hold an EAGLE-3
            head, or the head. Default: the one that ships with forerun.
        models: how models are loaded.
        engine: how they are run.
        **options: fields of `models` and `engine`, given singly, such as weights="int8" or
            guard=False, and settings of the method, such as gamma=6.

    Raises:
        ValueError: an unknown method or setting; a model that cannot be loaded or decoded; a layer
            or head that was trained for other models; a draft whose tokenizer shares too few tokens
            with the target's, or differs at all where the method requires the target's.
            Tokenizers are compared before weights are loaded. A draft folder without a tokenizer is
            assumed to have the target's; embeddings of different sizes must then differ by nothing
            but padding.
    """
    models, engine, settings = split_options(options, models, engine)
    source = ModelSource.parse(target, "target")
    choice = resolve(
        source, draft, method, settings, pre_verifier=pre_verifier, head=head, models=models
    )
    if tokenizer is None and source.kind != "object":
        tokenizer = load_tokenizer(source, trust_remote_code=models.trust_remote_code)
    elif isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=models.trust_remote_code)
    translation = _translation(tokenizer, choice, models.trust_remote_code)
    return Decoder(
        ready(source, "target", models),
        tokenizer,
        ready(choice.draft, "draft", models) if choice.draft is not None else None,
        choice.method,
        sampling_method=choice.sampling_method,
        pre_verifier=choice.pre_verifier,
        head=choice.head,
        costs=choice.costs,
        translation=translation,
        **vars(engine),
    )


def _translation(
    tokenizer: PreTrainedTokenizerBase | None, choice: Choice, trust_remote_code: bool
) -> Translation | None:
    """Return how the draft drafts if its tokenizer differs from the target's, else None.

    Raises ValueError if a method requires the target's tokenizer and the draft has another one.
    """
    if tokenizer is None or choice.draft is None or choice.draft.kind == "object":
        return None
    strict = [f"method {each.name!r}" for each in choice.methods if not each.any_tokenizer]
    return translation_for(
        tokenizer,
        choice.draft,
        strict[0] if strict else None,
        trust_remote_code=trust_remote_code,
    )


def ready(
    source: str | Path | PreTrainedModel | ModelSource, part: str, models: ModelOptions
) -> CausalLM:
    """Load a model, the "target" or "draft" part of a pair, and prepare it for decoding."""
    is_target = part == "target"
    settings = LoadSettings(
        dtype=models.dtype,
        weights=models.weights if is_target else models.draft_weights or "auto",
        device=models.device,
        trust_remote_code=models.trust_remote_code,
    )
    loaded = load_source(ModelSource.parse(source, part), settings)
    if is_target:
        return prepare(loaded.model, models.fast)
    folder = None if loaded.source.kind == "object" else loaded.source.hot_folder
    return prepare_draft(loaded.model, folder, models.draft_vocabulary, models.fast)
