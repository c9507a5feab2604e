"""Hidden states of long texts: only those that a head can need are kept, in memory and on disk."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.api.decoder import Decoder
from forerun.backends import prepare
from forerun.backends.heads import HiddenLM
from forerun.backends.identity import identity
from forerun.drafters.lyanna import LyannaDrafter
from forerun.engine.engine import Engine
from forerun.engine.recent_states import STATE_BLOCK, RecentStates, first_kept
from forerun.engine.sequence import Request
from forerun.heads.heads import HiddenDrafter
from forerun.methods import Lyanna, method
from forerun.model.causal_lm import CausalLM
from forerun.model.prefix_store import PrefixStore, Text
from forerun.model.prompt_folder import PromptFolder
from forerun.model.segments import SEGMENT_LENGTH
from tests.support import families
from tests.support.shelves import random_text
from tests.support.toys import parts_of, random_head, tiny

LONG: dict[str, Any] = {"max_position_embeddings": 4096}
WIDTH = 64  # of hidden states
READS = 40
MOST = READS + STATE_BLOCK - 1  # states that are kept for a head


def model(prefix_bytes: int = 2**24) -> CausalLM:
    return prepare(families.tiny("llama", **LONG)).fresh(prefix_bytes)


def in_folder(target: CausalLM, path: Path) -> CausalLM:
    """The model after a start of its process, without a prefix store."""
    fresh = target.fresh()
    digest = identity(target)
    assert digest is not None
    fresh.keep_in(PromptFolder(path, 2**30), digest)
    return fresh


def run(target: CausalLM, text: list[int], reads: int | None = READS, chunk: int = 512) -> int:
    """Read a prompt; return the number of tokens that were run."""
    return sum(target.prefill(text, chunk, capture="head", reads=reads))


def hidden_of(target: CausalLM) -> torch.Tensor:
    hidden = target.prompt_hidden
    assert hidden is not None
    return hidden


def all_states(text: list[int]) -> torch.Tensor:
    whole = model(0)
    run(whole, text, None)
    return hidden_of(whole)


# The window.


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "skip", "crop"]), st.integers(0, 700)), max_size=12
    ),
    st.sampled_from([None, 0, 1, READS, 300]),
    st.integers(0, 900),
)
def test_the_states_are_those_of_the_last_positions(
    changes: list[tuple[str, int]], reads: int | None, begin: int
) -> None:
    """Each state is its position, beside a list of all positions with states since the last gap."""

    def states(start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, dtype=torch.float32)[:, None]

    recent = RecentStates(reads, begin, states(begin // 2, begin))
    known = list(range(max(begin // 2, first_kept(begin, reads)), begin))
    end = begin
    for change, count in changes:
        if change == "append":
            recent.append(states(end, end + count))
            known += range(end, end + count)
            end += count
        elif change == "skip":
            recent.skip(count)
            known = [] if count else known
            end += count
        else:
            recent.crop(max(0, end - count))
            end = max(0, end - count)
        if change != "crop":
            known = [position for position in known if position >= first_kept(end, reads)]
        known = [position for position in known if position < end]
        joined = recent.joined()
        kept = [] if joined is None else joined[:, 0].int().tolist()
        assert kept == known and len(recent) == len(known) and recent.end == end
        assert recent.start == end - len(known)
        assert reads is None or len(recent) < reads + STATE_BLOCK


def test_a_window_holds_what_is_read_and_begins_with_a_block() -> None:
    assert STATE_BLOCK == SEGMENT_LENGTH
    for length in range(0, 1200, 7):
        first = first_kept(length, READS)
        assert first % STATE_BLOCK == 0
        assert min(READS, length) <= length - first <= MOST
    assert first_kept(10**6, None) == 0


# Prompts.


@pytest.mark.parametrize("chunk", [7, 100, 512, 2048])
def test_a_prompt_keeps_its_last_states(chunk: int) -> None:
    text = random_text(1500)
    target = model()
    assert run(target, text, READS, chunk) == 1500
    hidden = hidden_of(target)
    assert READS <= len(hidden) <= MOST
    assert torch.equal(hidden, all_states(text)[-len(hidden) :])
    assert target.prompts.store is not None
    (entry,) = target.prompts.store._entries
    assert entry.text.hidden is not None and torch.equal(entry.text.hidden, hidden)


def test_transformers_own_forward_keeps_them_too() -> None:
    text = random_text(600)
    target = CausalLM(tiny("llama", context=1024))
    run(target, text, READS)
    kept = hidden_of(target)
    target.forget_prompt()
    run(target, text, None)
    assert len(kept) == 600 - 512
    torch.testing.assert_close(kept, hidden_of(target)[512:], atol=1e-4, rtol=1e-4)


def test_a_longer_text_goes_on_with_them() -> None:
    text = random_text(1500)
    target = model()
    wanted = all_states(text)
    run(target, text[:1000])
    for is_forgotten in (False, True):
        if is_forgotten:
            target.forget_prompt()  # the store has the prompt
        assert run(target, text[:1010]) == 10 * (not is_forgotten)
        assert torch.equal(hidden_of(target), wanted[768:1010])
    assert run(target, text) == 490
    assert torch.equal(hidden_of(target), wanted[1280:1500])


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_match_inside_a_text_has_fewer_states(is_forgotten: bool) -> None:
    """Its keys and values are used all the same."""
    text = random_text(1500)
    target = model()
    run(target, text)
    wanted = all_states([*text[:600], 1, 2, 3])
    if is_forgotten:
        target.forget_prompt()
    assert run(target, [*text[:600], 1, 2, 3]) == 3
    assert torch.equal(hidden_of(target), wanted[600:])
    if is_forgotten:
        target.forget_prompt()
    assert run(target, text[:600]) == 0 and hidden_of(target).shape == (0, WIDTH)
    if is_forgotten:
        target.forget_prompt()
    assert run(target, [*text[:1450], 5]) == 1


def test_whoever_wants_all_states_gets_all() -> None:
    text = random_text(600)
    target = model()
    run(target, text)
    assert run(target, text, None) == 600 and len(hidden_of(target)) == 600
    target.forget_prompt()
    assert run(target, text, None) == 0 and len(hidden_of(target)) == 600
    assert run(target, text) == 0 and len(hidden_of(target)) == 600 - 512


def test_of_two_texts_that_match_the_one_with_more_states_is_taken() -> None:
    store = PrefixStore(10_000)
    stored: Any = [(torch.zeros(1, 6, 2), torch.zeros(1, 6, 2))]
    for last, count in ((1, 2), (2, 5), (3, 3)):
        store.put(Text([7, 7, 7, 7, last, 9], torch.ones(count, 4)), stored)
    best = store.find([7, 7, 7, 7, 8], capture="head", reads=READS)
    assert best is not None and best[1] == 4 and best[0].tokens[4] == 2
    states = best[0].states_before(4)
    assert states is not None and len(states) == 3
    assert store.find([7, 7, 7, 7, 8], capture="head") is None  # no text has all states


def states_bytes() -> dict[int, int]:
    """Return the bytes of the memory behind the tensors [n, WIDTH], by address.

    Objects that were frozen before do not count, so that a look takes little time.
    """
    gc.collect()
    storages = [
        each.untyped_storage()
        for each in gc.get_objects()
        if type(each) is torch.Tensor and each.ndim == 2 and each.shape[1] == WIDTH
    ]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lyanna", "hybrid"])
def test_states_of_a_long_prompt_take_little_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is read, while its answer is decoded, and when it is saved."""
    monkeypatch.setattr(HiddenDrafter, "reads", READS)
    target = families.tiny("llama", **LONG)
    parts = parts_of("lyanna", target, None)
    settings = {"other": "lyanna"} if name == "hybrid" else {}
    decoder = Decoder(
        target, None, None, method(name, **settings), guard=False, prefix_bytes=2**26, **parts
    )
    engine = decoder.engine
    engine.add(Request(random_text(3000), 300))
    largest = steps = 0
    gc.collect()
    gc.freeze()  # for good, as what was imported
    while engine.busy:
        engine.step()
        steps += 1
        if steps <= 5 or steps % 20 == 0 or not engine.busy:  # because looking takes long
            largest = max(largest, sum(states_bytes().values()))
    kept = 4 * WIDTH * MOST
    # Those of the prompt, of the sequence, of its saved copy, of the head, and of steps.
    assert 4 * WIDTH * READS < largest < 5 * kept < 4 * WIDTH * 3000
    for entry in engine.target.prompts.store._entries:
        assert entry.text.hidden is not None and READS <= len(entry.text.hidden) <= MOST


