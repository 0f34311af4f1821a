"""Opens the journal of a run that is kept in Redis."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from asyncmoe.config.journal import JournalSection
from asyncmoe.journal import rows
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.in_redis.hold import Hold
from asyncmoe.journal.in_redis.payloads import RedisPayloads
from asyncmoe.journal.in_redis.scripts import Keys
from asyncmoe.journal.in_redis.server import RedisServer, password_of
from asyncmoe.journal.in_redis.states import RedisStates
from asyncmoe.journal.journal import OF_TURNS, Journal, Stores
from asyncmoe.journal.recovery import under_way
from asyncmoe.journal.states import States
from asyncmoe.journal.turns import Turns

log = logging.getLogger(__name__)


def server_of(section: JournalSection, *, patient: bool = False) -> RedisServer:
    """Return the server that a configuration names, once it is known to keep what it acknowledges. Blocks.

    Args:
        patient: wait for a server that cannot be reached.

    Raises:
        ConfigError: the variable with the password is not set.
        UserError, StorageError: the server cannot be reached or used; see `RedisServer.check`.
    """
    assert section.redis is not None
    server = RedisServer(section.redis, password_of(section.redis_password_variable), section.redis_patience_s)
    try:
        server.check(patient=patient)
    except BaseException:
        server.close()
        raise
    return server


def open_journal(section: JournalSection, belonging: Belonging) -> Journal:
    """Open or make the journal of a run. Blocks.

    Raises:
        DataError: it is another run's, or damaged.
        UserError: the server cannot be used, or another controller uses the journal.
        StorageError: it cannot be written.
    """
    with ExitStack() as held:
        server = server_of(section, patient=belonging.begun)
        held.callback(server.close)
        belonging.note()  # first, so that no keys are left of which no run knows
        keys = Keys(belonging.run)
        hold = Hold(server, keys)

        def opened(new: bool) -> None:
            if new and belonging.begun:
                log.warning("%s has no journal of this run: what was queued or under way when it stopped is sampled again", server.name)

        states = States(RedisStates(server, hold, keys, belonging.identity, opened))
        held.callback(states.close)
        payloads = RedisPayloads.open(server, hold, keys.groups, section.max_bytes)
        held.callback(payloads.close)
        recorded, turns = states.read(rows.read), None
        if section.turns:
            most = section.max_bytes // OF_TURNS
            answers = RedisPayloads.open(server, hold, keys.turns, most)
            held.callback(answers.close)
            turns = Turns.of(answers, keys.journal(server.name), under_way(recorded), most)
            held.callback(turns.close)
        return Journal(keys.journal(server.name), belonging, Stores(states, payloads, turns, held.pop_all()), recorded)
