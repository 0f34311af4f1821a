"""The results that the engine should have, computed by Hugging Face transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncmoe.models.lora.adapter import Adapter
from asyncmoe.models.shape import Shape
from tests import families
from tests.unit.adapters import merge


class Oracle:
    """A checkpoint's weights, and log-probabilities under them in float32."""

    def __init__(self, path: Path) -> None:
        # With Megatron's patches for CPU in the process, transformers loads weights that differ from the file's.
        assert "asyncmoe.trainer.model.gpt" not in sys.modules
        self.path = path
        self.weights: dict[str, torch.Tensor] = load_file(path / "model.safetensors")
        self.model = families.with_one_eps(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())

    def logprobs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float, cut: int | None = None, after: Oracle | None = None
    ) -> list[float]:
        """Log-probability of each token of `response` after those before it.

        Args:
            cut: response tokens sampled by these weights; the rest by those of `after`, on the keys and values of these (the last of
                the first part was forwarded by the second).
        """
        seen = list(prompt) + list(response)
        whole = len(seen) if cut is None else len(prompt) + cut - 1
        with torch.no_grad():
            first = self.model(torch.tensor([seen[:whole]]), use_cache=True)
            logits = [first.logits[0]]
            if after is not None:
                logits.append(after.model(torch.tensor([seen[whole:]]), past_key_values=first.past_key_values).logits[0])
        table = (torch.cat(logits) / temperature).log_softmax(-1)
        return [table[len(prompt) + i - 1, token].item() for i, token in enumerate(response)]


class Merged(Oracle):
    """The model with an adapter merged into its weights."""

    def __init__(self, path: Path, m: Shape, adapter: Adapter | None) -> None:
        super().__init__(path)
        if adapter is not None:
            merge(self.model, m, adapter)

    def difference(self, prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], temperature: float) -> float:
        """Difference between an engine's log-probabilities of its response and the oracle's."""
        return largest_difference(logprobs, self.logprobs(prompt, response, temperature))


def perturbed(oracle: Oracle, path: Path, seed: int, scale: float = 0.05, share: float = 1.0) -> Oracle:
    """The same model with all or a share of its weights changed, saved at `path`."""
    generator, chosen = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    weights = {
        name: w + scale * torch.randn(w.shape, generator=generator) * (torch.rand(w.shape, generator=chosen) < share)
        for name, w in oracle.weights.items()
    }
    return Oracle(families.rewrite(oracle.path, path, weights))


def with_others(first: Oracle, folder: Path) -> list[Oracle]:
    """A model, and two others of its shape."""
    return [first, perturbed(first, folder / "a", 1), perturbed(first, folder / "b", 2)]


def routes(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The experts that the layers of a transformers model choose for each of the tokens but the last, [layers, tokens - 1, top_k]."""
    return np.stack([chosen.numpy() for _, chosen in _routed(model, tokens)])


def gaps(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The gap between the router's logits of the last chosen and the first unchosen expert, [layers, tokens - 1]."""
    ranked = [(logits.sort(descending=True).values, chosen.shape[1]) for logits, chosen in _routed(model, tokens)]
    return np.stack([(logits[:, top_k - 1] - logits[:, top_k]).numpy() for logits, top_k in ranked])


TIE = 1e-5
"""Difference of two router logits that rounding may reverse: a near tie."""


def comparable(model: Any, tokens: np.ndarray, recorded: np.ndarray) -> int:
    """How many tokens, from the first on, can have the probability that a transformers model gives them: all, or those up to the first for
    which a router decided a near tie the other way. Those before that one have the model's experts.

    Args:
        recorded: the experts of each token but the last, [layers, tokens - 1, top_k].
    """
    other = (np.sort(recorded) != np.sort(routes(model, tokens))).any(-1)
    if other.any():
        place = int(np.flatnonzero(other.any(0))[0])
        if gaps(model, tokens)[np.flatnonzero(other[:, place])[0], place] < TIE:
            return place + 1
    return len(tokens)


def _routed(model: Any, tokens: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer with experts: the router's logits, [tokens - 1, experts], and what it chose, [tokens - 1, top_k]. In a forward pass
    like that of `Oracle.logprobs`: a near tie that is decided one way there is decided the same way here."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    gates = families.routers(model).values()
    with torch.no_grad(), families.hooked(gates, lambda _number, _gate, out: found.append((out[0][:-1], out[2][:-1]))):
        model(torch.from_numpy(tokens).long()[None], use_cache=True)
    return found


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
