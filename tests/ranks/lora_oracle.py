"""Results of Hugging Face's model and autograd for adapters, in one process: every weight is W + (alpha / rank) B A."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from asyncmoe.config.lora import LoraSection
from asyncmoe.models import family_of, load_hf_config
from asyncmoe.models.lora.adapter import kind_of
from tests import families
from tests.ranks import case, lora_case, oracle


def write(path: Path, name: str) -> None:
    """Write autograd's results for an adapter to `path`, which has the references of its model's variant (`oracle.write`).

    NAME.pt: halves, by canonical name, and their gradients of two losses; logits, losses, norms; losses, norms and halves of a training.
    """
    torch.set_num_threads(1)
    known = torch.load(path / "reference.pt", weights_only=False)
    behaviour, proximal = known["behaviour"], known["proximal"]
    adapted = Adapted(path / "hf", lora_case.section(name))
    found: dict[str, Any] = {"halves": {key: half.detach().clone() for key, half in adapted.halves.items()}}
    with torch.no_grad():
        found["logits"] = [oracle._logits(adapted, ids) for ids in case.tokens()]
    for kind, loss_of in (("supervised", oracle._supervised), ("policy", oracle._policy)):
        loss = loss_of(adapted, behaviour, proximal)
        gradients = dict(zip(adapted.halves, torch.autograd.grad(loss, list(adapted.halves.values())), strict=True))
        norm = float(torch.sqrt(sum(((g**2).sum() for g in gradients.values()), torch.zeros(()))))
        found[kind] = {"loss": loss.item(), "gradients": gradients, "grad_norm": norm}
    found["steps"] = oracle._train(adapted, lambda: oracle._supervised(adapted, behaviour, proximal))
    found["trained"] = {key: half.detach().clone() for key, half in adapted.halves.items()}
    torch.save(found, path / f"{name}.pt")


class Adapted:
    """Hugging Face's model with its weights as functions of the halves."""

    def __init__(self, path: Path, section: LoraSection) -> None:
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval().requires_grad_(False)
        self.model = families.with_one_eps(base)
        self.halves: dict[str, torch.Tensor] = {}
        self._section, self._generator = section, torch.Generator().manual_seed(7)
        hf = load_hf_config(path)
        self._targets = kind_of(section, family_of(hf).shape_of(hf)).targets
        self._changed: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for i, layer in enumerate(self.model.model.layers):
            self._adapt_layer(f"layers.{i}", layer)

    def parameters(self) -> list[torch.Tensor]:
        return list(self.halves.values())

    def zero_grad(self) -> None:
        for half in self.halves.values():
            half.grad = None

    def __call__(self, ids: torch.Tensor) -> Any:
        weights = dict(self.model.named_parameters())
        return functional_call(self.model, {name: change(weights[name]) for name, change in self._changed.items()}, (ids,))

    def _adapt_layer(self, name: str, layer: Any) -> None:
        for projection in self._targets:
            for place, front in (("self_attn", ""), ("mlp", ""), ("mlp.shared_experts", "shared.")):
                try:
                    out, into = layer.get_submodule(f"{place}.{projection}").weight.shape
                except AttributeError:
                    continue
                add = self._pair(f"{name}.{front}{projection}", out, into)
                self._changed[f"model.{name}.{place}.{projection}.weight"] = lambda weight, add=add: weight + add()
        if hasattr(layer.mlp, "experts"):
            self._adapt_experts(name, layer.mlp.experts)

    def _adapt_experts(self, name: str, experts: Any) -> None:
        """gate_up_proj [E, 2 width, hidden], gate over up; down_proj [E, hidden, width]."""
        count, twice, hidden = experts.gate_up_proj.shape
        shapes = {"gate_proj": (twice // 2, hidden), "up_proj": (twice // 2, hidden), "down_proj": (hidden, twice // 2)}
        add = {
            projection: [self._pair(f"{name}.experts.{e}.{projection}", *shape) for e in range(count)]
            for projection, shape in shapes.items()
            if projection in self._targets
        }

        def stacked(projection: str) -> torch.Tensor:
            one = add.get(projection)
            return torch.zeros(count, *shapes[projection]) if one is None else torch.stack([pair() for pair in one])

        front = f"model.{name}.mlp.experts"
        self._changed[f"{front}.gate_up_proj"] = lambda weight: weight + torch.cat([stacked("gate_proj"), stacked("up_proj")], dim=1)
        self._changed[f"{front}.down_proj"] = lambda weight: weight + stacked("down_proj")

    def _pair(self, name: str, out: int, into: int) -> Callable[[], torch.Tensor]:
        rank = self._section.rank
        a, b = self._half(f"{name}.a", (rank, into), 1 / into**0.5), self._half(f"{name}.b", (out, rank), 0.1)
        return lambda: self._section.alpha / rank * (b @ a)

    def _half(self, name: str, shape: tuple[int, int], deviation: float) -> torch.Tensor:
        *front, projection, side = name.split(".")
        outer = side == ("b" if projection == "down_proj" else "a")
        if self._section.experts == "shared_outer" and "experts" in front and outer:
            name = ".".join([*front[:-1], "shared", projection, side])
        if name not in self.halves:
            self.halves[name] = (torch.randn(shape, generator=self._generator) * deviation).requires_grad_()
        return self.halves[name]
