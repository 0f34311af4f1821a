"""Results of Hugging Face's model and autograd for the case, in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncmoe.trainer import objective
from tests import families
from tests.ranks import case


def write(path: Path, variant: str, trained: bool = True) -> None:
    """Write the references under `path`; only hf and reference.pt, without losses and norms, if the model is not to be `trained`.

    hf: the model; supervised, policy, credited: its gradients of these losses; trained: its weights after the steps; all as Hugging
    Face checkpoints.
    reference.pt: logits, log-probabilities, losses and norms.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = families.with_one_eps(AutoModelForCausalLM.from_config(case.hf_config(variant)).eval())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter) if "norm" in name else parameter + 0.05 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(std=0.1)
    model.save_pretrained(path / "hf")

    with torch.no_grad(), _counted(model) as experts:
        logits = [_logits(model, ids) for ids in case.tokens()]
        sampled = [_logprobs(x, ids, case.TEMPERATURE).numpy() for x, ids in zip(logits, case.tokens(), strict=True)]
    rng = np.random.default_rng(2)
    noise = [rng.normal(0, 0.2, len(values)) * (i % 2) for i, values in enumerate(sampled)]
    behaviour = [np.minimum(values + n, 0).astype(np.float32) for values, n in zip(sampled, noise, strict=True)]
    proximal = [(values + rng.normal(0, 0.1, len(values))).astype(np.float32) for values in sampled]

    reference: dict[str, Any] = {"experts": experts, "logits": logits, "logprobs": sampled, "behaviour": behaviour, "proximal": proximal}
    if trained:
        for name, loss_of in (("supervised", _supervised), ("policy", _policy), ("credited", _credited)):
            model.zero_grad()
            loss = loss_of(model, behaviour, proximal)
            loss.backward()
            reference[name] = {"loss": loss.item(), "grad_norm": _norm(model)}
            _save_gradients(model, path / name)
        reference["steps"] = _train(model, lambda: _supervised(model, behaviour, proximal))
        model.save_pretrained(path / "trained")
    torch.save(reference, path / "reference.pt")


@contextmanager
def _counted(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """By layer, the tokens that go to each expert, float64[experts], of layers whose routers have a selection bias."""
    gates = {i: gate for i, gate in families.routers(model).items() if hasattr(gate, "e_score_correction_bias")}
    counts = {i: torch.zeros(len(gate.e_score_correction_bias), dtype=torch.float64) for i, gate in gates.items()}

    def count(number: int, _: Any, out: Any) -> None:
        found = [*counts.values()][number]
        found += out[2].flatten().bincount(minlength=len(found))

    with families.hooked(gates.values(), count):
        yield counts


def _logits(model: Any, ids: np.ndarray) -> torch.Tensor:
    result: torch.Tensor = model(torch.from_numpy(ids).long()[None]).logits[0].float()
    return result


def _logprobs(logits: torch.Tensor, ids: np.ndarray, temperature: float) -> torch.Tensor:
    """float[T]: of each token given those before it; 0 for the first."""
    targets = torch.from_numpy(ids[1:]).long()[:, None]
    return torch.cat([torch.zeros(1), torch.log_softmax(logits[:-1] / temperature, dim=1).gather(1, targets).squeeze(1)])


def _all(model: Any, temperature: float) -> torch.Tensor:
    return torch.cat([_logprobs(_logits(model, ids), ids, temperature) for ids in case.tokens()])


def _rows(behaviour: list[np.ndarray]) -> tuple[torch.Tensor, list[int]]:
    made = case.trajectories(behaviour)
    return torch.from_numpy(np.concatenate([t.loss_mask for t in made.values()])), [int(t.loss_mask.sum()) for t in made.values()]


def _supervised(model: Any, behaviour: list[np.ndarray], proximal: list[np.ndarray]) -> torch.Tensor:
    mask, _ = _rows(behaviour)
    return -_all(model, 1.0)[mask].mean()


def _policy(model: Any, behaviour: list[np.ndarray], proximal: list[np.ndarray]) -> torch.Tensor:
    advantages = objective.group_advantages(case.REWARDS, case.GROUPS, "grpo")
    return _surrogate(model, behaviour, proximal, np.repeat(advantages, case.LENGTHS))


def _credited(model: Any, behaviour: list[np.ndarray], proximal: list[np.ndarray]) -> torch.Tensor:
    """The same with what steps and the teacher add, a token at a time."""
    made = case.trajectories(behaviour)
    outcome = objective.group_advantages(case.REWARDS, case.GROUPS, "grpo")
    process, distill = case.CREDIT["process"]["weight"], case.CREDIT["distill"]
    each = []
    for i, t in made.items():
        steps = [float(r) for o in made.values() if o.group == t.group and o.rewards is not None for r in o.rewards if r == r]
        mean, deviation = statistics.fmean(steps), statistics.stdev(steps)
        for at in range(len(t)):
            later = sum((float(r) - mean) / (deviation + 1e-6) for r in t.rewards[at:] if r == r)
            gap = max(-distill["clip"], min(distill["clip"], float(t.teacher[at]) - float(t.logprobs[at])))
            each.append(float(outcome[i]) + process * later + distill["weight"] * gap)
    return _surrogate(model, behaviour, proximal, np.array(each, np.float32))


def _surrogate(model: Any, behaviour: list[np.ndarray], proximal: list[np.ndarray], advantages: np.ndarray) -> torch.Tensor:
    """The mean over sequences of the mean over tokens, written out. advantages: float32[all tokens]."""
    mask, sampled = _rows(behaviour)
    old, engine, new = (
        torch.from_numpy(np.concatenate(proximal)),
        torch.from_numpy(np.concatenate(behaviour)),
        _all(model, case.TEMPERATURE),
    )
    each = torch.from_numpy(advantages)
    low, high, cap = case.OBJECTIVE["clip_low"], case.OBJECTIVE["clip_high"], case.OBJECTIVE["correction"]["cap"]
    ratio = (new - old).exp()
    token = -torch.minimum(ratio * each, ratio.clamp(1 - low, 1 + high) * each) * (old - engine).exp().clamp(max=cap)
    owner = torch.from_numpy(np.repeat(np.arange(len(sampled)), case.LENGTHS))
    return torch.stack([token[mask & (owner == i)].mean() for i in range(len(sampled))]).mean()


def _norm(model: Any) -> float:
    return float(torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None)))


def _save_gradients(model: Any, path: Path) -> None:
    """Write the gradients under the names of the weights, which have the same layout."""
    weights = {name: p.data for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.grad.clone()
    model.save_pretrained(path)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]


def _train(model: Any, loss_of: Callable[[], torch.Tensor]) -> list[dict[str, float]]:
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrices], "weight_decay": case.WEIGHT_DECAY * matrices}
        for matrices in (True, False)  # norms do not decay
    ]
    adam = torch.optim.AdamW(groups, lr=case.LR, betas=(0.9, 0.95), eps=case.EPS)
    seen = []
    for _ in range(case.STEPS):
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.CLIP_GRAD)
        adam.step()
        seen.append({"loss": loss.item(), "grad_norm": float(norm)})
    return seen
