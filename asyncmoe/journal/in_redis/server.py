"""A Redis server as the journal uses it: requests that are sent again when a connection breaks, errors in the user's terms."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.retry import Retry

from asyncmoe.errors import AsyncmoeError, ConfigError, InvariantBroken, StorageError, UserError
from asyncmoe.journal.in_redis import settings
from asyncmoe.journal.in_redis.settings import KEY

log = logging.getLogger(__name__)
T = TypeVar("T")
_CONNECT_S = 5.0
_ANSWER_S = 30.0
"""Seconds after which a request without an answer is sent again, on a new connection."""
_LONGEST_PAUSE_S = 1.0
_CURE = "raise its maxmemory, or save checkpoints more often (trainer.checkpoint_every), which frees what they cover"
_THEN = "start the run again: what was acknowledged is not lost"
_PASSWORD = (AuthenticationError, AuthorizationError, AuthenticationWrongNumberOfArgsError)
_BROKEN = (redis.ConnectionError, redis.TimeoutError, ReadOnlyError, OSError)
"""Errors after which a request is sent again. A server that became a replica is one: the address may soon be the new master's."""


class RedisServer:
    """A server. `call` may be used from any thread.

    Args:
        url: redis://host:port/database, rediss:// (TLS) or unix:///path?db=database, without a password.
        patience_s: seconds for which a request is sent again while the server does not answer it.

    Attributes:
        name: the URL without a user, for messages.
    """

    def __init__(self, url: str, password: str | None, patience_s: float) -> None:
        self.name, self._patience_s = _shown(url), patience_s
        self._stopping = threading.Event()
        self._url, self._password = url, password
        self._client = self.connection()

    def connection(self, **options: Any) -> Any:
        """Return another client of the server (redis.Redis), which its user closes; it sends nothing twice."""
        answer_s = min(_ANSWER_S, self._patience_s)
        return redis.Redis.from_url(
            self._url,
            password=self._password,
            socket_timeout=answer_s,
            socket_connect_timeout=min(_CONNECT_S, answer_s),
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **options,
        )

    def check(self, *, patient: bool = False) -> None:
        """Refuse a server that cannot be reached or does not promise enough; wait for one that is loading its file.

        Args:
            patient: wait for one that cannot be reached, too.

        Raises:
            UserError: see `settings.check`.
            StorageError: it was waited for in vain.
        """

        def read(client: Any) -> settings.Settings:
            try:
                return settings.read(client)
            except (*_PASSWORD, BusyLoadingError):
                raise
            except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                if patient:
                    raise
                hint = "start it, or name another one; null keeps the journal in a folder"
                expected = "a Redis server that answers"
                raise UserError(KEY, got=f"{self.name}: {_said(error)}", expected=expected, hint=hint) from error

        settings.check(self.call(read), self.name)

    def call(self, request: Callable[[Any], T]) -> T:
        """Return what a request answers, which must be one that may be sent again.

        Args:
            request: is given a client (redis.Redis).

        Raises:
            StorageError: the server did not answer for `patience_s`, is full, or refuses the request.
            UserError: it refuses the user.
        """
        until, pause_s = None, 0.05
        while True:
            try:
                return request(self._client)
            except _PASSWORD as error:
                raise self.explained(error) from error
            except (*_BROKEN, RedisError) as error:
                if not _passes(error):
                    raise self.explained(error) from error
                if until is None:
                    until = time.monotonic() + self._patience_s
                    log.warning("journal: %s does not answer (%s); it is asked again for %g s", self.name, _said(error), self._patience_s)
                if isinstance(error, ReadOnlyError):
                    self._client.connection_pool.disconnect(inuse_connections=False)  # other threads read from theirs
                if time.monotonic() >= until or self._stopping.wait(pause_s):
                    raise self.explained(error) from error
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def step(self, script: str, keys: tuple[str, ...], *values: Any) -> Any:
        """Have the server take one of `scripts`, and return its answer. Raises as `call`."""
        return self.call(lambda client: client.eval(script, len(keys), *keys, *values))

    def close(self) -> None:
        """End all waiting, and close the connections."""
        self._stopping.set()
        self._client.close()

    def explained(self, error: Exception) -> AsyncmoeError:
        """Return the error for the user."""
        if isinstance(error, AsyncmoeError):
            return error
        said = _said(error)
        if isinstance(error, _PASSWORD):
            hint = f"set the variable that {KEY}_password_variable names; a user is named in the address, redis://user@host"
            return UserError(KEY, got=f"{said} at {self.name}", expected="the password of the server", hint=hint)
        if isinstance(error, NoPermissionError) or "unknown command" in str(error):
            hint = "docs/guides/journal.md has the list"
            return UserError(KEY, got=f"{said} at {self.name}", expected="a user who may do it", hint=hint)
        if "DB index" in str(error):
            hint = "name another at the end of the address, redis://host:port/0"
            return UserError(KEY, got=f"{said} at {self.name}", expected="one of the server's databases", hint=hint)
        if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
            return StorageError(f"journal: {self.name} is full ({said}); {_CURE}; then {_THEN}")
        if isinstance(error, ReadOnlyError):
            return StorageError(f"journal: {self.name} has become a replica, which cannot be written; name the new master; then {_THEN}")
        if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError):
            return StorageError(
                f"journal: {self.name} did not answer for {self._patience_s:g} s ({said}); bring it back ({KEY}_patience_s "
                f"is how long a run waits), then {_THEN}"
            )
        if isinstance(error, RedisError):
            return StorageError(f"journal: {self.name} refuses a request: {said}")
        return InvariantBroken(f"journal in {self.name}: {type(error).__name__}: {error}")


def password_of(variable: str | None) -> str | None:
    """Return the password in an environment variable; None if there is no variable. Raises ConfigError if it is not set."""
    if variable is None:
        return None
    if not (password := os.environ.get(variable, "")):
        why = "is not set" if variable not in os.environ else "is empty"
        raise ConfigError(f"{KEY}_password_variable", got=f"{variable}, which {why}", expected="a variable with the password")
    return password


def _passes(error: Exception) -> bool:
    return isinstance(error, _BROKEN) or str(error).startswith("BUSY ")


def _shown(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _said(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:300].rstrip(".")
