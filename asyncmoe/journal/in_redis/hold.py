"""Which controller may write the journal: the newest one whose predecessor is gone.

Each controller has a random token, and the server refuses a step of one whose token is not the newest: that alone decides, and no clock
does. A new controller takes the place of one whose connection the server no longer has, at once, and of one whose connection has been
silent for `_SILENT_S`: its node is gone, or it is suspended, and is refused when it wakes up. While the connection lives, the new one is
refused.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

from redis.exceptions import RedisError

from asyncmoe.errors import AsyncmoeError, StorageError, UserError
from asyncmoe.journal.in_redis import scripts, settings
from asyncmoe.journal.in_redis.scripts import Keys
from asyncmoe.journal.in_redis.server import RedisServer

log = logging.getLogger(__name__)
_BEAT_S = 1.0
_SILENT_S = 5
_COARSE_S = 1.5
"""A server counts silence in whole seconds, by a clock that is a little late."""
_LOOK_S = 0.1
_BEATS_A_CHECK = 5
_JOIN_S = 60.0


class Hold:
    """The right of this process to write a journal. `take` and `release` are for one thread, `check` and `step` for any.

    Attributes:
        session: number of the controller among those that wrote this journal, from 1; after `take`.
    """

    def __init__(self, server: RedisServer, keys: Keys) -> None:
        self.session = 0
        self._server, self._keys, self._token = server, keys, uuid.uuid4().hex
        self._line = server.connection(client_name=_line_of(self._token), max_connections=1)
        self._failure: AsyncmoeError | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="journal hold", daemon=True)

    def take(self) -> None:
        """Become the one who writes, and stay so until `release`, unless another one takes over.

        Raises:
            UserError: another controller is alive.
            StorageError: the server failed.
        """
        began = time.monotonic()
        while True:
            token, client, holder = self._server.call(lambda redis: redis.hmget(self._keys.state, "token", "client", "holder"))
            silent_s = None if not token else self._silence(_text(client), _line_of(_text(token)))
            if silent_s is None or silent_s >= _SILENT_S:
                mine = str(self._server.call(lambda _: self._line.client_id()))
                who = f"process {os.getpid()} on {socket.gethostname()}"
                keys = (self._keys.state,)
                if session := self._server.step(scripts.TAKE, keys, self._token, token or b"", mine, who):
                    self.session = int(session)
                    break
            elif silent_s + _COARSE_S < time.monotonic() - began:
                raise self._taken(holder)  # the server has heard of it since the first look
            time.sleep(_LOOK_S)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the hold: UserError if another controller took over or a setting changed, else StorageError."""
        if self._failure is not None:
            raise self._failure

    def step(self, script: str, keys: tuple[str, ...], *values: Any) -> str:
        """Have the server take one of `scripts` that needs the newest token, and return its answer.

        Args:
            keys: all but the first, which is `Keys.state`.
            values: all but the first, which is the token.

        Raises:
            UserError: another controller has taken over.
            StorageError: the server failed, or has lost the journal.
        """
        self.check()
        answer = _text(self._server.step(script, (self._keys.state, *keys), self._token, *values))
        if answer == "lost":
            self._failure = self._lost()
            raise self._failure
        return answer

    def release(self) -> None:
        """Let another controller take over at once. Does not raise."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._line.close()

    def _silence(self, client: str, line: str) -> int | None:
        """Seconds since the server heard of a connection; None if it has no such connection."""
        if not client:
            return None
        known = self._server.call(lambda redis: redis.client_list(client_id=[client]))
        for one in known:
            if one.get("name") == line:
                return int(one["idle"])
        return None

    def _lost(self) -> AsyncmoeError:
        token, holder = self._server.call(lambda redis: redis.hmget(self._keys.state, "token", "holder"))
        if not token:
            why = "they were deleted, or it has lost its data"
            return StorageError(f"journal: {self._server.name} no longer has its keys {self._keys.every}: {why}")
        return self._taken(holder)

    def _taken(self, holder: bytes | None) -> UserError:
        got = f"{self._server.name}, in use by another controller ({_text(holder)})"
        return UserError("journal", got=got, expected="one controller of a run", hint="end the other one")

    def _beat(self) -> None:
        beats = 0
        while not self._ending.wait(_BEAT_S) and self._failure is None:
            beats += 1
            try:
                token = self._heard()
                if beats % _BEATS_A_CHECK == 0:
                    settings.check_config(settings.read(self._line), self._server.name)
                if token != self._token:
                    self._failure = self._lost()
            except UserError as error:
                self._failure = error
            except (RedisError, OSError, AsyncmoeError) as error:
                log.debug("journal: %s", error)  # whoever writes waits for the server, and says so

    def _heard(self) -> str:
        """Let the server hear of this process, and know its connection after it broke; return the newest token."""
        pipeline = self._line.pipeline(transaction=False)
        pipeline.client_id()
        pipeline.hmget(self._keys.state, "token", "client")
        mine, (token, client) = pipeline.execute()
        if _text(token) == self._token and _text(client) != str(mine):
            self._line.eval(scripts.CONNECTED, 1, self._keys.state, self._token, mine)
        return _text(token)


def _line_of(token: str) -> str:
    return f"asyncmoe-{token}"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else "" if value is None else str(value)
