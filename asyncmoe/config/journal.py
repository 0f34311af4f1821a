"""The journal, which keeps the queue's contents on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, model_validator

from asyncmoe.config.fields import FINITE, NUMBER, NonNegative, Positive, Section, refused


class JournalSection(Section):
    """The journal: finished groups, turns of unfinished ones, leases and what became of each group, on disk, so that a stopped run loses
    none of them."""

    enabled: bool = Field(
        True,
        description="Keep the queue on disk: a run that is started again replays the batches it had trained since its checkpoint, trains "
        "what was queued, and goes on with what was unfinished. false: all of these are sampled again.",
    )
    turns: bool = Field(
        True,
        description="Record every answer of an engine as well, for as long as its group is unfinished: an unfinished episode goes on from "
        "its last whole turn. Its environment runs again and calls its tools again. false: unfinished episodes are sampled again.",
    )
    piece_tokens: NonNegative = Field(
        1024,
        description="Tokens after which an unfinished response is recorded: it is sampled in requests of so many tokens, each of which "
        "continues the one before, so that a stopped run loses at most so many tokens of a response. 0: whole responses only. Needs turns; "
        "has no effect with rollout.interruption abort_retry or drain.",
    )
    folder: Path | None = Field(
        None,
        description="Folder of the journal, on the controller's node; null: `journal` in run.dir. A local disk is faster than a network "
        "file system; it survives the processes, not the node.",
    )
    redis: str | None = Field(
        None,
        description="Keep the journal in this Redis server (6.2 or later) instead of a folder: redis://host:port/database, rediss:// "
        "(TLS) or unix:///path?db=database; a user is named before an @. It needs appendonly yes, appendfsync always, maxmemory-policy "
        "noeviction and memory for all that is kept; a run may then go on from another node. Needs the extra redis. null: a folder.",
    )
    redis_password_variable: str | None = Field(
        None, description="Environment variable of the controller with the password of journal.redis; null: it requires none."
    )
    redis_patience_s: Annotated[float, Field(gt=0, le=240), FINITE, NUMBER] = Field(
        60.0, description="Seconds for which a running controller asks again while journal.redis does not answer, before the run ends."
    )
    max_bytes: Positive = Field(
        256 << 30,
        description="Bound on the bytes of finished groups on disk; turns may take a quarter of it besides. Groups are deleted once no "
        "checkpoint needs them; a full journal ends the run, which loses nothing. Raise it, or save checkpoints more often "
        "(trainer.checkpoint_every).",
    )
    segment_bytes: Positive = Field(256 << 20, description="Size of one file of the journal, which is deleted as a whole.")

    @model_validator(mode="after")
    def _check(self) -> JournalSection:
        if self.segment_bytes > self.max_bytes:
            raise refused("journal.segment_bytes", self.segment_bytes, f"at most journal.max_bytes = {self.max_bytes}; lower it")
        if self.redis is None and self.redis_password_variable is not None:
            expected = "null without journal.redis; name the server in journal.redis, or leave the variable out"
            raise refused("journal.redis_password_variable", self.redis_password_variable, expected)
        if self.redis is not None:
            _check_address(self.redis)
            if self.folder is not None:
                raise refused("journal.folder", self.folder, "null with journal.redis; leave one of them out")
        return self

    def place(self, run_dir: Path) -> Path:
        """Return the folder of the journal of a run that keeps it in one."""
        return self.folder or run_dir / "journal"


def _check_address(url: str) -> None:
    """Refuse an address that is none of a Redis server, or has a password, which `config.yaml` would show. Raises ValueError."""
    forms = "redis://host:port/database, rediss://host:port/database or unix:///path?db=database, where database is a number"
    try:
        parts = urlsplit(url)
        secret = parts.password is not None or "password" in parse_qs(parts.query)
        local = parts.scheme == "unix" and bool(parts.path)
        database = parts.path.removeprefix("/")
        numbered = not database or (database.isascii() and database.isdigit())
        good = local or (parts.scheme in ("redis", "rediss") and bool(parts.hostname) and parts.port != 0 and numbered)
    except ValueError as error:
        raise refused("journal.redis", error, forms) from error
    if secret:
        raise refused("journal.redis", "an address with a password", "one without; journal.redis_password_variable names it")
    if not good:
        raise refused("journal.redis", url, forms)
