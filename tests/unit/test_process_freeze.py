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


CYCLES = """
import collections, gc
from asyncmoe.process import freeze

class Node: ...

kept = [[index] for index in range(400_000)]
freeze()
under_way, full = collections.deque(maxlen=200), []
gc.callbacks.append(lambda phase, about: full.append(about["generation"] == 2 and phase == "stop"))
for _ in range(200_000):
    node = Node()
    node.itself = node
    under_way.append(node)
print(sum(full) > 0)
"""


def test_cycles_that_come_later_are_collected_though_much_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", CYCLES], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"]