@pytest.mark.slow
def test_a_sequence_keeps_its_last_states() -> None:
    """However long its output is."""
    target = model()
    head = HiddenLM(random_head(target), target)
    head.reads = READS
    engine = Engine(target, LyannaDrafter(Lyanna(2), head))
    engine.add(Request(random_text(500), 900))
    lengths = set[int]()
    while engine.busy:
        engine.step()
        lengths |= {len(seq.features) for seq in engine.running if seq.features is not None}
    assert min(lengths) >= READS and max(lengths) <= MOST
    assert target.prompts.store is not None
    (entry,) = target.prompts.store._entries
    assert len(entry.tokens) == 1399 and entry.text.hidden is not None
    wanted = all_states(entry.tokens.tolist())
    assert torch.equal(entry.text.hidden, wanted[-len(entry.text.hidden) :])


# Texts on disk.


def test_files_have_the_states_of_the_last_segments(tmp_path: Path) -> None:
    text = random_text(1500)
    first = in_folder(model(), tmp_path)
    run(first, text)
    first.join(1)
    first.save_prefix(1, text, hidden_of(first), "", "head")
    shelf = first.prompts.shelf
    assert shelf is not None and shelf.folder.wait(60)
    names = [path.name for path in tmp_path.glob("*/*.safetensors")]
    assert sum("keys-values" in name for name in names) == 6
    assert sum("hidden" in name for name in names) == 1
    wanted = all_states([*text, 1])
    again = in_folder(model(), tmp_path)
    assert run(again, [*text, 1]) == 1
    assert torch.equal(hidden_of(again), wanted[1280:])
    again = in_folder(model(), tmp_path)
    assert run(again, [*text[:600], 1]) == 1  # inside it
    assert torch.equal(hidden_of(again), all_states([*text[:600], 1])[600:])
    again = in_folder(model(), tmp_path)
    assert run(again, text, None) == 1500  # all states are wanted, which nobody has


