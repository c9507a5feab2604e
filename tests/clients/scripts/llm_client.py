"""The command `llm`, with a model from extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tries

FOLDER = Path(tempfile.mkdtemp())
LLM = Path(sys.executable).with_name("llm")
MODELS = f"""\
- model_id: ours
  model_name: {tries.MODEL}
  api_base: {tries.URL}
  supports_schema: true
  supports_tools: true
- model_id: ours-plain
  model_name: {tries.MODEL}
  api_base: {tries.URL}
  completion: true
- model_id: ours-responses
  model_name: {tries.MODEL}
  api_base: {tries.URL}
  responses: true
  supports_schema: true
  supports_tools: true
"""
TOOL = '''
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "sunny"
'''


def llm(*words: str) -> str:
    env = os.environ | {"LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": tries.KEY}
    done = subprocess.run([LLM, *words], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-800:]
    return done.stdout.rstrip("\n") + done.stderr


def answer(model: str) -> str:
    asked = (
        "-m",
        model,
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        str(tries.TOKENS),
        tries.HELLO,
    )
    return tries.same(llm(*asked), llm(*asked, "--no-stream"))


def goes_on() -> None:
    assert llm("-m", "ours", "-o", "max_tokens", "8", tries.HELLO)
    assert llm("-c", "-o", "max_tokens", "8", "And again.")


def schema() -> None:
    for model in ("ours", "ours-responses"):
        person = json.loads(llm("-m", model, "--schema", json.dumps(tries.SCHEMA), tries.PERSON))
        tries.check_person(person["job"], person["age"])


def tools() -> None:
    for asked in (("-m", "ours"), ("-m", "ours-responses", "--no-stream")):
        options = ("--functions", TOOL, "--td", "-o", "temperature", "0")
        told = llm(*asked, *options, tries.WEATHER)
        assert "get_weather" in told and "sunny" in told, told


(FOLDER / "extra-openai-models.yaml").write_text(MODELS)
tries.run(
    ["llm"],
    {
        "prompts": lambda: answer("ours"),
        "`completion: true`": lambda: answer("ours-plain"),
        "`responses: true`": lambda: answer("ours-responses"),
        "`-c`": goes_on,
        "`--schema`": schema,
        "`--functions`": tools,
    },
)
