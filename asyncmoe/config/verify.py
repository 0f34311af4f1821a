"""Checks that engine and trainer compute the same log-probabilities."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from asyncmoe.config.anomalies import AnomaliesSection
from asyncmoe.config.fields import NUMBER, NonNegative, Positive, PositiveFloat, Section, refused


class VerifySection(Section):
    """Checks that engine and trainer compute the same log-probabilities, and limits beyond which the run stops."""

    logprobs_every: NonNegative = Field(
        0,
        description="Compare the log-probabilities of engine and trainer every n steps, with an extra forward pass, on trajectories of the "
        "trainer's version, and log the tokens that differ most, with their neighbours and experts; 0: never. Use 1 for a new model.",
    )
    show: Positive = Field(3, description="Number of tokens to log.")
    max_logprob_diff: PositiveFloat | None = Field(
        None, description="Stop before training on a batch with a larger |engine - trainer| at equal version, in nats; null: no limit."
    )
    max_kl: PositiveFloat | None = Field(
        None, description="Stop if the mean KL(engine || trainer) over those tokens is larger, in nats per token; null: no limit."
    )
    probe_every: NonNegative = Field(
        10,
        description="Compare an engine with the trainer every n published versions on tokens that both score with the weights of that "
        "version, whatever the age of the batch; 0: never. It costs the trainer a forward pass over probe_tokens, and the engine too.",
    )
    probe_tokens: Annotated[int, Field(gt=1, le=1 << 14), NUMBER] = Field(
        256, description="Number of those tokens: the first, at most 128 each, of trajectories of the batch."
    )
    anomalies: AnomaliesSection = AnomaliesSection()

    @model_validator(mode="after")
    def _check(self) -> VerifySection:
        for key in ("max_logprob_diff", "max_kl"):
            if getattr(self, key) is not None and not self.logprobs_every:
                raise refused(f"verify.{key}", getattr(self, key), "null because verify.logprobs_every is 0; set it to 1 or more")
        return self
