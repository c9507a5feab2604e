"""Which clients are tried, and what each needs. It needs no package.

    python -m tests.clients.catalogue FOLDER          # makes the environments that install quickly
    python -m tests.clients.catalogue FOLDER --list   # says which of them are there

An environment is a folder, because some clients want other versions than forerun or each other.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Environment:
    """Packages of one registry that go together.

    Attributes:
        name: of its folder.
        packages: the names to install; the newest that go together are taken.
        is_quick: whether CI makes it.
    """

    name: str
    packages: tuple[str, ...]
    is_quick: bool = True

    @property
    def is_node(self) -> bool:
        """Whether npm installs it, and not pip."""
        return self.name == "node"


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        name: as the page has it.
        script: of `SCRIPTS`, which tries it.
        environment: the name of the environment that it runs in.
        package: the one that must be there.
    """

    name: str
    script: str
    environment: str
    package: str


ENVIRONMENTS = (
    Environment(
        "python",
        ("openai", "langchain", "langchain-openai", "llm", "litellm", "anthropic", "ollama"),
    ),
    Environment("older-openai", ("instructor", "llama-index-llms-openai-like")),
    Environment(
        "node", ("openai", "zod", "ai", "@ai-sdk/openai-compatible", "@continuedev/openai-adapters")
    ),
    Environment("aider", ("aider-chat",), is_quick=False),
)
CLIENTS = (
    Client("OpenAI for Python", "openai_client.py", "python", "openai"),
    Client("OpenAI for Node", "openai_client.mjs", "node", "openai"),
    Client("Anthropic for Python", "anthropic_client.py", "python", "anthropic"),
    Client("Ollama for Python", "ollama_client.py", "python", "ollama"),
    Client("LangChain", "langchain_client.py", "python", "langchain-openai"),
    Client("LlamaIndex", "llama_index_client.py", "older-openai", "llama-index-llms-openai-like"),
    Client("instructor", "instructor_client.py", "older-openai", "instructor"),
    Client("llm", "llm_client.py", "python", "llm"),
    Client("LiteLLM", "litellm_client.py", "python", "litellm"),
    Client("Vercel AI SDK", "vercel_client.mjs", "node", "@ai-sdk/openai-compatible"),
    Client("Continue", "continue_client.mjs", "node", "@continuedev/openai-adapters"),
    Client("aider", "aider_client.py", "aider", "aider-chat"),
)


def environment_of(client: Client) -> Environment:
    """Return the environment of a client."""
    return next(each for each in ENVIRONMENTS if each.name == client.environment)


def install(environment: Environment, folder: Path) -> None:
    """Make an environment in a folder of its own. Raises CalledProcessError."""
    place = folder / environment.name
    place.mkdir(parents=True, exist_ok=True)
    if environment.is_node:
        options = ("--silent", "--no-save", "--no-package-lock", "--no-audit", "--no-fund")
        command = ["npm", "install", "--prefix", str(place), *options, *environment.packages]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        command = [str(python_of(place)), "-m", "pip", "install", "--quiet", *environment.packages]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def python_of(place: Path) -> Path:
    """Return the Python of an environment."""
    return place / "bin" / "python"


def has(client: Client, folder: Path) -> bool:
    """Return whether the environment of a client is there, with its package."""
    environment = environment_of(client)
    place = folder / environment.name
    if environment.is_node:
        return (place / "node_modules" / client.package / "package.json").is_file()
    if not python_of(place).is_file():
        return False
    program = f"from importlib.metadata import version; version({client.package!r})"
    return not subprocess.run([python_of(place), "-c", program], capture_output=True).returncode


def tell(folder: Path) -> None:
    """Print which clients are there, and which are not."""
    there = [client.name for client in CLIENTS if has(client, folder)]
    absent = [client.name for client in CLIENTS if client.name not in there]
    print(f"clients: {', '.join(there) or 'none'}; NOT INSTALLED: {', '.join(absent) or 'none'}")


def main() -> None:
    """Make or list environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--list", action="store_true", help="make none, and say which are there")
    arguments = parser.parse_args()
    if arguments.list:
        tell(arguments.folder)
        return
    for environment in ENVIRONMENTS:
        if environment.is_quick:
            # One that cannot be made keeps none of the others away; `--list` tells of it.
            with suppress(OSError, subprocess.CalledProcessError):
                install(environment, arguments.folder)


if __name__ == "__main__":
    main()
