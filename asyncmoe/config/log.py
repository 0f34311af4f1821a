"""The log, which keeps the queue's contents on disk."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import model_validator

from asyncmoe.config.fields import NonNegative, Positive, Section, refused

_HOST = r"([^/@:?]*@)?(\[[^]]+\]|[^/@:?\s]+)(:[1-9]\d*)?"
_ADDRESS = re.compile(rf"(rediss?://{_HOST}(/\d*)?|unix:///[^?]+)(\?(?!.*password=).*)?")


class LogSection(Section):
    """The log: finished groups, turns of unfinished ones, leases and the outcome of each group, on disk. A run that is started again
    replays the batches it had trained since its checkpoint, trains what was queued, and continues what was unfinished."""

    folder: Path | None = None
    """Folder of the log, on the controller's node; null: `log` in run.dir. A local disk is faster than a network file system; the log then
    survives its processes, but not the node."""
    redis: str | None = None
    """Keep the log in this Redis server (6.2 or later) instead of a folder: redis://host:port/database, rediss:// (TLS) or
    unix:///path?db=database; a user name goes before an @, the password into ASYNCMOE_LOG_PASSWORD. The server needs appendonly yes,
    appendfsync always, maxmemory-policy noeviction and memory for the whole log; a run can then resume on another node. Needs the extra
    redis. null: a folder."""
    max_bytes: Positive = 256 << 30
    """Maximum bytes of finished groups that a process keeps; recorded turns may take another quarter of that. Groups are deleted once no
    checkpoint needs them; a full log ends the run without loss. Raise it, or save checkpoints more often (trainer.checkpoint_every)."""
    piece_tokens: NonNegative = 1024
    """Tokens after which an unfinished response is recorded: it is sampled in requests of this many tokens, each continuing the one before,
    so that a stopped run loses at most this many tokens of a response. 0: whole responses only. Has no effect with rollout.interruption
    abort_retry or drain."""

    @model_validator(mode="after")
    def _check(self) -> LogSection:
        if self.redis is not None and self.folder is not None:
            raise refused("log.folder", self.folder, "null with log.redis; leave one of them out")
        if self.redis is not None and not _ADDRESS.fullmatch(self.redis):
            forms = "redis://host:port/database, rediss://host:port/database or unix:///path?db=database, where database is a number"
            got = re.sub("//.*@|password=.*", "(hidden)", self.redis)  # `config.yaml` would show a password
            raise refused("log.redis", got, f"{forms}, without a password, which is in ASYNCMOE_LOG_PASSWORD")
        return self

    def place(self, run_dir: Path) -> Path:
        """Return the folder of the log, for a run that keeps it in a folder."""
        return self.folder or run_dir / "log"
