"""What Hugging Face's model says when its tokens go through recorded experts and its probabilities are over recorded ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from asyncmoe.record import Masks, Routing, encode_masks, encode_routes
from asyncmoe.trajectory import Trajectory, encode
from tests.ranks import case
from tests.ranks.oracle import _logits, _save_gradients

ROUTING = Routing(all_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)


def write(path: Path) -> None:
    """Write a batch and references under `path`.

    The batch's experts are those of a model; hf is the same model with another router, forced to them: kept.msgpack (trajectories with
    routes and masks), kept.pt (logits, log-probabilities, the loss, the share of tokens whose experts differ, by layer), kept
    (gradients, as a checkpoint).
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(4)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(case.hf_config("plain")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    recorded = [routes(model, ids) for ids in case.tokens()]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.add_(0.05 * torch.randn_like(layer.mlp.gate.weight))
    model.save_pretrained(path / "hf")

    batch = trajectories([chosen.numpy() for chosen in recorded])
    logits, logprobs, differ = [], [], torch.zeros(4, dtype=torch.float64)
    for trajectory, chosen in zip(batch, recorded, strict=True):
        with forced(model, chosen, differ):
            logits.append(_logits(model, trajectory.tokens[:-1]))
        logprobs.append(over_support(logits[-1], trajectory))
    rows = sum(len(t) - 1 for t in batch)
    mask = torch.from_numpy(np.concatenate([t.loss_mask for t in batch]))
    loss = -torch.cat(logprobs)[mask].mean()
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
    }
    torch.save(reference, path / "kept.pt")


def routes(model: Any, ids: np.ndarray) -> torch.Tensor:
    """int64[len(ids) - 1, layers, top_k]: of all tokens that have been through the model when the last is sampled."""
    chosen: list[torch.Tensor] = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, out: chosen.append(out[2])) for layer in model.model.layers]
    with torch.no_grad():
        _logits(model, ids[:-1])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


@contextmanager
def forced(model: Any, chosen: torch.Tensor, differ: torch.Tensor) -> Iterator[None]:
    """Every gate gives these experts the weights that it would give them among themselves.

    Args:
        chosen: int64[rows, layers, top_k].
        differ: float64[layers]; the rows for which the gate itself would have chosen others are added.
    """

    def force(layer: int) -> Any:
        def hook(_gate: Any, _inputs: Any, out: Any) -> Any:
            scores, _, own = out
            ids = chosen[:, layer]
            differ[layer] += (own.sort(1).values != ids.sort(1).values).any(1).sum()
            return scores, scores.gather(1, ids).softmax(1), ids

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(force(i)) for i, layer in enumerate(model.model.layers)]
    yield
    for hook in hooks:
        hook.remove()


def trajectories(recorded: list[np.ndarray]) -> list[Trajectory]:
    """The case's, with these routes, and with masks on all sampled tokens but every fifth."""
    random = np.random.default_rng(6)
    made = []
    for i, plain in case.trajectories([np.zeros(n, np.float32) for n in case.LENGTHS]).items():
        supports: list[list[int]] = []
        for place, (token, sampled) in enumerate(zip(plain.tokens.tolist(), plain.loss_mask, strict=True)):
            others = random.choice(case.VOCAB, random.integers(1, 30), replace=False).tolist()
            supports.append(sorted({token, *others}) if sampled and place % 5 else [])
        offsets = np.cumsum([0, *map(len, supports)]).astype(np.int32)
        masks = Masks(offsets, np.array([x for row in supports for x in row], np.int32), case.VOCAB)
        packed = encode_routes(np.ascontiguousarray(recorded[i].astype(np.int32)), ROUTING, plain.key)
        made.append(replace(plain, routes=packed, masks=encode_masks(masks, plain.key)))
    return made


def over_support(logits: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
    """float[T]: of each token given those before it, over its ids; 0 for the first."""
    from asyncmoe.record import decode_masks

    assert trajectory.masks is not None
    masks = decode_masks(trajectory.masks, trajectory.key)
    values = [torch.zeros(())]
    for place in range(1, len(trajectory)):
        row = logits[place - 1] / case.TEMPERATURE
        ids = torch.from_numpy(masks.ids[masks.offsets[place] : masks.offsets[place + 1]].astype(np.int64))
        values.append(row[int(trajectory.tokens[place])] - (row[ids] if len(ids) else row).logsumexp(0))
    return torch.stack(values)
