"""What is loaded is left out of Python's searches for garbage, and freed when it is unloaded."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.commands import run
from tests.support.toys import save_models, tiny, tiny_tokenizer

PROGRAM = """
import gc, sys, weakref
from forerun.garbage import free_garbage, leave_out_of_searches

class Part:
    pass

def cycle():
    part = Part()
    part.itself = part
    return weakref.ref(part), part

model, holder = cycle()
leave_out_of_searches()
assert not any(isinstance(there, Part) for there in gc.get_objects())
del holder
gc.collect()
assert model() is not None  # nobody looks there
later, holder = cycle()
del holder
gc.collect()
assert later() is None
free_garbage()
assert model() is None
"""


LOADING = """
import gc, json, sys
from forerun.garbage import THRESHOLD
from forerun.server.worker import loaded

decoder = loaded(json.loads(PATH), "ar", {}, 1)
assert not any(there is decoder.target for there in gc.get_objects())
assert gc.get_threshold()[0] == THRESHOLD
"""


def test_a_server_leaves_its_model_out(tmp_path: Path) -> None:
    folder = save_models(tmp_path, tiny_tokenizer(), target=tiny("llama")) / "target"
    done = run(program=LOADING.replace("PATH", repr(json.dumps(str(folder)))))
    assert done.returncode == 0, done.stderr


def test_what_is_left_out_is_freed_when_it_is_unloaded() -> None:
    done = run(program=PROGRAM)
    assert done.returncode == 0, done.stderr
