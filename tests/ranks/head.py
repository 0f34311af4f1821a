"""Worker: the output layer in blocks next to torch's log_softmax, and to Megatron's own output layer and cross entropy. `head.py RESULT`"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from asyncmoe.models import head_blocks
from asyncmoe.platform import megatron
from asyncmoe.trainer.data.replay_data import Support
from asyncmoe.trainer.model import gpt as model
from asyncmoe.trainer.model import mesh
from asyncmoe.trainer.model.logprobs import target_logprobs
from tests.ranks import group, memory
from tests.ranks.leaving import leave

megatron.prepare()

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402

from asyncmoe.platform.megatron.packed_attention import PackedSequences  # noqa: E402  only after the platform is prepared
from asyncmoe.trainer.model import output_head  # noqa: E402

ROWS = 64
IDS = 100
"""Of a block; a rank has 256 of the model's 512."""
TEMPERATURE = 0.7
LAYOUTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bfloat16": {},
    "bfloat16, tied": {"tie_word_embeddings": True},
    "adapters": {},
}


def main(result: Path) -> None:
    group.begin()
    with mock.patch.object(head_blocks, "width", lambda rows, vocabulary, cpu: min(vocabulary, IDS)):
        mine = {"slices": slices(), "model": {name: of_model(name) for name in LAYOUTS}}
    every = group.everyone(mine)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(every))
    dist.destroy_process_group()


def slices() -> dict[str, float]:
    """Errors of a vocabulary that ranks share, relative to the largest element; with supports of two thirds of the rows."""
    rank, ranks, vocabulary = dist.get_rank(), dist.get_world_size(), 512
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, 32).requires_grad_(), (torch.randn(vocabulary, 32) * 1.5).requires_grad_()
    targets, upstream = torch.randint(0, vocabulary, (ROWS,)), torch.randn(2, ROWS)
    kept = torch.rand(ROWS, vocabulary) < 0.1
    kept[torch.arange(ROWS), targets] = True
    kept[::3] = False
    kept[1] = False
    kept[1, 5], targets[1] = True, 5  # a support of which one rank has nothing
    logits = hidden @ weight.t() / TEMPERATURE
    full = torch.log_softmax(logits, dim=1)
    masked = torch.log_softmax(torch.where(kept | ~kept.any(1, keepdim=True), logits, -torch.inf), dim=1)
    wanted = [one.gather(1, targets[:, None]).squeeze(1) for one in (masked, full)]
    of_hidden, of_weight = torch.autograd.grad(wanted, (hidden, weight), tuple(upstream))

    part = slice(rank * vocabulary // ranks, (rank + 1) * vocabulary // ranks)
    mine = weight.detach()[part].clone().requires_grad_()
    support = Support(kept.any(1), *kept.nonzero(as_tuple=True))
    got = target_logprobs(hidden, mine, targets, TEMPERATURE, dist.group.WORLD, support, entropy=True)
    assert got.whole is not None
    assert got.entropy is not None
    gradients = torch.autograd.grad((got.sampled, got.whole), (hidden, mine), tuple(upstream))
    dist.all_reduce(gradients[0])
    pairs = {
        "sampled": (got.sampled, wanted[0]),
        "whole": (got.whole, wanted[1]),
        "entropy": (got.entropy, -(full.exp() * full).sum(1)),
        "of hidden": (gradients[0], of_hidden),
        "of weight": (gradients[1], of_weight[part]),
    }
    return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}


def of_model(name: str) -> dict[str, Any]:
    """Errors of log-probabilities and of all gradients for all rows, for some and for none, relative to the largest of a tensor."""
    layout = f"tp=2,dtype={'bfloat16' if 'bfloat16' in name else 'float32'}" + (",lora=true" if name == "adapters" else "")
    config, hf = memory.configured(layout, dist.get_world_size())
    place = mesh.start(config.trainer)
    built = model.build({**hf, "num_hidden_layers": 2, **LAYOUTS[name]}, config, place)
    torch.manual_seed(1)
    for parameter in built.chunks[0].parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.02)  # half of an adapter, which would hide the gradient of the other
    pass_ = Pass(built, torch.randint(0, 512, (1, ROWS)), torch.randint(0, 512, (ROWS,)), torch.randn(ROWS))
    found: dict[str, Any] = {}
    for which, mask in (("all", torch.ones(ROWS)), ("some", (torch.arange(ROWS) % 3 == 1).float()), ("none", torch.zeros(ROWS))):
        wanted, of_wanted = pass_.megatrons(mask)
        got, of_got = pass_.ours(mask)
        found[which] = {
            "logprobs": float((got - wanted).abs().max()),
            "gradients": max(float((of_got[key] - one).abs().max() / one.abs().max().clamp(min=1e-12)) for key, one in of_wanted.items()),
        }
    head = "embedding.word_embeddings.weight" if "tied" in name else "output_layer.weight"
    found["head is trained"] = head in of_got
    leave()
    return found


@dataclass(frozen=True)
class Pass:
    """A micro-batch of two packed sequences, and the gradients of its rows' log-probabilities."""

    built: model.Model
    tokens: torch.Tensor
    targets: torch.Tensor
    upstream: torch.Tensor

    def megatrons(self, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of all rows, by Megatron's output layer and its cross entropy of float32 logits."""
        logits = self._forward()[0].float()[:, None] / TEMPERATURE
        logprobs = -vocab_parallel_cross_entropy(logits, self.targets[:, None])[:, 0]
        return self._backward(logprobs * mask)

    def ours(self, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = None if mask.all() else mask.nonzero().squeeze(1)
        with output_head.replaced(rows, self.built.chunks[0]) as head:
            hidden = self._forward()
        assert hidden.shape == (1, int(mask.sum()), self.built.hf["hidden_size"])
        found = target_logprobs(hidden[0], head.weight, head.take(self.targets), TEMPERATURE, self.built.mesh.tp_group)
        return self._backward(head.spread(found.sampled, ROWS))

    def _forward(self) -> torch.Tensor:
        starts = torch.tensor([0, ROWS // 4, ROWS], dtype=torch.int32)
        packed, positions = PackedSequences(starts, starts.tolist(), 3 * ROWS // 4), torch.arange(ROWS)[None]
        kwargs = {"fp32_output": False} if self.built.dtype == torch.bfloat16 else {}
        made: torch.Tensor = self.built.ddp[0](self.tokens, positions, None, packed_seq_params=packed, **kwargs)
        return made

    def _backward(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.built.ddp[0].zero_grad_buffer()
        (logprobs * self.upstream).sum().backward()
        named = self.built.chunks[0].named_parameters()
        assert all(parameter.grad is None for parameter in self.built.chunks[0].parameters())
        return logprobs.detach(), {name: one.main_grad.clone() for name, one in named if one.requires_grad}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
