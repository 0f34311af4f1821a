"""The steps that a server takes as one (Lua), and the names of their keys.

Each step but TAKE is refused to a controller whose token is not the newest. Each may be sent again: what was done is not done twice.
"""

from __future__ import annotations

from dataclasses import dataclass

_HELD = "if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 'lost' end\n"

TAKE = """
local token = redis.call('HGET', KEYS[1], 'token') or ''
if token ~= ARGV[1] then
    if token ~= ARGV[2] then return false end
    redis.call('HSET', KEYS[1], 'token', ARGV[1], 'client', ARGV[3], 'holder', ARGV[4])
    redis.call('HINCRBY', KEYS[1], 'session', 1)
end
return redis.call('HGET', KEYS[1], 'session')
"""
"""state; own token, the token that it takes the place of, own connection, own process: the number of the session, or nothing."""

CONNECTED = _HELD + "redis.call('HSET', KEYS[1], 'client', ARGV[2])\nreturn 'done'"
"""state; token, own connection."""

KEEP = (
    _HELD
    + """
local newest = tonumber(redis.call('HGET', KEYS[1], 'entry') or '0')
if newest == tonumber(ARGV[2]) then return 'done' end
if newest ~= tonumber(ARGV[2]) - 1 then return 'at ' .. newest end
redis.call('XADD', KEYS[2], ARGV[2] .. '-0', 'entry', ARGV[3])
redis.call('HSET', KEYS[1], 'entry', ARGV[2])
return 'done'
"""
)
"""state, entries; token, number of the entry, its bytes."""

COMPACT = (
    _HELD
    + """
redis.call('SET', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'snapshot', ARGV[2])
redis.call('XTRIM', KEYS[3], 'MINID', ARGV[4])
return 'done'
"""
)
"""state, snapshot, entries; token, number of the newest entry in the snapshot, the snapshot, number of the first entry to keep."""

DELETE = _HELD + "redis.call('HDEL', KEYS[2], unpack(ARGV, 2))\nreturn 'done'"
"""state, payloads; token, fields."""

CLEAR = (
    _HELD
    + """
redis.call('HDEL', KEYS[1], 'entry', 'snapshot')
redis.call('DEL', unpack(KEYS, 2))
return 'done'
"""
)
"""state, and all other keys; token."""


@dataclass(frozen=True)
class Keys:
    """The keys of a run's journal.

    Attributes:
        run: the random name that the run's marker gives the journal.
    """

    run: str

    @property
    def every(self) -> str:
        """The pattern of all of them."""
        return f"asyncmoe:{self.run}:*"

    def journal(self, server: str) -> str:
        """The name of the journal, for messages."""
        return f"journal {server} {self.every}"

    @property
    def state(self) -> str:
        """A hash: who writes, and the numbers of the newest entry and of the newest entry in the snapshot."""
        return f"asyncmoe:{self.run}:state"

    @property
    def entries(self) -> str:
        """A stream: what changed since the snapshot."""
        return f"asyncmoe:{self.run}:entries"

    @property
    def snapshot(self) -> str:
        """A string: all rows."""
        return f"asyncmoe:{self.run}:snapshot"

    @property
    def groups(self) -> str:
        """A hash: payloads of finished groups."""
        return f"asyncmoe:{self.run}:groups"

    @property
    def turns(self) -> str:
        """A hash: answers to episodes under way."""
        return f"asyncmoe:{self.run}:turns"
