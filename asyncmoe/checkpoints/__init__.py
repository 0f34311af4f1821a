"""Checkpoints of a run: their directories, manifests, facts, and their copies in a second place.

- `directories`: written under a temporary name, renamed when complete; deletion.
- `retention`: which ones stay, and where the recorded window begins.
- `manifest`: size and digest of every file.
- `facts_file`: a checkpoint's facts about the run that wrote it, and the checks before a resume.
- `intact`: the newest undamaged checkpoint.
"""

from __future__ import annotations

from asyncmoe.checkpoints.directories import directory, finish, give_up, newest, set_aside, start, temporary
from asyncmoe.checkpoints.facts_file import facts, kind_faults
from asyncmoe.checkpoints.intact import survey
from asyncmoe.checkpoints.retention import Retention

__all__ = [
    "Retention",
    "directory",
    "facts",
    "finish",
    "give_up",
    "kind_faults",
    "newest",
    "set_aside",
    "start",
    "survey",
    "temporary",
]
