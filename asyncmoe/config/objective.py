"""Configuration of the reinforcement-learning loss. The formulas are in `asyncmoe.trainer.objective`."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from asyncmoe.config.fields import (
    FINITE,
    NUMBER,
    NameOrPlugin,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    check_options,
    refused,
)
from asyncmoe.plugins import is_name

Band = tuple[NonNegativeFloat, PositiveFloat]
"""Lowest and highest ratio to keep."""
Advantage = Literal["grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "prompt_mean"]
PROCESS_ADVANTAGES: tuple[Advantage, ...] = ("grpo", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages in units of a standard deviation, as normalised step rewards are. Those of dr_grpo, rloo and opo are in units of the reward;
pass_at_k gives 0 to all but the best response."""
Clip = Literal["ppo", "cispo", "dppo_tv", "ipo", "none"]
Estimator = Literal["k1", "k2", "k3", "unbiased"]
Weight = Literal["token", "sequence", "none"]
_SURROGATE = ("ratio", "clip", "clip_low", "clip_high", "dual_clip")
"""The keys of the built-in loss."""


class CorrectionSection(Section):
    """Correction for tokens sampled by another policy than the one in training: importance weights and rejection rules.

    The ratio in these keys is the token's probability under objective.proximal's policy (if that is behaviour, under the trainer's) divided
    by its probability in the engine.
    """

    weight: Annotated[str, NameOrPlugin(get_args(Weight))] = "token"
    """Importance weight of a token: its ratio (token), the product of its sequence's ratios (sequence), 1 (none), or the result of your own
    function (docs/guides/objective.md)."""
    weight_options: dict[str, Any] | None = None
    """Keyword arguments of your own function."""
    cap: PositiveFloat | None = 2.0
    """Truncated importance sampling: use min(weight, cap); null: no cap."""
    token_band: Band | None = None
    """IcePop, MIS: reject tokens whose ratio is outside this range, for example [0.5, 5]; use with cap null."""
    sequence_band: Band | None = None
    """Reject sequences whose product of ratios is outside this range, for example [0.5, 2]."""
    geometric_band: Band | None = None
    """Reject sequences whose geometric mean of ratios is outside this range, for example [0.99, 1.01]."""
    veto: Band | None = None
    """Reject sequences with any token whose ratio is outside this range, for example [1e-4, 100]."""
    opsm_delta: NonNegativeFloat | None = None
    """DeepSeek-V3.2: reject tokens with negative advantage in sequences whose mean log-ratio of engine to trainer is above this, for
    example 1e-4."""
    max_age: NonNegative | None = None
    """Reject tokens sampled more than this many versions ago."""
    denominator: Literal["kept", "planned"] = "kept"
    """Denominator of the mean loss. kept: tokens that were not rejected. planned: all tokens; rejected ones add nothing but still count, as
    in the formulas of DeepSeek-V3.2. objective.aggregation sequence_sum always uses planned."""

    @model_validator(mode="after")
    def _check(self) -> CorrectionSection:
        for name in ("token_band", "sequence_band", "geometric_band", "veto"):
            band: Band | None = getattr(self, name)
            if band is not None and not band[0] < 1 < band[1]:
                expected = "one number below 1 and one above (the ratio of equal policies is 1)"
                raise refused(f"objective.correction.{name}", list(band), expected)
        check_options("objective.correction.weight_options", self.weight_options, "objective.correction.weight", self.weight)
        return self


class KLSection(Section):
    """Penalty for moving away from the reference policy: the weights training started from."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty; 0: none. A penalty costs a second copy of the weights and an extra forward pass. Lower the weight if the
    policy does not move."""
    estimator: Estimator = "k3"
    """k1, k2, k3: Schulman's estimators, without importance weights; the gradient of k1 is zero in expectation. unbiased: k3 times the
    ratio of trainer to engine (DeepSeek-V3.2)."""


