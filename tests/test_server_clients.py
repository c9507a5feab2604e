"""Clients that people use, against a server in a process of its own: an answer, the same streamed, and an error.

LiteLLM may be in an environment of its own, OpenAI's client for Node is in node_modules; .ci/run puts them there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from serving import NAME, make_decoder, models, until
from test_server_process import health, started

CLIENTS = Path(sys.prefix) / "clients"
SCRIPTS = Path(__file__).parent / "clients"
HELLO = [{"role": "user", "content": "hello"}]
TOKENS = 6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's, with the path that clients are given."""
    folder = tmp_path_factory.mktemp("model")
    models()[0].save_pretrained(folder)
    make_decoder().tokenizer.save_pretrained(folder)
    options = ("--target", str(folder), "--method", "suffix", "--model-name", NAME, "--threads", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        with started(*options) as (_, found):
            until(lambda: health(found) == 200, 250)
            yield f"{found}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def expected(client: openai.OpenAI) -> str:
    """The answer that all clients must get."""
    asked: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": TOKENS, "temperature": 0}
    return str(client.chat.completions.create(**asked).choices[0].message.content)


class Animal(BaseModel):
    name: Literal["cat", "mat"]
    legs: Literal[2, 4]


def test_openai_gets_what_its_schema_says(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    asked: dict[str, Any] = {"model": NAME, "messages": HELLO}
    found = client.chat.completions.parse(**asked, response_format=Animal, max_tokens=400, seed=1)
    assert isinstance(found.choices[0].message.parsed, Animal) and found.choices[0].finish_reason == "stop"
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, response_format=form)
    assert caught.value.param == "response_format"


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="langchain-openai is not installed")
def test_langchain(url: str, expected: str) -> None:
    from langchain_openai import ChatOpenAI

    asked: dict[str, Any] = {"base_url": url, "api_key": "none", "model": NAME, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**asked, max_completion_tokens=TOKENS)
    answer = chat.invoke("hello")
    assert answer.content == expected and answer.usage_metadata["output_tokens"] == TOKENS
    assert answer.response_metadata["finish_reason"] == "length"
    assert "".join(chunk.content for chunk in chat.stream("hello")) == expected
    with pytest.raises(openai.BadRequestError) as caught:  # it raises those of OpenAI's client
        ChatOpenAI(**asked, max_completion_tokens=0).invoke("hello")
    assert caught.value.status_code == 400


@pytest.mark.skipif(find_spec("llm") is None, reason="llm is not installed")
def test_llm(url: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: forerun\n  model_name: {NAME}\n  api_base: {url}\n  can_stream: true\n"
    )
    import llm

    asked: dict[str, Any] = {"prompt": "hello", "key": "none", "temperature": 0}
    for stream in (False, True):
        pieces = list(llm.get_model("forerun").prompt(**asked, max_tokens=TOKENS, stream=stream))
        assert "".join(pieces) == expected
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        list(llm.get_model("forerun").prompt(**asked, max_tokens=0))


def _litellm() -> str | None:
    """A Python that has it."""
    if find_spec("litellm") is not None:
        return sys.executable
    return str(CLIENTS / "bin/python") if any(CLIENTS.glob("lib/*/site-packages/litellm")) else None


@pytest.mark.skipif(_litellm() is None, reason="litellm is not installed; .ci/run says how")
def test_litellm(url: str, expected: str) -> None:
    script(expected, _litellm(), SCRIPTS / "litellm_client.py", url, env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"})


NODE = shutil.which("node")


def _npm_openai() -> bool:
    """Whether the script would find it: node looks through the folders above."""
    asked = [str(NODE), "-e", "require.resolve('openai')"]
    return NODE is not None and not subprocess.run(asked, cwd=SCRIPTS, capture_output=True).returncode


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.skipif(not _npm_openai(), reason="npm's openai is not installed; .ci/run says how")
def test_node(url: str, expected: str) -> None:
    script(expected, NODE, SCRIPTS / "node_client.cjs", url, env={})


def script(expected: str, program: str | None, path: Path, url: str, env: dict[str, str]) -> None:
    """Run a client, and check the answers that it prints."""
    assert program is not None
    command = [program, str(path), url, NAME]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["answer"] == found["streamed"] == expected and found["reason"] == "length"
    assert found["error"]["status"] == 400 and "max_tokens" in found["error"]["message"]