def test_a_folder_with_all_states_is_read(tmp_path: Path) -> None:
    """As former versions have written them."""
    text = random_text(1500)
    first = in_folder(model(), tmp_path)
    run(first, text, None)
    shelf = first.prompts.shelf
    assert shelf is not None and shelf.folder.wait(60)
    again = in_folder(model(), tmp_path)
    assert run(again, [*text[:1000], 1]) == 1
    assert torch.equal(hidden_of(again), all_states([*text[:1000], 1])[768:])


def test_states_of_a_segment_that_went_on_are_found(tmp_path: Path) -> None:
    """Its keys and values are in the file of the longer segment, its states in a file of theirs."""
    text = random_text(1500)
    first = in_folder(model(), tmp_path)
    for end in (900, 1500):
        run(first, text[:end])
        first.join(1)
        first.save_prefix(1, text[:end], hidden_of(first), "", "head")
        first.drop(1)
        shelf = first.prompts.shelf
        assert shelf is not None and shelf.folder.wait(60)
    again = in_folder(model(), tmp_path)
    assert run(again, [*text[:900], 3]) == 1
    assert torch.equal(hidden_of(again), all_states([*text[:900], 3])[768:])


@pytest.mark.parametrize("name", ["lyanna", "eagle"])
def test_follow_ups_draft_as_if_nothing_had_been_forgotten(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory and from disk. A prompt that is found inside a text has the same output."""
    monkeypatch.setattr(HiddenDrafter, "reads", READS)
    target = families.tiny("llama", **LONG)
    parts = parts_of(name, target, None)

    def new_decoder(**options: Any) -> Decoder:
        return Decoder(target, None, None, method(name), guard=False, **parts, **options)

    def answer(decoder: Decoder, prompt: list[int]) -> tuple[list[int], float]:
        done = decoder.generate([prompt], max_new_tokens=40, ignore_eos=True)[0]
        return done.tokens, done.stats.tau

    text = random_text(1000)
    kept = new_decoder(prompt_cache=tmp_path, prefix_bytes=2**26)
    first, _ = answer(kept, text)
    follow_up = [*text, *first, 9, 9, 9]
    wanted = answer(new_decoder(prefix_bytes=0), follow_up)
    assert answer(kept, follow_up) == wanted
    shelf = kept.engine.target.prompts.shelf
    assert shelf is not None and shelf.folder.wait(60)
    again = new_decoder(prompt_cache=tmp_path, prefix_bytes=0)
    assert answer(again, follow_up) == wanted
    assert again.engine.target.prefilled < 16
    inside = [*text[:500], 4, 4]
    assert answer(kept, inside)[0] == answer(new_decoder(prefix_bytes=0), inside)[0]
