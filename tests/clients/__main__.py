"""Tries clients against a server, and writes the table of docs/reference/server.md.

    python -m tests.clients --environments FOLDER --target qwen-coder

Environments that are missing are made in the folder, with the newest packages. `--url` takes a
server that runs already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from time import sleep

import httpx

from tests.clients import catalogue, matrix
from tests.clients.catalogue import CLIENTS, Client
from tests.support.processes import health, started

READY_SECONDS = 120


def main() -> None:
    """Run the matrix; the status is 1 if anything failed."""
    arguments = parsed()
    clients = [each for each in CLIENTS if arguments.only in (None, each.name)]
    problems = made(clients, arguments.environments)
    are_good = True
    with server(arguments.url, arguments.target) as url:
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        for client in clients:
            problem = problems.get(client.environment)
            if problem is None:
                report = matrix.run(client, arguments.environments, url, model)
            else:
                report = matrix.missing(client, problem)
            tell(report)
            matrix.save(report, {"model": model, "date": date.today().isoformat()})
            are_good = are_good and not report.failed
    matrix.write_page()
    sys.exit(not are_good)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, required=True, help="their folder")
    parser.add_argument("--target", default="smollm2", help="the model of a server of our own")
    parser.add_argument("--url", help="a server that runs already, without /v1")
    parser.add_argument("--only", choices=[client.name for client in CLIENTS])
    return parser.parse_args()


def made(clients: list[Client], folder: Path) -> dict[str, str]:
    """Make the environments that are missing, and return why some could not be made."""
    problems = {}
    for client in clients:
        environment = catalogue.environment_of(client)
        if catalogue.has(client, folder) or environment.name in problems:
            continue
        try:
            catalogue.install(environment, folder)
        except (OSError, subprocess.CalledProcessError) as error:
            problems[environment.name] = str(error)
    return problems


@contextmanager
def server(url: str | None, target: str) -> Iterator[str]:
    """Yield the URL of a server, which ends afterwards if it is our own."""
    if url is not None:
        yield url.rstrip("/")
        return
    with started("--target", target, "--log-level", "warning") as (process, local_url):
        for _ in range(READY_SECONDS):
            if process.poll() is not None or health(local_url) == 200:
                break
            sleep(1)
        yield local_url


def tell(report: matrix.Report) -> None:
    """Print what came of a client."""
    print(f"{report.client}: {len(report.tries)} tried, {len(report.failed)} failed", flush=True)
    for each in report.failed:
        print(f"  {each.tried}: {each.text}", flush=True)


if __name__ == "__main__":
    main()
