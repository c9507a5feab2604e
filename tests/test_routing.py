"""Routing by shared prefix: what moves when a replica goes, what hits, and how evenly load lies."""

from __future__ import annotations

import random
from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from forerun.scale.routing import BLOCK, BOUND, FIRST, beginning, choose, ranked

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=8, unique=True)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200), st.lists(st.integers(0, 100), max_size=40))
def test_only_the_first_whole_blocks_count(prompt, more):
    key = beginning(prompt)
    if len(prompt) >= FIRST:
        assert beginning(prompt + more) == key
    whole = len(prompt) // BLOCK * BLOCK
    if whole:
        assert beginning(prompt[:whole]) == key
        assert beginning([(prompt[0] + 1) % 2**31, *prompt[1:]]) != key


@given(NAMES, st.binary(max_size=40), st.data())
def test_a_replica_that_goes_moves_only_its_own_prompts(names, key, data):
    gone = data.draw(st.sampled_from(names))
    before = ranked(key, names)
    assert ranked(key, random.sample(names, len(names))) == before
    assert ranked(key, [name for name in names if name != gone]) == [name for name in before if name != gone]


@given(st.integers(2, 8), st.lists(st.tuples(st.binary(max_size=2), st.booleans()), max_size=200))
def test_no_replica_comes_above_the_bound(count, events):
    loads, held = {f"r{i}": 0 for i in range(count)}, []
    for key, ends in events:
        if ends and held:
            loads[held.pop(len(key) % len(held))] -= 1
            continue
        name = choose(key, loads)
        assert name is not None
        loads[name] += 1
        held.append(name)
        assert loads[name] <= ceil(BOUND * sum(loads.values()) / count)


def test_a_replica_that_is_full_is_passed_over():
    key = beginning([1, 2, 3])
    first, second = ranked(key, ["a", "b"])
    assert choose(key, {first: 0, second: 0}) == first
    assert choose(key, {first: 4, second: 0}, most=4) == second
    assert choose(key, {first: 4, second: 2}, size=3, most=4) is None
    assert choose(key, {}) is None
    assert choose(key, {first: 0, second: 0}, size=8) == first  # above any bound, so the one with least to do


def _served(replicas: int, clients: int = 32, prefixes: int = 50, requests: int = 4000) -> tuple[float, Counter]:
    """Clients that ask one question after the other, each after one of some prefixes. Return the share of the
    prefixes' tokens that the replica knew, and how many requests each replica got."""
    rng = random.Random(0)
    texts = [[rng.randrange(50_000) for _ in range(rng.randrange(64, 400))] for _ in range(prefixes)]
    loads, known = {f"r{i}": 0 for i in range(replicas)}, {f"r{i}": set() for i in range(replicas)}
    flying, got, hits, tokens = [], Counter(), 0, 0
    for _ in range(requests):
        if len(flying) == clients:
            loads[flying.pop(rng.randrange(clients))] -= 1
        which = rng.randrange(prefixes)
        name = choose(beginning(texts[which] + [rng.randrange(50_000) for _ in range(20)]), loads)
        assert name is not None
        loads[name] += 1
        flying.append(name)
        got[name] += 1
        tokens += len(texts[which])
        hits += len(texts[which]) * (which in known[name])
        known[name].add(which)
    return hits / tokens, got


def test_shared_prefixes_are_found_again_and_load_is_even():
    alone, together = _served(1), _served(4)
    assert together[0] >= 0.9 * alone[0]
    assert max(together[1].values()) <= 1.3 * together[1].total() / 4
