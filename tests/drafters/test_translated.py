"""Drafts with another tokenizer.

Tokens as bytes, texts translated into the draft's tokens and back, and the output of the methods.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import logits_process as hf

import forerun
from benchmarks.baselines.heuristic import Heuristic
from benchmarks.training.tokenizer import train_tokenizer
from forerun import Decoder
from forerun.backends.hot import prepare_draft
from forerun.drafters.plain import PlainDrafter
from forerun.drafters.translated import Reader, TranslatedDrafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.engine.stats import summarise
from forerun.engine.step import Drafter, Proposal
from forerun.methods import AR, METHODS, SD, Confidence, Cumulative, Hybrid, Method, Parts, method
from forerun.model.causal_lm import CausalLM
from forerun.sampling.sampler import Sampler
from forerun.text.vocabularies import Translation, Vocabulary, translate, whole
from forerun.zoo import SMOLLM2, ModelSource, find
from tests.support import toys
from tests.support.toys import (
    DRAFT,
    PROMPT,
    TARGET,
    TableLM,
    decode,
    fit,
    pieces,
    sampled,
    tiny,
    tiny_tokenizer,
    tokens_of,
)

TEXT = "the cat sat on the mat, def add(a, b): caf\u00e9 \u6771\u4eac"


def bytelevel() -> PreTrainedTokenizerFast:
    """Like the target's, but of other texts: another vocabulary with other numbers."""
    return train_tokenizer(
        ["of mice and men", "the cats and the mats", "def cat(a): pass"], vocab_size=285
    )


def lowercasing() -> PreTrainedTokenizerFast:
    tokenizer = bytelevel()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase()]
    )
    return tokenizer


