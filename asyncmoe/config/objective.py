"""The loss of a reinforcement-learning step. The formulae are in `asyncmoe.trainer.objective`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Real, Section

Band = tuple[NonNegativeFloat, PositiveFloat]
"""Lowest and highest ratio that is kept."""
Advantage = Literal["grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "prompt_mean"]
PROCESS_ADVANTAGES: tuple[Advantage, ...] = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Those in units of a deviation for every response, as normalised step rewards are. dr_grpo, rloo and opo are in units of the reward;
pass_at_k leaves all but the best response at 0."""
Clip = Literal["ppo", "cispo", "dppo_tv", "ipo", "none"]
Estimator = Literal["k1", "k2", "k3", "unbiased"]


class CorrectionSection(Section):
    """What is done about tokens that were sampled by another policy than the one they are trained from.

    The ratio is that of objective.proximal's policy to the engine's; where objective.proximal is behaviour, of the trainer's to the
    engine's.
    """

    weight: Literal["token", "sequence", "none"] = Field(
        "token", description="The loss of a token is multiplied by its ratio, by the product of its sequence's ratios, or by nothing."
    )
    cap: PositiveFloat | None = Field(2.0, description="Truncated importance sampling: the weight is min(weight, cap); null: as it is.")
    token_band: Band | None = Field(
        None, description="IcePop, MIS: tokens whose ratio is outside are rejected, such as [0.5, 5]; with cap: null."
    )
    sequence_band: Band | None = Field(None, description="Sequences whose product of ratios is outside are rejected, such as [0.5, 2].")
    geometric_band: Band | None = Field(
        None, description="Sequences whose geometric mean of ratios is outside are rejected, such as [0.99, 1.01]."
    )
    veto: Band | None = Field(None, description="A token with its ratio outside rejects its whole sequence, such as [1e-4, 100].")
    opsm_delta: NonNegativeFloat | None = Field(
        None,
        description="DeepSeek-V3.2: tokens of negative advantage are rejected in sequences whose mean log-ratio of engine to trainer is "
        "above, such as 1e-4.",
    )
    max_age: NonNegative | None = Field(None, description="Tokens sampled more than this many versions ago are rejected.")
    denominator: Literal["kept", "planned"] = Field(
        "kept",
        description="kept: the mean is over what was not rejected. planned: rejected tokens add nothing but are still counted, as in the "
        "formulae of DeepSeek-V3.2; always so with objective.aggregation sequence_sum.",
    )

    @model_validator(mode="after")
    def _check(self) -> CorrectionSection:
        for name in ("token_band", "sequence_band", "geometric_band", "veto"):
            band: Band | None = getattr(self, name)
            if band is not None and not band[0] < 1 < band[1]:
                raise ValueError(
                    f"objective.correction.{name}: got {list(band)}, expected one number below 1 and one above (equal policies have the "
                    "ratio 1, and must not be rejected)"
                )
        return self


class KLSection(Section):
    """A penalty for moving away from a reference policy, the weights that training started from."""

    coefficient: NonNegativeFloat = Field(
        0.0,
        description="What the penalty counts for; 0: none. A reference policy is a second copy of the weights and a second forward pass.",
    )
    estimator: Estimator = Field(
        "k3",
        description="k1, k2, k3: Schulman's, on tokens as they come; the gradient of k1 is zero in expectation. unbiased: k3 times the "
        "ratio of trainer to engine (DeepSeek-V3.2).",
    )


class ProcessSection(Section):
    """Rewards of single steps, beside the reward of the whole."""

    weight: NonNegativeFloat = Field(
        0.0,
        description="What they count for; 0: nothing. Step rewards are normalised by their mean and deviation over a group; a token's "
        "advantage grows by this times the sum of those of its own step and the ones after it.",
    )


