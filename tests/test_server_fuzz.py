"""Anything a client may send: no 5xx, and no answer that /openapi.json does not promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from serving import live, make_decoder
from toys import noisy_copy, tiny

from forerun.api.decoder import Decoder

CASES = 500  # at least
OPTIONS = (
    "-m schemathesis.cli run --phases examples,coverage,fuzzing --max-examples 40 --seed 1 --generation-deterministic "
    "--no-shrink --continue-on-failure --exclude-checks positive_data_acceptance --workers 1 --request-timeout 60 "
    "--warnings off --no-color"
)
COMMAND = [sys.executable, *OPTIONS.split()]


def short() -> Any:
    """A model whose context is short, so that no answer takes long."""
    target = tiny("llama", vocab=300, context=48)
    return Decoder(target, make_decoder().tokenizer, noisy_copy(target, 0.02), guard=False)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_nothing_that_a_client_sends_breaks_it(tmp_path: Path) -> None:
    """Schemathesis makes the same cases in each run. It also sends what the schema allows and the server refuses, such
    as token ids that there are not: that is no failure."""
    report = tmp_path / "report.json"
    with live(short) as server:
        command = [*COMMAND, f"{server.url}/openapi.json", "--report-json-path", str(report)]
        env = os.environ | {"NO_PROXY": "127.0.0.1", "COLUMNS": "200"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert not server.rows
    assert json.loads(report.read_text())["test_cases"]["generated"] >= CASES
