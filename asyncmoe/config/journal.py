"""The journal, which keeps the queue's contents on disk."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from asyncmoe.config.fields import NonNegative, Positive, Section


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
            raise ValueError(
                f"journal.segment_bytes: got {self.segment_bytes}, expected at most journal.max_bytes = {self.max_bytes}; lower it"
            )
        return self

    def place(self, run_dir: Path) -> Path:
        """Return the folder of the journal of a run."""
        return self.folder or run_dir / "journal"
