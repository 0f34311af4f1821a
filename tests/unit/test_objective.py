"""The whole objective against its formulae written out token by token in float64, values and gradients, over random configurations and
batches with extreme ratios; then the properties of single parts."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.objective import SUMS, Rows, Sums, policy_loss, scale, segments, token_weights
from tests.unit.example_counts import examples
from tests.unit.objective_reference import Sequence, Setting, Token, evaluate

NAN, INF = math.nan, math.inf
VERSION, MAX_NEW_TOKENS = 5, 7

usual = st.floats(-4, 0, width=32)
logprob = st.one_of(usual, usual, usual, st.sampled_from([0.0, -25.0, -69.0, -1e4, -1e30, -INF]))
token = st.builds(Token, logprob, logprob, logprob, logprob, st.integers(0, VERSION))


def close(x: float, *differences: float, version: int) -> Token:
    return Token(x, *(float(np.float32(x + d)) for d in differences), version)


near = st.builds(close, usual, *[st.floats(-0.25, 0.25)] * 3, version=st.integers(0, VERSION))
sequence = st.builds(
    Sequence, st.one_of(st.lists(token, max_size=5), st.lists(near, max_size=6)), st.floats(-3, 3, width=32), st.integers(0, 2)
)


def bands(low: float, high: float) -> st.SearchStrategy[tuple[float, float] | None]:
    return st.one_of(st.none(), st.tuples(st.floats(low, 0.999), st.floats(1.001, high)))


corrections = st.fixed_dictionaries(
    {
        "weight": st.sampled_from(["token", "sequence", "none"]),
        "cap": st.sampled_from([None, 1.5, 2.0, 1e30]),
        "token_band": bands(0.0, 5.0),
        "sequence_band": bands(0.0, 5.0),
        "geometric_band": bands(0.5, 2.0),
        "veto": bands(0.0, 100.0),
        "opsm_delta": st.sampled_from([None, None, 1e-4, 0.1]),
        "max_age": st.sampled_from([None, None, 0, 2]),
        "denominator": st.sampled_from(["kept", "planned"]),
    }
)
objectives = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from(["token", "sequence"]),
        "clip": st.sampled_from(["ppo", "cispo", "dppo_tv", "ipo", "none"]),
        "clip_low": st.sampled_from([3e-4, 0.2, 1.0]),
        "clip_high": st.sampled_from([4e-4, 0.28, 4.0]),
        "dual_clip": st.sampled_from([None, 1.5, 3.0]),
        "proximal": st.sampled_from(["recompute", "loglinear", "behaviour"]),
        "correction": corrections,
        "kl": st.fixed_dictionaries(
            {"coefficient": st.sampled_from([0.0, 0.1]), "estimator": st.sampled_from(["k1", "k2", "k3", "unbiased"])}
        ),
        "aggregation": st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "prompt_mean"]),
    }
)


def section(values: dict[str, Any]) -> ObjectiveSection:
    """Of any values, those that contradict others replaced."""
    wanted = dict(values)
    if wanted.get("clip", "ppo") != "ppo":
        wanted["dual_clip"] = None
    if wanted.get("clip") in ("dppo_tv", "ipo"):
        wanted["ratio"] = "token"
    if wanted.get("proximal") == "behaviour":
        wanted["correction"] = wanted.get("correction", {}) | {"weight": "none"}
    return ObjectiveSection(**wanted)


def laid_out(sequences: Many[Sequence], weights: np.ndarray) -> tuple[torch.Tensor, Rows]:
    """A micro-batch: before each token sequence a prompt row, then padding; both full of what must be ignored."""
    nothing = [Token(NAN, NAN, NAN, NAN, -1)]
    each = [nothing + s.tokens for s in sequences]
    flat = [t for row in each for t in row] + nothing * 2
    mask = [t is not nothing[0] for t in flat]
    owner = [i for i, row in enumerate(each) for _ in row]

    def of(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in flat], dtype=dtype)

    rows = Rows(
        mask=torch.tensor(mask),
        weights=torch.tensor([float(weights[i]) for i in owner] + [NAN, INF], dtype=torch.float32),
        advantages=torch.tensor([sequences[i].advantage for i in owner] + [NAN, INF], dtype=torch.float32),
        behaviour=of("behaviour"),
        versions=of("version", torch.int32),
        pure=torch.tensor(mask),
        segments=segments([len(row) for row in each], len(flat)),
        sequences=len(sequences),
        proximal=of("old"),
        reference=of("reference"),
    )
    return of("new").requires_grad_(), rows


def step(sequences: Many[Sequence], at: Setting, parts: int) -> tuple[float, list[list[float]], Sums, list[Sums]]:
    """The loss of a whole step from `parts` micro-batches, its gradients by sequence, the sums, and those of each micro-batch."""
    weights = token_weights(
        [len(s.tokens) for s in sequences], at.section.aggregation, [s.group for s in sequences], max_new_tokens=at.max_new_tokens
    )
    loss, gradients, seen = 0.0, {}, []
    for part in range(parts):
        members = range(len(sequences))[part::parts]
        logprobs, rows = laid_out([sequences[i] for i in members], weights[list(members)])
        value, sums = policy_loss(logprobs, rows, at.section, at.version, progress=at.progress)
        value.backward()
        assert (logprobs.grad[~rows.mask] == 0).all()
        loss += value.item()
        seen.append(sums)
        for place, i in enumerate(members):
            gradients[i] = logprobs.grad[rows.mask & (rows.segments == place)].tolist()
    total = {name: sum((s[name] for s in seen), torch.zeros(shape, dtype=torch.float64)) for name, shape in SUMS.items()}
    by = scale(total)
    return loss * by, [[g * by for g in gradients[i]] for i in range(len(sequences))], total, seen


@settings(max_examples=examples(400), deadline=None)
@example(
    {"ratio": "sequence", "clip": "ppo", "clip_low": 3e-4, "clip_high": 4e-4, "proximal": "behaviour", "kl": {"coefficient": 0.0}},
    [
        Sequence([Token(0.0, 0.0, 0.0, 0.0, 0)], 1.0, 0),
        Sequence([*[Token(0.0, 0.0, 0.0, 0.0, 0)] * 3, Token(0.0, -1e4, 0.0, 0.0, 0), Token(-1e4, -1.023955, 0.0, 0.0, 0)], -1.0, 0),
    ],
    0.0,
    1,
)
@given(objectives, st.lists(sequence, max_size=5), st.sampled_from([0.0, 0.25]), st.integers(1, 3))
def test_the_objective_is_its_formula(values: dict[str, Any], sequences: list[Sequence], progress: float, parts: int) -> None:
    at = Setting(section(values), VERSION, progress, MAX_NEW_TOKENS)
    expected = evaluate(sequences, at)
    loss, gradients, sums, seen = step(sequences, at, parts)
    assert np.isfinite([loss, *(g for row in gradients for g in row)]).all()
    assert loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-5 + 2e-5 * expected.magnitude)
    largest = max((abs(g) for row in expected.gradients for g in row), default=0.0)
    for got, want in zip(gradients, expected.gradients, strict=True):
        assert got == pytest.approx(want, rel=2e-4, abs=1e-6 + 2e-6 * largest)
    assert int(sums["tokens"]) == sum(len(s.tokens) for s in sequences)
    assert int(sums["kept"]) == sum(k for row in expected.kept for k in row)
    for one in seen:
        assert {name: tuple(value.shape) for name, value in one.items()} == dict(SUMS)
        assert all(bool(value.isfinite().all()) for value in one.values())


def rows(**given_: list[float]) -> Rows:
    """One sequence; what is not given is 0, weights and advantages 1."""
    count = len(next(iter(given_.values())))
    plain = {"weights": [1.0] * count, "advantages": [1.0] * count, "behaviour": [0.0] * count, "proximal": [0.0] * count} | given_
    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in plain.items()}
    mask = torch.tensor([w > 0 for w in plain["weights"]])
    return Rows(
        mask=mask, versions=torch.zeros(count, dtype=torch.int32), pure=mask, segments=segments([count], count), sequences=1, **tensors
    )


def loss_and_gradient(logprobs: list[float], at: Rows, **options: Any) -> tuple[float, list[float], Sums]:
    current = torch.tensor(logprobs, requires_grad=True)
    plain = {"correction": {"weight": "none"}}
    loss, sums = policy_loss(current, at, ObjectiveSection(**plain | options), 0)  # type: ignore[arg-type]
    loss.backward()
    return loss.item(), current.grad.tolist(), sums


def test_the_first_update_is_its_own_proximal_policy() -> None:
    at = rows(behaviour=[-0.5, -0.5], advantages=[2.0, -1.0])
    first = Rows(**{**vars(at), "proximal": None})
    loss, gradient, _ = loss_and_gradient([-0.1, -0.9], first, correction={"cap": 1.2})
    weight = [1.2, math.exp(-0.4)]
    assert loss == pytest.approx(-2 * weight[0] + weight[1], rel=1e-5)
    assert gradient == pytest.approx([-2 * weight[0], weight[1]], rel=1e-5)
    with pytest.raises(InvariantBroken, match="several updates"):
        loss_and_gradient([-0.1, -0.9], first, updates_per_batch=2)
    assert loss_and_gradient([-0.1, -0.9], first, updates_per_batch=2, proximal="loglinear")[0] == pytest.approx(-1, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"ratio": "sequence"}, {"clip": "cispo"}, {"clip": "ipo"}, {"clip": "none"}])
def test_a_nan_in_a_sampled_row_reaches_the_loss(options: dict[str, Any]) -> None:
    """Whatever the bands: a token that cannot be judged is not rejected quietly."""
    rules = {"token_band": [0.5, 2.0], "sequence_band": [0.5, 2.0], "geometric_band": [0.5, 2.0], "veto": [0.1, 9.0], "opsm_delta": 0.1}
    for name in ("behaviour", "proximal"):
        at = rows(**{name: [-0.1, NAN]})
        assert math.isnan(loss_and_gradient([0.0, 0.0], at, correction=rules, **options)[0])
    assert math.isnan(loss_and_gradient([-0.1, NAN], rows(behaviour=[-0.1, -0.1]), correction=rules, **options)[0])


def test_the_penalty_compares_over_the_whole_vocabulary_where_it_can() -> None:
    """Tokens were sampled from a part of it, over which the ratio is; the reference policy knows no such part."""
    at = Rows(**{**vars(rows(behaviour=[-0.5], advantages=[0.0])), "reference": torch.tensor([-2.0])})
    masked, full = torch.tensor([-0.5], requires_grad=True), torch.tensor([-1.4], requires_grad=True)
    only = ObjectiveSection(kl={"coefficient": 1.0, "estimator": "k2"})  # type: ignore[arg-type]
    loss, sums = policy_loss(masked, at, only, 0, unmasked=full)
    loss.backward()
    assert loss.item() == pytest.approx(0.6**2 / 2, rel=1e-5)
    assert (full.grad.item(), masked.grad.item()) == (pytest.approx(0.6, rel=1e-5), 0.0)
    assert float(sums["kl_reference"]) == pytest.approx(math.exp(-0.6) - 1 + 0.6, rel=1e-5)