class ProcessSection(Section):
    """Process rewards: rewards of single steps, added to the reward of the whole response."""

    weight: NonNegativeFloat = 0.0
    """Weight of step rewards; 0: off. Step rewards are normalised by their mean and deviation over a group. The normalised rewards of a
    token's own step and all later steps are summed, multiplied by weight, and added to the token's advantage."""


class DistillSection(Section):
    """On-policy distillation: a teacher's log-probabilities of the tokens the policy sampled."""

    weight: NonNegativeFloat = 0.0
    """Weight; 0: off. weight * (log pi_teacher - log pi_engine) is added to a token's advantage."""
    clip: PositiveFloat | None = None
    """Clip log pi_teacher - log pi_engine to [-clip, clip], in nats; null: no clipping."""


class ObjectiveSection(Section):
    """The loss of a reinforcement-learning step: advantage, clipping, correction, penalties, aggregation."""

    advantage: Annotated[str, NameOrPlugin(get_args(Advantage))] = "grpo"
    """Advantage of a response. grpo: reward minus the group's mean, divided by the group's deviation; dr_grpo: the same without division;
    rloo: reward minus the mean of the other responses; opo: reward minus the group's mean weighted by length; pass_at_k: for a group's best
    response its lead over the second best, divided by the group's deviation, and 0 for the others; reinforce_plus_plus: reward normalised
    over the batch's tokens; reinforce_plus_plus_baseline: reward minus the group's mean, then normalised over the batch's tokens, which
    gives every group of equal rewards the same small advantage; gdpo: the sum of grpo's advantages of all metrics beside the reward,
    normalised over the batch; or your own function (docs/guides/objective.md)."""
    advantage_options: dict[str, Any] | None = None
    """Keyword arguments of your own function. For gdpo: weights, a mapping from names of metrics to numbers; null: each metric has weight
    1."""
    loss: Annotated[str, NameOrPlugin(("surrogate",))] = "surrogate"
    """Loss of a token. surrogate: minus the token's advantage times its clipped ratio, as the keys ratio and clip define it; or your own
    function, which replaces ratio, clip, clip_low, clip_high and dual_clip (docs/guides/objective.md)."""
    loss_options: dict[str, Any] | None = None
    """Keyword arguments of your own function."""
    ratio: Literal["token", "sequence"] = "token"
    """The ratio that is clipped: the current policy over the policy that proximal names. token: each token's own; sequence: the geometric
    mean over the sequence (GSPO)."""
    clip: Clip = "ppo"
    """ppo: clipped surrogate; cispo: clipped weight on the log-probability's gradient; dppo_tv, ipo: no gradient if the token's probability
    has fallen by more than clip_low or risen by more than clip_high (dppo_tv: only in the advantage's direction); none: REINFORCE weighted
    by the ratio."""
    clip_low: PositiveFloat = 0.2
    """Lower bound of the ratio: 1 - clip_low; no bound if clip_low is at least 1."""
    clip_high: PositiveFloat = 0.2
    """Upper bound of the ratio: 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1), FINITE, NUMBER] | None = None
    """With clip ppo: bound the loss of a token with negative advantage at this many times |advantage|, for example 3; null: no bound."""
    proximal: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    """Policy in the denominator of the clipped ratio. recompute: the trainer's policy before the batch, from an extra forward pass if
    updates_per_batch is above 1; loglinear: an approximation of that policy, interpolated between engine and trainer by each token's
    version, without an extra pass; behaviour: the engine's policy."""
    correction: CorrectionSection = CorrectionSection()
    score_centering: NonNegative = 0
    """Score centring: subtract from each token's gradient the mean over what the engine could have sampled, computed from this many most
    probable ids, for example 64, at most the vocabulary; 0: off. Excludes some values of other keys (docs/guides/objective.md)."""
    kl: KLSection = KLSection()
    process: ProcessSection = ProcessSection()
    distill: DistillSection = DistillSection()
    aggregation: Aggregation = "token_mean"
    """Averaging of the loss. token_mean: all tokens weigh the same; sequence_mean: all sequences do; prompt_mean: all prompts do;
    sequence_sum: each token weighs 1 / (sequences * rollout.max_new_tokens), as in Dr. GRPO."""
    updates_per_batch: Positive = 1
    """Optimizer steps per batch; must divide rollout.groups_per_step."""

    @property
    def own(self) -> dict[str, tuple[str, dict[str, Any] | None]]:
        """The user's own functions and their options, by the key that names the function."""
        every = {
            "objective.advantage": (self.advantage, self.advantage_options),
            "objective.loss": (self.loss, self.loss_options),
            "objective.correction.weight": (self.correction.weight, self.correction.weight_options),
        }
        return {key: named for key, named in every.items() if is_name(named[0])}

    @model_validator(mode="after")
    def _check(self) -> ObjectiveSection:
        weight = self.correction.weight
        if self.advantage == "gdpo":
            _check_weights(self.advantage_options)
        else:
            check_options("objective.advantage_options", self.advantage_options, "objective.advantage", self.advantage)
        check_options("objective.loss_options", self.loss_options, "objective.loss", self.loss)
        for name in _SURROGATE if is_name(self.loss) else ():
            default = ObjectiveSection.model_fields[name].default
            if getattr(self, name) != default:
                because = f"its default, as objective.loss is {self.loss}, which replaces it"
                expected = f"{'null' if default is None else default}, {because}"
                raise refused(f"objective.{name}", getattr(self, name), expected, "leave it out, or pass it in objective.loss_options")
        because = "because objective.score_centering is above 0"
        published = (
            ("loss", self.loss, "surrogate"),
            ("correction.weight", weight, "token none"),
            ("proximal", self.proximal, "recompute loglinear"),
        )
        for key, value, fit in published if self.score_centering else ():
            if value not in fit.split():
                expected = f"{fit.replace(' ', ' or ')} {because}, and nothing else has a published formula"
                raise refused(f"objective.{key}", value, expected)
        if self.proximal == "behaviour" and weight in ("token", "sequence"):
            expected = (
                f"recompute or loglinear because objective.correction.weight is {weight} (the ratio to the engine would be applied twice)"
            )
            raise refused("objective.proximal", "behaviour", expected, "set it back, or objective.correction.weight to none")
        if self.score_centering and self.correction.token_band and self.correction.denominator == "kept":
            expected = f"planned {because} and token_band is set (tokens that it rejects are centred, too)"
            raise refused("objective.correction.denominator", "kept", expected)
        if self.clip != "ppo" and self.dual_clip is not None:
            expected = f"null, as it bounds PPO's surrogate and objective.clip is {self.clip}; leave it out, or set objective.clip to ppo"
            raise refused("objective.dual_clip", self.dual_clip, expected)
        if self.ratio == "sequence" and self.clip in ("dppo_tv", "ipo"):
            expected = f"token because objective.clip is {self.clip}, which compares tokens' probabilities"
            raise refused("objective.ratio", "sequence", expected, "leave it out, or set objective.clip to ppo")
        if self.process.weight and self.advantage not in PROCESS_ADVANTAGES and not is_name(self.advantage):
            expected = f"0 because objective.advantage is {self.advantage} (only step rewards would then be divided by their deviation)"
            hint = f"set it to 0, or objective.advantage to {PROCESS_ADVANTAGES[0]}"
            raise refused("objective.process.weight", f"{self.process.weight:g}", expected, hint)
        return self


def _check_weights(options: Mapping[str, Any] | None) -> None:
    """Refuse options that gdpo does not accept."""
    weights = {"": 1.0} if options is None else options.get("weights")
    numbers = isinstance(weights, dict) and all(isinstance(one, int | float) and isfinite(one) for one in weights.values())
    if not weights or not numbers or (options or {}).keys() - {"weights"}:
        expected = "null, or {weights: {METRIC: number}} because objective.advantage is gdpo"
        raise refused("objective.advantage_options", options, expected)
