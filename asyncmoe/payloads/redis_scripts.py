"""The steps on payloads that a Redis server takes as one (Lua), and the names of their keys.

Each may be sent again: what was done is not done twice. The stream has an entry for each group before any of its bytes are there, so
nothing lies in the server that the stream does not name.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"asyncmoe:[^:]+:payload:(0|[1-9][0-9]{0,17})\.[^:]*", re.ASCII)
ENTRY = "entry"
"""Field of a group's hash: id and bytes of its entry in the stream. The others are named by `field`."""

SESSION = """
redis.call('XDEL', KEYS[2], '0-0')
local before = tonumber(redis.call('HGET', KEYS[1], 'session') or '0')
return redis.call('HINCRBY', KEYS[1], 'session', math.max(tonumber(ARGV[1]) - before, 0) + ARGV[2])
"""
"""totals, stream; a controller's number, 0 or 1: the number noted, at least that one, plus 0 or 1, which is noted now.

No stream has an entry 0-0: a full server takes whatever follows a deletion in a step, and nothing else that writes.
"""

RESERVE = f"""
if redis.call('HEXISTS', KEYS[3], '{ENTRY}') == 1 then return 'done' end
local used = tonumber(redis.call('HGET', KEYS[1], 'bytes') or '0')
if used + tonumber(ARGV[2]) > tonumber(ARGV[3]) then return tostring(used) end
local id = redis.call('XADD', KEYS[2], '*', 'name', ARGV[1], 'bytes', ARGV[2])
redis.call('HSET', KEYS[3], '{ENTRY}', id .. ' ' .. ARGV[2])
redis.call('HINCRBY', KEYS[1], 'bytes', ARGV[2])
return 'done'
"""
"""totals, stream, group; name of the group, its bytes, bound on all: "done", or the bytes of all that leave no room for it."""

DROP = f"""
local entry = redis.call('HGET', KEYS[3], '{ENTRY}')
redis.call('UNLINK', KEYS[3])
if not entry then return 'done' end
local id, bytes = string.match(entry, '^(%S+) (%d+)$')
if redis.call('XDEL', KEYS[2], id) == 1 then redis.call('HINCRBY', KEYS[1], 'bytes', -bytes) end
return 'done'
"""
"""totals, stream, group."""

FORGET = """
if redis.call('XDEL', KEYS[2], ARGV[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'bytes', -ARGV[2]) end
return 'done'
"""
"""totals, stream; id and bytes of an entry that is one too many, or whose group is gone."""

END = """
if redis.call('XLEN', KEYS[2]) > 0 then return 'done' end
if tonumber(redis.call('HGET', KEYS[1], 'session') or '0') <= tonumber(ARGV[1]) then redis.call('UNLINK', KEYS[1], KEYS[2]) end
return 'done'
"""
"""totals, stream; a controller's number: deletes both, unless there is a group, or a newer controller, whose number would be forgotten.

The next controller starts to count anew: nothing is left of those whose numbers it may take again.
"""

LOOK = """
local head = ''
if redis.call('HSTRLEN', KEYS[1], ARGV[1]) <= tonumber(ARGV[2]) then head = redis.call('HGET', KEYS[1], ARGV[1]) end
local sizes = {}
for i = 3, #ARGV do sizes[#sizes + 1] = redis.call('HSTRLEN', KEYS[1], ARGV[i]) end
return {head, table.concat(sizes, ' ')}
"""
"""group; field of a head, its bound, other fields: the head, empty if it exceeds that, and the lengths of the fields."""


def field(key: str, piece: str) -> str:
    """The name of a piece of a trajectory in the hash of its group."""
    return f"{piece} {key}"


def run_of(stored: str) -> str:
    """The run of a group's name, as all its keys begin."""
    return ":".join(stored.split(":")[:2])


def begin_of(run: str) -> str:
    """How the keys of a run begin."""
    return f"asyncmoe:{run}"


def totals(run: str) -> str:
    """A hash: bytes of all groups, and the number of the newest controller. `run` as `run_of` returns it, also below."""
    return f"{run}:totals"


def stream(run: str) -> str:
    """A stream: name and bytes of each group."""
    return f"{run}:payloads"


def prefix_of(run: str, session: int) -> str:
    """How the names of the groups of a run's controller begin, by its number. The name of a group is also its key."""
    return f"{run}:payload:{session}."


def session_of(stored: str) -> int:
    """The number of the controller in a name; -1: it is none of ours."""
    found = _NAME.fullmatch(stored)
    return int(found[1]) if found else -1
