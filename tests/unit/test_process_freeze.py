"""What a process keeps to its end is not walked over by later garbage collections; garbage is not kept."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from asyncmoe.process import freeze

class Node: ...

gc.disable()
kept = [[index] for index in range(200_000)]
garbage = Node()
garbage.itself, known = garbage, weakref.ref(garbage)
del garbage
freeze()
print(gc.get_freeze_count() >= 200_000, len(gc.get_objects()) < 1000, known() is None)
"""


def test_later_collections_leave_out_what_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
