"""Results of Hugging Face's model with recorded experts, and probabilities over recorded ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from asyncmoe.models import family_of
from asyncmoe.trajectory import TOP, Routing, Trajectory, encode, encode_masks, encode_routes
from tests import families
from tests.ranks import case
from tests.ranks.oracle import _logits, _save_gradients
from tests.unit.kept_trajectory import masks_of


def write(path: Path, variant: str) -> None:
    """Write a batch and references under `path`.

    The batch's experts are those of a model; hf is the same model with another router, forced to them: kept.msgpack (trajectories with
    routes and masks), kept.pt (logits, log-probabilities, the loss, the share of tokens whose experts differ, by layer, and for each
    token the number of such layers), kept (gradients, as a checkpoint).
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(4)
    torch.set_num_threads(1)
    model = families.with_one_eps(AutoModelForCausalLM.from_config(case.hf_config(variant)).eval())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    recorded = [routes(model, ids) for ids in case.tokens()]
    with torch.no_grad():
        for gate in families.routers(model).values():
            gate.weight.add_(0.05 * torch.randn_like(gate.weight))
            if hasattr(gate, "e_score_correction_bias"):
                gate.e_score_correction_bias.normal_(std=0.1)
    model.save_pretrained(path / "hf")

    saved = json.loads((path / "hf" / "config.json").read_text())
    routing = family_of(saved).routing(saved)
    batch = trajectories([chosen.numpy() for chosen in recorded], routing)
    logits, logprobs, differ = [], [], torch.zeros(len(routing.layers), dtype=torch.float64)
    by_row = [torch.zeros(len(t) - 1, dtype=torch.int64) for t in batch]
    for trajectory, chosen, rows_of_it in zip(batch, recorded, by_row, strict=True):
        with forced(model, chosen, differ, rows_of_it):
            logits.append(_logits(model, trajectory.tokens[:-1]))
        logprobs.append(over_support(logits[-1], trajectory))
    rows = sum(len(t) - 1 for t in batch)
    mask = torch.from_numpy(np.concatenate([t.loss_mask for t in batch]))
    mean = [(torch.from_numpy(np.exp(t.top["logprob"])) * over_top(of, t)).sum() for of, t in zip(logits, batch, strict=True)]
    loss = (sum(mean) - torch.cat(logprobs)[mask].sum()) / mask.sum()
    loss.backward()
    _save_gradients(model, path / "kept")
    behaviour = [values.detach().numpy() for values in logprobs]
    batch = [replace(t, logprobs=np.where(t.loss_mask, b, 0.0).astype(np.float32)) for t, b in zip(batch, behaviour, strict=True)]
    (path / "kept.msgpack").write_bytes(msgspec.msgpack.encode([[bytes(frame) for frame in encode(t)] for t in batch]))
    reference = {
        "logits": [x.detach() for x in logits],
        "logprobs": behaviour,
        "loss": loss.item(),
        "differ": (differ / rows).tolist(),
        "by_row": [counts.tolist() for counts in by_row],
    }
    torch.save(reference, path / "kept.pt")


def routes(model: Any, ids: np.ndarray) -> torch.Tensor:
    """int64[len(ids) - 1, gates, top_k]: of all tokens that have been through the model when the last is sampled."""
    chosen: list[torch.Tensor] = []
    with torch.no_grad(), families.hooked(families.routers(model).values(), lambda _number, _gate, out: chosen.append(out[2])):
        _logits(model, ids[:-1])
    return torch.stack(chosen, dim=1)


@contextmanager
def forced(model: Any, chosen: torch.Tensor, differ: torch.Tensor, by_row: torch.Tensor) -> Iterator[None]:
    """Make every gate route to these experts, with its own weights among them.

    Args:
        chosen: int64[rows, gates, top_k].
        differ: float64[gates]; the rows for which the gate itself would have chosen others are added.
        by_row: int64[rows]; the gates that would have chosen others are added.
    """

    def force(number: int, gate: Any, out: Any) -> Any:
        logits, _, own = out
        ids = chosen[:, number]
        others = (own.sort(1).values != ids.sort(1).values).any(1)
        differ[number] += others.sum()
        by_row.add_(others)
        return logits, shares(gate, logits.gather(1, ids)), ids

    with families.hooked(families.routers(model).values(), force):
        yield


def shares(gate: Any, logits: torch.Tensor) -> torch.Tensor:
    """Weights of chosen experts, from their logits: softmax, or sigmoid scores divided by their sum and scaled, in which the selection bias
    has no part."""
    if not hasattr(gate, "e_score_correction_bias"):
        return logits.softmax(1)
    scores = logits.sigmoid()
    return gate.routed_scaling_factor * scores / scores.sum(1, keepdim=True)


def trajectories(recorded: list[np.ndarray], routing: Routing) -> list[Trajectory]:
    """The case's, with these routes, with further ids of all sampled tokens, and with masks on all but every fifth."""
    random = np.random.default_rng(6)
    made = []
    for i, plain in case.trajectories([np.zeros(n, np.float32) for n in case.LENGTHS]).items():
        supports: list[list[int]] = []
        for place, (token, sampled) in enumerate(zip(plain.tokens.tolist(), plain.loss_mask, strict=True)):
            others = random.choice(case.VOCAB, random.integers(1, 30), replace=False).tolist()
            supports.append(sorted({token, *others}) if sampled and place % 5 else [])
        reported = np.zeros((len(recorded[i]), routing.all_layers, routing.top_k), np.int32)  # as an engine does, of all layers
        reported[:, list(routing.layers)] = recorded[i]
        packed = encode_routes(reported, routing, plain.key)
        top = np.zeros((int(plain.loss_mask.sum()), 4), TOP)
        top["id"] = np.argsort(random.random((len(top), case.VOCAB)), axis=1)[:, :4]
        top["logprob"] = -random.exponential(1.0, top.shape)
        made.append(replace(plain, routes=packed, masks=encode_masks(masks_of(supports, case.VOCAB), plain.key), top=top))
    return made


def over_support(logits: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
    """float[T]: of each token given those before it, over its ids; 0 for the first."""
    rows = range(1, len(trajectory))
    values = [row[int(trajectory.tokens[place])] for place, row in zip(rows, normalised(logits, trajectory, rows), strict=True)]
    return torch.stack([torch.zeros(()), *values])


def over_top(logits: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
    """float[n, K]: of the most probable ids at the sampled tokens, over the token's ids."""
    rows = normalised(logits, trajectory, np.flatnonzero(trajectory.loss_mask))
    return torch.stack([row[ids.tolist()] for row, ids in zip(rows, trajectory.top["id"], strict=True)])


def normalised(logits: torch.Tensor, trajectory: Trajectory, places: Iterable[int]) -> list[torch.Tensor]:
    """The logits of the tokens at these places, divided by the temperature, minus the log-normaliser over the token's ids."""
    from asyncmoe.trajectory import decode_masks

    masks, found = decode_masks(trajectory.masks, trajectory.key), []
    for place in places:
        row = logits[place - 1] / case.TEMPERATURE
        ids = torch.from_numpy(masks.ids[masks.offsets[place] : masks.offsets[place + 1]].astype(np.int64))
        found.append(row - (row[ids] if len(ids) else row).logsumexp(0))
    return found
