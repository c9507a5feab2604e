"""`load`: a target, perhaps a draft and trained layers, by name, as a Decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun import methods
from forerun.api import profiles
from forerun.api.decoder import NO_DRAFT, Chunk, Completion, Decoder, kind_of
from forerun.api.loading import DeviceMap, check_split, load_model, load_tokenizer, translation_for
from forerun.backends import prepare
from forerun.backends.hot import prepare_draft
from forerun.backends.tensor_parallel import ShardedLM, check_ranks, ranks
from forerun.heads.heads import HiddenDrafter
from forerun.heads.pre_verifier import PreVerifier
from forerun.kinds import check_way
from forerun.methods import Method, Pacer
from forerun.model.causal_lm import CausalLM
from forerun.zoo import EMBEDDED, companion, own_draft, resolve

__all__ = ["Chunk", "Completion", "Decoder", "load"]


def bundled_layer(target: object, *chosen: Method | None) -> Path | None:
    """The folder of the trained layer that comes with a target and its own draft for the first of the methods that
    needs one. None where there is none."""
    needed = next((each.layer for each in chosen if each is not None and each.layer is not None), None)
    return companion(target, needed)


def load(
    target: str | Path | PreTrainedModel = EMBEDDED,
    *,
    draft: str | Path | PreTrainedModel | None = None,
    method: str | Method | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype | None = None,
    weights: str | None = None,
    draft_weights: str | None = None,
    draft_vocabulary: int | None = None,
    draft_tokens: str | None = None,
    device: str | None = None,
    device_map: DeviceMap | None = None,
    tensor_parallel: bool = False,
    trust_remote_code: bool = False,
    fast: bool = True,
    guard: bool | None = None,
    pre_verifier: str | Path | PreVerifier | None = None,
    phrases: str | Path | None = None,
    head: str | Path | HiddenDrafter | None = None,
    max_rows: int = 64,
    max_queue: int | None = None,
    kv_memory: int | None = None,
    prefix_bytes: int = 2**28,
    **options: Any,
) -> Decoder:
    """Loads a target, and a draft if there is one, for decoding by `method`.

    Args:
        target: hub id, folder, GGUF file or model; "embedded" is the pair that comes with the package, "smollm2" the
            chat model that `forerun fetch` gets.
        draft: likewise; the draft that comes with forerun for a target of that name is the default.
        method: a name from `forerun.methods.METHODS`, its dataclass with settings, or "package.module:Class" and an
            instance of one's own (docs/methods.md). Default, where no settings are given either:
            what `forerun tune` chose for these models on this device, with this dtype and number of threads, for greedy
            decoding and for sampling. Else "pacer-ouroboros" with a draft and its pre-verifier, "sd" with a draft, and
            "suffix" without; with a head that none of these has a use for, the method of its kind. Models that are
            given as objects, `device_map` and fast=False have no such profiles.
        tokenizer: the target's own by default; needed for text.
        dtype: as in transformers. Default: float32 on a CPU, what the checkpoint has elsewhere.
        weights: what the target's are stored as on a CPU: "float32", "bfloat16", "int8", "int4" (blocks of 32 with a
            scale and a least value). The model in few bits is the target then, and what is decoded is its output.
            Default, "auto": as a GGUF file has them, else by `dtype`.
        draft_weights: likewise of the draft, where any bits are lossless. Default, "auto": 8 bits on a CPU.
        draft_vocabulary: the draft gives logits to so many tokens only, the most frequent ones, and to those that stand
            in the text: faster, and as lossless. By the draft's own list of frequent tokens (`forerun train draft
            --hot`), else by their ids, in which BPE has the frequent ones first. Default: all of that list where there
            is one. 0: all tokens.
        draft_tokens: how a draft with another tokenizer drafts. "shared": the tokens that both have; "text": its text
            is cut into the target's tokens. Default, "auto": shared where half of a sample's tokens are, which it logs.
            Nothing to a draft with the target's tokenizer.
        device: default: cuda if there is one.
        device_map: instead of device, as in transformers, for target and draft; needs the package accelerate.
        tensor_parallel: instead of device: the target's weights are split among the processes that `torchrun` started,
            by transformers' own plan for its architecture. Draft and heads are whole in each of them. All of them must
            make the same calls, and each of them gets the output. Needs accelerate (docs/tensor-parallel.md).
        trust_remote_code: passed on to transformers.
        fast: False runs transformers' own forwards, without packed weights or lean copies (see forerun/runtime).
        pre_verifier: the trained layer of "pacer", a folder or the layer; those that come with forerun
            are there. Raises ValueError where it belongs to other models.
        head: what "lyanna" and others like it draft with, a folder or the head; those that come with forerun are
            there. Raises ValueError where it belongs to another model.
        phrases: a file of phrases for methods that draft by them, see `Decoder.read_phrases`.
        guard: leave drafts out while they do not pay (see forerun/methods/guard.py), unless it is False. Which steps
            those are depends on the time they take; what is sampled without a seed then does so too.
        max_rows, max_queue, kv_memory, prefix_bytes: of the engine, see `Decoder`.
        **options: the method's settings, such as gamma=6.

    Raises:
        ValueError: an unknown method or setting, a model that cannot be loaded or decoded; a draft with another
            tokenizer that has nothing in common with the target's, or for a method that cannot do with it. Tokenizers
            are compared before weights are loaded. A draft folder without one is taken at its word; embeddings of
            different sizes must then, as ever, differ by padding alone. A profile that is damaged.
    """
    check_way(draft_tokens)
    draft_weights = draft_weights or "auto"
    draft = own_draft(target) if draft is None else draft
    is_own = isinstance(draft, str) and draft == own_draft(target)
    layered = pre_verifier is not None or (is_own and bundled_layer(target, Pacer()) is not None)
    chosen = methods.method(method or methods.default_method(draft is not None, layered, options), **options)
    comes = "lyanna" if draft is None and companion(target, "lyanna") is not None else None
    own_kind = kind_of(head)
    chosen = chosen.resolve_defaults(draft is not None, layered, own_kind or comes)
    if chosen.needs_draft and draft is None:
        raise ValueError(NO_DRAFT.format(chosen.name))
    unnamed = method is None and not options
    costs, drawing = None, None
    named = [isinstance(source, str | Path) for source in (target, draft) if source is not None]
    if draft_vocabulary is not None and draft_vocabulary < 0:
        raise ValueError(f"draft_vocabulary must be at least 0, not {draft_vocabulary}")
    if tensor_parallel:
        check_ranks()
        check_split(target, "target", weights, device, device_map)  # before the ranks wait for each other
    shared = ranks() if tensor_parallel else None
    usual = fast and device_map is None and draft_vocabulary is None and shared is None
    if all(named) and usual and (unnamed or chosen.needs_costs):
        profile = profiles.find(target, draft, device, dtype, weights, draft_weights)  # type: ignore[arg-type]
        costs = profile.costs if profile is not None else None
        if profile is not None and unnamed:
            drawing = profile.sampling.build() if profile.sampling else chosen
            chosen = profile.greedy.build() if profile.greedy else chosen
            if drawing.head is not None and chosen.head is not None and drawing.head != chosen.head:
                drawing = chosen  # a decoder has one head
            tried = [each for each in (profile.greedy, profile.sampling) if each is not None]
            pre_verifier = pre_verifier or next((each.pre_verifier for each in tried if each.pre_verifier), None)
            heads = {each.build().head: each.head for each in reversed(tried) if each.head}
            head = head or heads.get(chosen.head or drawing.head)
        ours = profiles.shipped(target, draft)
        if costs is None and ours is not None:
            costs = ours.costs
        if profile is None and ours is not None and unnamed and pre_verifier is None and head is None:
            has = draft is not None, layered, comes
            chosen = (ours.choice("greedy") or chosen).resolve_defaults(*has)
            drawing = (ours.choice("sampling") or chosen).resolve_defaults(*has)
    if own_kind is not None and unnamed and all(each is None or each.head is None for each in (chosen, drawing)):
        chosen, drawing = methods.method(own_kind), None
    if pre_verifier is None and is_own:
        pre_verifier = bundled_layer(target, chosen, drawing)
    if head is None:
        head = companion(target, chosen.head or (drawing.head if drawing is not None else None))
    drafting = chosen.needs_draft or (drawing is not None and drawing.needs_draft)
    if tokenizer is None and isinstance(target, str | Path):
        tokenizer = target
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    translation = None
    if tokenizer is not None and drafting and isinstance(draft, str | Path):
        strict = next((each.name for each in (chosen, drawing) if each is not None and not each.any_tokenizer), None)
        translation = translation_for(
            tokenizer, draft, draft_tokens or "auto", strict, trust_remote_code=trust_remote_code
        )
    elif draft_tokens not in (None, "auto") and drafting:
        raise ValueError(f"draft_tokens={draft_tokens!r} needs a target and a draft that are given by name")
    how: dict[str, Any] = {"dtype": dtype, "device": device, "device_map": device_map}
    how["trust_remote_code"] = trust_remote_code

    def ready(source: str | Path | PreTrainedModel, part: str) -> CausalLM:
        if shared is not None and part == "target":
            return ShardedLM(load_model(source, part, weights=weights, tensor_parallel=True, **how), shared)
        if shared is not None:
            how["device"] = shared.device
        model = load_model(source, part, weights=weights if part == "target" else draft_weights, **how)
        # A model that nobody else holds need not survive the packing of its weights.
        with_options: dict[str, bool] = {"fast": fast, "in_place": isinstance(source, str | Path)}
        if part == "draft":
            folder = resolve(source, part) if isinstance(source, str | Path) else None
            return prepare_draft(model, folder, draft_vocabulary, **with_options)
        return prepare(model, **with_options)

    decoder = Decoder(
        ready(target, "target"),
        tokenizer,
        ready(draft, "draft") if draft is not None and drafting else None,
        chosen,
        guard,
        drawing,
        pre_verifier,
        head,
        max_rows=max_rows,
        max_queue=max_queue,
        kv_memory=kv_memory,
        prefix_bytes=prefix_bytes,
        translation=translation,
    )
    decoder.costs = costs
    if shared is not None:
        shared.sample_alike()
    if phrases is not None:
        decoder.read_phrases(phrases)
    return decoder
