"""Settings of the whole suite.

Each process computes in one thread, Hypothesis draws the same examples in every run, and nothing is
read from or written to the user's home folder.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from forerun.csrc.library import library, missing

# Python looks for garbage whenever this many objects more were made than freed. With the usual 700
# that took a third of the time of tests that make many objects.
gc.set_threshold(10_000)
_home = tempfile.TemporaryDirectory(prefix="forerun-tests-")
os.environ["FORERUN_HOME"] = _home.name
# Where this is set, each process that a test starts would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests run side by side, and what they start does too. Torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
_same_examples = {"deadline": None, "derandomize": True, "database": None}
settings.register_profile("suite", **_same_examples, max_examples=60)
settings.register_profile("fast", **_same_examples, max_examples=10)
settings.load_profile("suite")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A server with a tiny model, for the tests of a module."""
    from tests.support.serving import live

    with live(max_body=2**21) as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def known_costs() -> Iterator[None]:
    """Have no decoder measure what forwards cost: they go by a table that is known.

    Tests of measuring call `forerun.backends.costs` themselves.
    """
    if "forerun.api.build" not in sys.modules:  # nothing that was imported decodes
        yield
        return
    from tests.support.known_costs import costs_for

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.api.build.measure_costs", costs_for)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-fast`."""
    parser.addoption("--first-cases", action="store_true", help="of each test run one case alone")


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples where only the first cases are run."""
    if config.getoption("first_cases"):
        settings.load_profile("fast")


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have taken items away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what was asked for, and let slow tests run first where processes share the suite."""
    if config.getoption("first_cases"):
        keep_first_cases(items)
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the items in an order in which each worker begins with slow ones.

    Each worker gets an equal piece of the list, and a long test that starts last would leave the
    others idle. The tests of a module stay together, because its fixtures are made once.
    """
    if workers == 1:
        return items
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    slow = [tests for tests in modules.values() if any(map(is_slow, tests))]
    rest = [test for tests in modules.values() if tests not in slow for test in tests]
    pieces: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for tests in slow:
        shortest = min(pieces, key=len)
        shortest.extend(sorted(tests, key=is_slow, reverse=True))
    for number, piece in enumerate(pieces):
        room = len(items) * (number + 1) // workers - len(items) * number // workers
        more = max(room - len(piece), 0)
        piece.extend(rest[:more])
        del rest[:more]
    return [item for piece in pieces for item in piece] + rest


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test is marked `slow`."""
    return item.get_closest_marker("slow") is not None


def keep_first_cases(items: list[pytest.Item]) -> None:
    """Keep the first case of each test. Rules of style keep all files."""
    first: dict[str, pytest.Item] = {}
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name.startswith("tests/house/") or first.setdefault(name, item) is item:
            kept.append(item)
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have Python look for no garbage while tests are imported: next to nothing of it is any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have Python look for no garbage among all that was imported."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Without the C library most tests of few-bit weights would prove nothing."""
    if library() is None:
        pytest.exit(f"the C library is not in use: {missing()}", returncode=1)
