"""What is loaded is left out of Python's searches for garbage, and freed when it is unloaded."""

from __future__ import annotations

from tests.support.commands import run

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
assert model() is None and gc.get_freeze_count() > 0
gc.unfreeze()
free_garbage()
assert gc.get_freeze_count() == 0  # where nothing was left out, nothing is
"""


def test_what_is_loaded_is_left_out_until_it_is_unloaded() -> None:
    done = run(program=PROGRAM)
    assert done.returncode == 0, done.stderr
