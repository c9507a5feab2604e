"""Runs the scripts of clients against a server, and writes what came of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.catalogue import CLIENTS, SCRIPTS, Client, environment_of, python_of

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "reference" / "server.md"
SECONDS = 600  # of a client, until it is ended
HEAD = "| client | versions | tried | failed |"


@dataclass(frozen=True)
class Try:
    """One thing that was tried with a client.

    Attributes:
        tried: what it was.
        passed: whether it worked.
        text: the answer, or what went wrong.
    """

    tried: str
    passed: bool
    text: str | None = None


@dataclass(frozen=True)
class Report:
    """What came of a client.

    Attributes:
        client: its name.
        versions: of its packages; none if it did not begin.
        tries: in order; the last one failed if the script ended before its time.
    """

    client: str
    versions: dict[str, str] = field(default_factory=dict)
    tries: tuple[Try, ...] = ()

    @property
    def failed(self) -> list[Try]:
        """The tries that failed."""
        return [each for each in self.tries if not each.passed]


def run(client: Client, folder: Path, url: str, model: str) -> Report:
    """Run the script of a client, whose environment is in a folder.

    `url` is that of the server, without /v1.
    """
    environment = environment_of(client)
    place = folder / environment.name
    script = SCRIPTS / client.script
    program = str(python_of(place))
    if environment.is_node:
        # Node looks for packages beside the script, wherever it is run.
        for module in SCRIPTS.glob("*.mjs"):
            shutil.copy(module, place)
        script = place / client.script
        program = "node"
    env = os.environ | {"NO_PROXY": "127.0.0.1"}
    env.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [program, str(script), url, model],
            capture_output=True, text=True, env=env, timeout=SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return report(client, output.decode(), f"took more than {SECONDS} seconds")
    problem = None
    if done.returncode:
        problem = f"ended with status {done.returncode}: {done.stderr[-1000:]}"
    return report(client, done.stdout, problem)


def report(client: Client, output: str, problem: str | None = None) -> Report:
    """Return the report of a script's output. `problem` says why the script ended early."""
    versions: dict[str, str] = {}
    tries = []
    for line in output.splitlines():
        told = json.loads(line) if line.startswith('{"') else {}
        versions |= told.get("versions", {})
        if "tried" in told:
            tries.append(Try(**told))
    if problem is not None or not tries:
        tries.append(Try("the script", False, problem or "told nothing"))
    return Report(client.name, versions, tuple(tries))


def missing(client: Client, problem: str) -> Report:
    """Return the report of a client that could not be installed."""
    return Report(client.name, {}, (Try("`install`", False, problem),))


def save(report: Report, facts: dict[str, str]) -> None:
    """Add a report to the results, in place of an older one of the same client.

    `facts` says against what it was run, and when.
    """
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept[report.client] = {"facts": facts} | asdict(report)
    names = [client.name for client in CLIENTS if client.name in kept]
    text = json.dumps({name: kept[name] for name in names}, indent=1, ensure_ascii=False)
    RESULTS.write_text(text + "\n")


def saved() -> list[Report]:
    """Return the reports of the results."""
    records = json.loads(RESULTS.read_text()).values()
    return [
        Report(one["client"], one["versions"], tuple(Try(**fields) for fields in one["tries"]))
        for one in records
    ]


def table(reports: list[Report]) -> list[str]:
    """Return the lines of the table."""
    return [HEAD, "|---|---|---|---|", *map(_row, reports)]


def _row(report: Report) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    tried = "; ".join(each.tried for each in report.tries)
    failed = "; ".join(each.tried for each in report.failed)
    return f"| {report.client} | {versions} | {tried} | {failed or 'none'} |"


def with_table(page: str, lines: list[str]) -> str:
    """Return a page with these lines in place of its table of clients. Raises ValueError."""
    before, head, after = page.partition(HEAD + "\n")
    if not head:
        raise ValueError(f"the page has no line {HEAD!r}")
    rest = after.splitlines(keepends=True)
    end = next((n for n, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return before + "\n".join(lines) + "\n" + "".join(rest[end:])


def write_page() -> None:
    """Write the table of the results into the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(saved())), encoding="utf-8")
