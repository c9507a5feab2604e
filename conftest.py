"""Settings of the whole suite.

Each process computes in one thread, Hypothesis draws the same examples in every run, and nothing is
read from or written to the user's home folder.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-fast`."""
    parser.addoption("--first-cases", action="store_true", help="of each test run one case alone")


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples where only the first cases are run."""
    if config.getoption("first_cases"):
        settings.load_profile("fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first case of each test, if that was asked for. Rules of style keep all files."""
    if not config.getoption("first_cases"):
        return
    first: dict[str, pytest.Item] = {}
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name.startswith("tests/house/") or first.setdefault(name, item) is item:
            kept.append(item)
    items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have Python look for no garbage among all that was imported."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Without the C library most tests of few-bit weights would prove nothing."""
    if library() is None:
        pytest.exit(f"the C library is not in use: {missing()}", returncode=1)
