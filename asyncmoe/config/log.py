"""The log, which keeps the queue's contents on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from asyncmoe.config.fields import NonNegative, Positive, Section, refused

_HOST = r"([^/@:?]*@)?(\[[^]]+\]|[^/@:?\s]+)(:[1-9]\d*)?"
_ADDRESS = re.compile(rf"(rediss?://{_HOST}(/\d*)?|unix:///[^?]+)(\?(?!.*password=).*)?")


class LogSection(Section):
    """The log on disk: finished groups, turns of unfinished groups, leases, and the outcome of each group. A run that is started again
    retrains the batches since its checkpoint, trains the queued groups, and continues the unfinished ones."""

    folder: Path | None = None
    """Folder of the log, on the controller's node; null: `log` in run.dir. A local disk is faster than a network file system, but a log on
    it is lost with the node."""
    redis: str | None = None
    """Redis server (6.2 or later) that keeps the log: redis://host:port/database, rediss:// (TLS) or unix:///path?db=database; put a user
    name before an @, and the password into the variable ASYNCMOE_LOG_PASSWORD. The server needs appendonly yes, appendfsync always,
    maxmemory-policy noeviction and memory for the whole log. With Redis a run can resume on another node. Needs `pip install
    'asyncmoe[redis]'`. null: a folder."""
    max_bytes: Positive = 256 << 30
    """Maximum bytes of finished groups in each process's log; recorded turns may take another quarter of that. Groups are deleted once no
    checkpoint needs them. A full log ends the run without loss: raise this, or save checkpoints more often (trainer.checkpoint_every)."""
    keep: Positive | Literal["all"] | None = None
    """Newest trained steps whose batches stay in the log, so that they can be trained again by `asyncmoe replay` and `asyncmoe fork`: at
    least this number, or all. The checkpoint with which they begin is kept too; a number with trainer.checkpoint_every 0 saves one every so
    many steps. If the log nears max_bytes, or its disk is nearly full, fewer are kept. null: those since the oldest of
    trainer.keep_checkpoints, which a restart may need anyway."""
    piece_tokens: NonNegative = 1024
    """Tokens after which an unfinished response is recorded. Responses are sampled in consecutive requests of this many tokens, so a
    stopped run loses at most this many tokens of each response. 0: only finished responses are recorded. Has no effect with
    rollout.interruption abort_retry or drain."""

    @model_validator(mode="after")
    def _check(self) -> LogSection:
        if self.redis is not None and self.folder is not None:
            raise refused("log.folder", self.folder, "null because log.redis is set; leave one of them out")
        if self.redis is not None and not _ADDRESS.fullmatch(self.redis):
            forms = "redis://host:port/database, rediss://host:port/database or unix:///path?db=database, where database is a number"
            got = re.sub("//.*@|password=.*", "(hidden)", self.redis)  # `config.yaml` would show a password
            raise refused("log.redis", got, f"{forms}, without a password; set that in ASYNCMOE_LOG_PASSWORD")
        return self

    def place(self, run_dir: Path) -> Path:
        """Return the folder of the log, for a run that keeps it in a folder."""
        return self.folder or run_dir / "log"