def of_letters(letters: str, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    names = [*letters.replace(" ", "\u0120"), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


MAKERS = {"byte-level": bytelevel, "pieces": pieces, "lower case": lowercasing}


@cache
def translation(name: str) -> Translation:
    return translate(tiny_tokenizer(), MAKERS[name](), name)


# Tokens as bytes.


def test_tokens_are_the_bytes_that_they_stand_for() -> None:
    ours = Vocabulary(tiny_tokenizer())
    for text in (TEXT, " x\n\n  y", "\U0001f600"):
        assert ours.spell(tiny_tokenizer().encode(text)) == text.encode()
    theirs = Vocabulary(pieces())
    for text in (TEXT, "x\n  y"):
        assert theirs.spell(pieces().encode(text, add_special_tokens=False)) == b" " + text.encode()
    assert theirs.of(theirs.ids[b"\n"]) == b"\n" and theirs.ids[b"\n"] == 3 + 10
    assert [theirs.of(id) for id in (0, 2, 10**6)] == [None] * 3
    assert (theirs.end, ours.special) == (2, {"<|endoftext|>": 0})


def test_of_several_tokens_with_the_same_bytes_one_counts() -> None:
    tokenizer = pieces()
    theirs = Vocabulary(tokenizer)
    names = tokenizer.get_vocab()
    assert theirs.ids[b"a"] == names["a"] and theirs.spelled[names["<0x61>"]] == b"a"
    tokenizer.add_tokens([AddedToken("cat", normalized=False), AddedToken("  ", normalized=False)])
    assert Vocabulary(tokenizer).ids[b"cat"] == names["cat"]  # no new one
    assert Vocabulary(tokenizer).ids[b"  "] == len(names)
    both = translate(tiny_tokenizer(), tokenizer, "d")
    ours = Vocabulary(tiny_tokenizer())
    assert both.shared[ours.ids[b"a"]] == names["a"]
    assert len(set(both.shared.values())) == len(both.shared)
    assert {ours.of(id) for id in both.shared if id} <= {theirs.of(id) for id in names.values()} | {
        b"  "
    }
    assert both.shared[0] == 2 and all(
        ours.of(id) for id in both.shared if id
    )  # the ends of texts, no other special


def test_texts_in_the_middle_of_others_get_no_space() -> None:
    for maker in (bytelevel, pieces, lambda: pieces(prefix=False)):
        found = Vocabulary(maker())
        for text in (" the cat", "the cat", "\n", "\n\n the", "at", "\u6771", "  a"):
            assert found.spell(found.encode(text)) == text.encode(), (maker, text)
    low = Vocabulary(lowercasing())
    assert low.spell(low.encode(" The CAT \ufb01n")) == b" the cat fin"


@given(st.text(max_size=4), st.binary(max_size=8))
def test_what_is_cut_off_is_the_beginning_of_a_character(text: str, other: bytes) -> None:
    coded = text.encode()
    last = text[-1:].encode()
    assert whole(coded) == (coded, b"")
    for count in range(1, len(last)):
        assert whole(coded[:-count]) == (text[:-1].encode(), last[:-count])
    for each in (other, coded + b"\x80" * 5):  # bytes of no text
        head, half = whole(each)
        assert head + half == each and len(half) < 4 and (not half or half[0] >= 0xC0)


# Reading and writing.

ours = st.lists(st.integers(0, 299), max_size=24)


@given(
    tokens=ours,
    other=ours,
    cuts=st.lists(st.integers(0, 24), max_size=6),
    name=st.sampled_from(list(MAKERS)),
)
def test_what_is_read_is_the_text(
    tokens: list[int], other: list[int], cuts: list[int], name: str
) -> None:
    """Whatever was read before, of this text or of another one with the same beginning."""
    both = translation(name)
    reader = Reader(both)
    for count in cuts:
        reader.read(tokens[:count] + other[count:] if count % 2 else tokens[:count])
    is_read = reader.read(tokens)
    text = both.target.spell(tokens)
    read_text = both.draft.spell(reader.tokens)
    if text.decode(errors="ignore").encode() != text:  # it is no text
        return
    assert is_read
    if name != "lower case":
        assert read_text == text
    elif text.isascii():
        assert read_text.lower() == text.lower()


def test_each_token_is_read_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.text.vocabularies.MIN_OVERLAP", 0.0)
    target = of_letters("ab cd")
    draft = of_letters("dcba", [("a", "b"), ("ab", "c")])
    both = translate(target, draft, "d")
    assert both.shared == {0: 3, 1: 2, 3: 1, 4: 0}
    merging = translate(draft, target, "d")
    for translation, *texts in (
        (merging, ([3, 2], [0, 1]), ([3, 2, 5], [0, 1, 0, 1, 3])),  # abc is no token of the other
        (both, ([0, 1, 3], [3, 2, 1])),  # not abc: as the draft has drafted them
    ):
        reader = Reader(translation)
        for tokens, found in texts:
            assert reader.read(tokens) and reader.tokens == found


def test_special_tokens_and_halves_of_characters_are_read_where_the_draft_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forerun.text.vocabularies.MIN_OVERLAP", 0.0)
    target = tiny_tokenizer()
    letters = of_letters("the ")
    special = [0, *target.encode("the"), 0]
    half = target.encode("he \u6771")
    reader = Reader(translate(target, pieces(), "d"))
    assert reader.read(special) and reader.tokens[0] == reader.tokens[-1] == 2
    reader = Reader(translate(target, letters, "d"))
    assert reader.read(special) and reader.tokens == [0, 1, 2]
    reader = Reader(translate(target, letters, "d"))
    spell = reader.translation.draft.spell
    assert not reader.read(half[:-1]) and b"he ".startswith(spell(reader.tokens))
    assert reader.read([*half, *target.encode(" e")]) and spell(reader.tokens) == b"he  e"


# Distributions.

V = 4
ROWS = 600
FITS = 1e-4
BROKEN = 1e-6
ORDER = [2, 0, 3, 1]  # the draft's numbers of the target's tokens
NONE: LogitsProcessorList | None = None
HEAT = LogitsProcessorList([hf.TemperatureLogitsWarper(0.6), hf.TopKLogitsWarper(3)])
AGAIN = LogitsProcessorList(
    [hf.RepetitionPenaltyLogitsProcessor(1.8), hf.NoRepeatNGramLogitsProcessor(3)]
)
CASES: dict[str, tuple[Method, LogitsProcessorList | None]] = {
    "sd": (SD(3), NONE),
    "sd, top-k": (SD(3), HEAT),
    "sd, repetition": (SD(3), AGAIN),
    "cumulative": (Cumulative(0.3, 4), NONE),
    "hybrid": (Hybrid(most=6, threshold=1.5, other="sd"), NONE),
    "confidence, repetition": (Confidence(0.4, 4), AGAIN),
}


def built(chosen: Method, target: Tensor, draft: Tensor, translation: Translation | None) -> Any:
    return chosen.build(Parts(TableLM(target), TableLM(draft), translation=translation))  # type: ignore[arg-type]


def drafter_of(chosen: Method) -> TranslatedDrafter:
    """For a target of a, b, c, ab, from a draft of c, a, b, bc."""
    both = translate(of_letters("abc", [("a", "b")]), of_letters("cab", [("b", "c")]), "d")
    return built(chosen, TARGET, DRAFT, both)


def permuted(table: Tensor, order: Sequence[int]) -> Tensor:
    """The same table for a vocabulary in which token i has the number order[i]."""
    places = torch.tensor(order).argsort()
    return table[places][:, places][:, :, places]


@pytest.mark.parametrize("case", CASES)
def test_sampling_follows_the_targets_distribution(case: str) -> None:
    chosen, processors = CASES[case]
    # Those with a penalty take one row after the other.
    rows = sampled(
        lambda: drafter_of(chosen), ROWS if processors is not AGAIN else ROWS // 3, 1, processors
    )
    found = summarise([step for row in rows for step in row], 1.0)
    assert found.drafted > found.accepted > 0.2 * len(rows)
    assert fit(rows, processors=processors) > FITS


def test_a_wrong_distribution_is_seen() -> None:
    """The test above has the power to see a wrong distribution.

    Here the draft keeps the probability of tokens that the target does not have.
    """
    drafter = drafter_of(SD(3))
    own = drafter.propose

    def unnormalised(seqs: list) -> Proposal:
        proposal = own(seqs)
        for draft in proposal.drafts:
            if draft.q is not None:
                draft.q.mul_(0.5)
        return proposal

    drafter.propose = unnormalised  # type: ignore[method-assign]
    assert fit(sampled(lambda: drafter, ROWS, 1)) < BROKEN


def test_a_seed_gives_the_tokens_of_plain_decoding() -> None:
    asked = [Request(PROMPT, 12, Sampler(False), seed=3, stream=row) for row in range(40)]
    plain = [tokens_of(steps) for steps in decode(TableLM(TARGET), PlainDrafter(), asked)]
    rows = decode(TableLM(TARGET), drafter_of(SD(3)), asked)
    assert [tokens_of(steps) for steps in rows] == plain
    assert summarise([step for row in rows for step in row], 1.0).accepted > 20


# The machinery at work.


@pytest.mark.parametrize("asked", ["greedy", "sampled", "seeded"])
@pytest.mark.parametrize(
    "chosen", [SD(3), Cumulative(0.3, 5), Heuristic(3)], ids=lambda chosen: chosen.name
)
def test_the_same_draft_under_other_numbers_does_what_it_did(chosen: Method, asked: str) -> None:
    table = TARGET + toys.random_table(V, 6, 0.4)

    def run(drafter: Drafter) -> list:
        sampler = Sampler(asked == "greedy")
        seeded = asked == "seeded"
        requests = [
            Request(
                PROMPT,
                40,
                sampler,
                seed=row if seeded else None,
                generator=torch.Generator().manual_seed(row),
            )
            for row in range(12)
        ]
        rows = decode(TableLM(TARGET), drafter, requests)
        return [[(step.tokens, step.drafted, step.accepted) for step in steps] for steps in rows]

    names = {"abcd"[i]: number for i, number in enumerate(ORDER)}
    other = of_letters("".join(sorted(names, key=names.__getitem__)))
    both = translate(of_letters("abcd"), other, "d")
    assert both.shared == dict(enumerate(ORDER))
    found = run(built(chosen, TARGET, permuted(table, ORDER), both))
    assert sum(step[2] for row in found for step in row) > 20
    assert found == run(built(chosen, TARGET, table, None))


def test_the_drafts_rows_hold_what_was_read() -> None:
    draft = of_letters("b a", [("a", "b"), ("\u0120", "ab")])
    both = translate(of_letters("ab cd"), draft, "d")
    mine = toys.random_table(5, 1, 1.3)
    theirs = toys.random_table(5, 2, 1.3)
    drafter = built(Cumulative(0.3, 5), mine, theirs, both)
    table: TableLM = drafter.model
    engine = Engine(TableLM(mine), drafter, max_rows=3)  # type: ignore[arg-type]
    for row in range(30):
        engine.add(Request(PROMPT, 20 + row, Sampler(row % 8 == 0), seed=row))
    while engine.busy:
        engine.step()
        for id, own in table.rows.items():
            reader = drafter._readers[id]
            assert own == drafter._held[id] == reader.tokens[: len(own)] and len(own) < len(
                reader.tokens
            )
    assert not table.rows and not drafter._held and not drafter._readers


# Models.


@cache
def target_model() -> PreTrainedModel:
    return tiny("llama", vocab=300)


def draft_for(name: str, context: int = 256) -> PreTrainedModel:
    return tiny("gpt2", 1, vocab=len(MAKERS[name]()), context=context)


PROMPTS = ["the cat sat", "def add(a, b):\n", "caf\u00e9 \u6771\u4eac \U0001f600"]


@pytest.mark.parametrize("name", MAKERS)
def test_greedy_output_is_the_targets(name: str) -> None:
    """Greedy output is the target's for any tokens.

    Random models write what is no text: halves of characters, special tokens, words in parts.
    """
    tokenizer = tiny_tokenizer()
    plain = Decoder(target_model(), tokenizer, method=AR())
    wanted = [plain.generate(prompt, max_new_tokens=24).tokens for prompt in PROMPTS]
    for guard in (False, None) if name == "byte-level" else (False,):
        how = {"translation": translation(name), "max_rows": 2}
        decoder = Decoder(target_model(), tokenizer, draft_for(name, 64), SD(3), guard, **how)
        completions = decoder.generate(PROMPTS, max_new_tokens=24)
        assert [completion.tokens for completion in completions] == wanted
        if guard is False:
            assert sum(completion.stats.drafted for completion in completions) > 20
        seeded, also = (
            source.generate(PROMPTS, max_new_tokens=24, temperature=1.0, seed=5)
            for source in (decoder, plain)
        )
        assert [completion.tokens for completion in seeded] == [
            completion.tokens for completion in also
        ]


def test_hot_tokens_and_forced_ones_change_no_output() -> None:
    both = translation("byte-level")
    plain = Decoder(target_model(), tiny_tokenizer(), method=AR())
    draft = prepare_draft(draft_for("byte-level"), None, 40)
    decoder = Decoder(target_model(), tiny_tokenizer(), draft, SD(3), False, translation=both)
    strange = next(id for id in range(1, 300) if id not in both.shared)
    forced = LogitsProcessorList(
        [hf.SuppressTokensLogitsProcessor([id for id in range(300) if id != strange])]
    )
    for processors, heat in ((None, 0.0), (forced, 0.0), (forced, 1.0)):
        options = {
            "max_new_tokens": 8,
            "temperature": heat,
            "seed": 1,
            "logits_processor": processors,
        }
        assert (
            decoder.generate(PROMPTS[1], **options).tokens
            == plain.generate(PROMPTS[1], **options).tokens
        )


def test_the_drafts_context_may_be_short() -> None:
    """Where the draft's context is full, nothing more is drafted.

    The target's tokens may be fewer or more than the draft's.
    """
    long = "caf\u00e9 " * 8
    plain = Decoder(target_model(), tiny_tokenizer(), method=AR()).generate(long, max_new_tokens=30)
    for context in (8, 56):
        draft = draft_for("pieces", context)
        both = translation("pieces")
        found = Decoder(target_model(), tiny_tokenizer(), draft, SD(3), False, translation=both)
        assert found.generate(long, max_new_tokens=30).tokens == plain.tokens


def test_steps_without_drafts_and_other_drafts_between() -> None:
    """The guard asks for a sequence later, or now and then."""
    both = translation("byte-level")
    drafter = SD(3).build(
        Parts(CausalLM(target_model()), CausalLM(draft_for("byte-level")), translation=both)
    )
    propose = drafter.propose
    observe = drafter.observe
    is_asked = [False]
    random = Random(0)
    plainly = PlainDrafter()

    def sometimes(seqs: list) -> Proposal:
        is_asked[0] = random.random() < 0.5
        return propose(seqs) if is_asked[0] else plainly.propose(seqs)

    drafter.propose = sometimes  # type: ignore[method-assign]
    drafter.observe = lambda *given: observe(*given) if is_asked[0] else None  # type: ignore[method-assign]
    asked = [Request(tiny_tokenizer().encode(prompt), 40) for prompt in PROMPTS]
    plain = decode(CausalLM(target_model()), plainly, asked)
    found = decode(CausalLM(target_model()), drafter, asked)
    assert [tokens_of(steps) for steps in found] == [tokens_of(steps) for steps in plain]


# Loading.


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in MAKERS:
        toys.save_models(tmp_path, MAKERS[name](), **{name: draft_for(name)})
    return toys.save_models(tmp_path, target=target_model())


def test_a_draft_with_another_tokenizer_is_loaded_and_its_way_is_said(
    folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = (
        forerun.load(folders / "target", method="ar").generate(PROMPTS[0], max_new_tokens=20).tokens
    )
    with caplog.at_level(logging.WARNING, "forerun"):
        decoder = forerun.load(folders / "target", draft=folders / "byte-level")
    assert decoder.translation is not None and decoder.method.name == "sd"
    said = [record.message for record in caplog.records if "another tokenizer" in record.message]
    part = f"{decoder.translation.overlap:.0%} of a sample's tokens"
    assert len(said) == 1 and part in said[0] and "byte-level" in said[0]
    assert decoder.generate(PROMPTS[0], max_new_tokens=20).tokens == wanted
    caplog.clear()
    decoder = forerun.load(folders / "target", draft=folders / "pieces", method="cumulative")
    assert (
        decoder.translation is not None
        and decoder.generate(PROMPTS[0], max_new_tokens=20).tokens == wanted
    )
    # The target's own tokenizer changes nothing.
    caplog.clear()
    toys.save_models(folders, same=target_model())
    assert forerun.load(folders / "target", draft=folders / "same").translation is None
    assert not caplog.records


def test_errors_name_both(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {"target": folders / "target", "draft": folders / "pieces"}
    monkeypatch.setattr(
        "forerun.api.load.load_source", lambda *_, **__: pytest.fail("weights loaded")
    )
    strict = {
        name for name in METHODS if method(name).needs_draft and not method(name).any_tokenizer
    }
    assert strict == {"pacer", "ouroboros", "pacer-ouroboros"}
    assert (
        method("hybrid", other="sd").any_tokenizer
        and not method("hybrid", other="pacer").any_tokenizer
    )
    refused: list[dict[str, Any]] = [
        {"method": "hybrid", "other": "ouroboros"},
        {"method": "ouroboros"},
    ]
    for options in refused:
        toys.refuses(
            "needs a draft with the target's tokenizer.*pieces", forerun.load, **pair, **options
        )
    of_letters("thean").save_pretrained(folders / "pieces")
    toys.refuses(
        r"draft '.*pieces': its tokenizer has \d+% of the target's .*at least 50%",
        forerun.load,
        **pair,
    )


@pytest.mark.slow
def test_the_chat_model_with_the_embedded_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_HOME")  # the suite's own, in which there is none
    target = find(SMOLLM2)
    if target is None:
        pytest.skip("the chat model is not there: forerun fetch smollm2")
    prompts = [
        "def quicksort(items):\n",
        "The capital of France is",
        "import os\n\nclass Reader:\n",
    ]
    draft = ModelSource.parse("embedded", "draft").location
    decoder = forerun.load(target, draft=draft, method="sd", gamma=4, guard=False)
    completions = decoder.generate(prompts, max_new_tokens=12)
    plain = Decoder(decoder.target, decoder.tokenizer, method=AR()).generate(
        prompts, max_new_tokens=12
    )
    assert [completion.tokens for completion in completions] == [
        completion.tokens for completion in plain
    ]
    assert sum(completion.stats.accepted for completion in completions) > 3