class DistillSection(Section):
    """A teacher's opinion of what the policy sampled (on-policy distillation)."""

    weight: NonNegativeFloat = Field(
        0.0, description="What it counts for; 0: nothing. A token's advantage grows by this times log pi_teacher - log pi_engine."
    )
    clip: PositiveFloat | None = Field(None, description="That difference is held within -clip and clip, in nats; null: as it is.")


class ObjectiveSection(Section):
    """The loss of a reinforcement-learning step."""

    advantage: Advantage = Field(
        "grpo",
        description="grpo: reward minus the group's mean, over the group's deviation; dr_grpo: not divided; rloo: minus the mean of the "
        "others; opo: minus the mean weighted by length; pass_at_k: the best of a group only, by how much; reinforce_plus_plus: normalised "
        "over the batch's tokens; reinforce_plus_plus_baseline: after the group's mean.",
    )
    ratio: Literal["token", "sequence"] = Field("token", description="sequence: GSPO, the geometric mean of the sequence's ratios.")
    clip: Clip = Field(
        "ppo",
        description="ppo: clipped surrogate; cispo: clipped weight on the log-probability's gradient; dppo_tv, ipo: no gradient where the "
        "probability has moved by more than clip_low or clip_high (dppo_tv: in the advantage's direction); none: REINFORCE with the ratio.",
    )
    clip_low: PositiveFloat = Field(0.2, description="The ratio is clipped at 1 - clip_low; 1 or more: not at all from below.")
    clip_high: PositiveFloat = Field(0.2, description="The ratio is clipped at 1 + clip_high.")
    dual_clip: Annotated[Real, Field(gt=1)] | None = Field(
        None, description="ppo: a token of negative advantage costs at most this many times the advantage, such as 3; null: without bound."
    )
    proximal: Literal["recompute", "loglinear", "behaviour"] = Field(
        "recompute",
        description="Denominator of the clipped ratio. recompute: the trainer's policy before the batch, by a pass of its own where "
        "updates_per_batch is above 1; loglinear: that policy, interpolated from each token's version without a pass; behaviour: the "
        "engine's.",
    )
    correction: CorrectionSection = CorrectionSection()
    kl: KLSection = KLSection()
    process: ProcessSection = ProcessSection()
    distill: DistillSection = DistillSection()
    aggregation: Aggregation = Field(
        "token_mean",
        description="token_mean: all tokens count alike; sequence_mean: all sequences; prompt_mean: all prompts; sequence_sum: they count "
        "1 / (sequences * rollout.max_new_tokens), as in Dr. GRPO.",
    )
    updates_per_batch: Positive = Field(1, description="Optimizer steps a batch is cut into.")

    @model_validator(mode="after")
    def _check(self) -> ObjectiveSection:
        weight = self.correction.weight
        if self.proximal == "behaviour" and weight != "none":
            raise ValueError(
                f"objective.correction.weight: got {weight}, expected none because objective.proximal is behaviour (the ratio to the "
                "engine would be applied twice); set it to none, or objective.proximal to recompute"
            )
        if self.clip != "ppo" and self.dual_clip is not None:
            raise ValueError(
                f"objective.dual_clip: got {self.dual_clip}, expected null because objective.clip is {self.clip} (it bounds PPO's "
                "surrogate); leave it out, or set objective.clip to ppo"
            )
        if self.ratio == "sequence" and self.clip in ("dppo_tv", "ipo"):
            raise ValueError(
                f"objective.ratio: got sequence, expected token because objective.clip is {self.clip} (it compares tokens' "
                "probabilities); leave it out, or set objective.clip to ppo"
            )
        if self.process.weight and self.advantage not in PROCESS_ADVANTAGES:
            raise ValueError(
                f"objective.process.weight: got {self.process.weight:g}, expected 0 because objective.advantage is {self.advantage} (step "
                f"rewards are in deviations, its advantages are not); set it to 0, or objective.advantage to {PROCESS_ADVANTAGES[0]}"
            )
        return self
