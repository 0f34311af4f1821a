"""Worker: the output layer in blocks, on ranks that share a vocabulary, against torch's log_softmax. `head.py RESULT`"""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from asyncmoe.models import head_blocks
from asyncmoe.trainer.data.replay_data import Support
from asyncmoe.trainer.model.logprobs import target_logprobs
from tests.ranks import group

ROWS = 64
IDS = 100
"""Of a block; a rank has 256 of the vocabulary's 512."""
TEMPERATURE = 0.7


def main() -> list[dict[str, float]]:
    with mock.patch.object(head_blocks, "width", lambda rows, vocabulary, cpu: min(vocabulary, IDS)):
        return group.everyone(slices())


def slices() -> dict[str, float]:
    """Errors of a vocabulary that ranks share, relative to the largest element; with supports of two thirds of the rows."""
    rank, ranks, vocabulary = dist.get_rank(), dist.get_world_size(), 512
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, 32).requires_grad_(), (torch.randn(vocabulary, 32) * 1.5).requires_grad_()
    targets, upstream = torch.randint(0, vocabulary, (ROWS,)), torch.randn(2, ROWS)
    top, of_top = targets[:, None] * torch.tensor([1, 3, 5]) % vocabulary, torch.randn(ROWS, 3)
    kept = torch.rand(ROWS, vocabulary) < 0.1
    kept[torch.arange(ROWS), targets] = True
    kept[::3] = False
    kept[1] = False
    kept[1, 5], targets[1] = True, 5  # a support of which one rank has nothing
    logits = hidden @ weight.t() / TEMPERATURE
    full = torch.log_softmax(logits, dim=1)
    masked = torch.log_softmax(torch.where(kept | ~kept.any(1, keepdim=True), logits, -torch.inf), dim=1)
    wanted = [one.gather(1, targets[:, None]).squeeze(1) for one in (masked, full)]
    wanted.append(logits.gather(1, top) - logits.gather(1, targets[:, None]) + wanted[0][:, None])
    of_hidden, of_weight = torch.autograd.grad(wanted, (hidden, weight), (*upstream, of_top))

    part = slice(rank * vocabulary // ranks, (rank + 1) * vocabulary // ranks)
    mine = weight.detach()[part].clone().requires_grad_()
    support = Support(kept.any(1), *kept.nonzero(as_tuple=True))
    got = target_logprobs(hidden, mine, targets, TEMPERATURE, dist.group.WORLD, support, entropy=True, top=top)
    gradients = torch.autograd.grad((got.sampled, got.whole, got.top), (hidden, mine), (*upstream, of_top))
    dist.all_reduce(gradients[0])
    pairs = {
        "sampled": (got.sampled, wanted[0]),
        "whole": (got.whole, wanted[1]),
        "top": (got.top, wanted[2]),
        "entropy": (got.entropy, -(full.exp() * full).sum(1)),
        "of hidden": (gradients[0], of_hidden),
        "of weight": (gradients[1], of_weight[part]),
    }
    return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}


if __name__ == "__main__":
    group.run(main)
