"""What a decoder holds goes with it."""

from __future__ import annotations

import json

import pytest

from tests.support import commands

PROGRAM = """
import gc, json, sys
import torch
import forerun

def alive():
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values()) / 2**20

def fail(*_, **__):
    raise RuntimeError("a criterion of the user's")

before, figures = alive(), []
for method in sys.argv[1].split(","):
    decoder = forerun.load(method=method)
    held = alive()
    prompts = ["def add(a, b):", "import os"]
    decoder.generate(prompts, max_new_tokens=12, stop=["zzz", "return 12"])
    decoder.generate(prompts, max_new_tokens=12, temperature=1.0, top_p=0.9, repetition_penalty=1.1)
    for chunk in decoder.stream(prompts, max_new_tokens=12):
        pass
    dropped = decoder.stream(prompts, max_new_tokens=100)
    next(dropped)
    del dropped
    try:
        decoder.generate(prompts, max_new_tokens=12, stopping_criteria=[fail])
    except RuntimeError:
        pass
    del decoder, chunk
    figures.append([held - before, alive() - before])
print(json.dumps(figures))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods", ["ar,sd,pacer-ouroboros", "suffix,hybrid,pacer", "lyanna,pacer-lyanna"]
)
def test_nothing_is_alive_when_a_decoder_is_gone(methods: str) -> None:
    """Finished, dropped and failed calls leave nothing behind either.

    A stream that somebody holds keeps its decoder alive.
    """
    done = commands.run(methods, program=PROGRAM)
    assert done.returncode == 0, done.stderr
    for held, left in json.loads(done.stdout):
        assert held > 60 and left < 4, f"MiB: {held} held, {left} left"
