"""Worker: what Megatron holds on every rank, and what a layer keeps for its backward pass, next to what `asyncmoe.plan.memory` says of
them. `memory.py RESULT LAYOUT...`

A layout is a list of the trainer's keys, and of those in `SPECIAL`, such as "tp=2,ep=2,distributed=true", "ep=2,lora=true" or "model=glm";
the model is qwen3_moe where none is named.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import yaml

from asyncmoe.config import Config
from asyncmoe.models import family_of, trainer_parallel
from asyncmoe.models.latent import Latent
from asyncmoe.plan import activations, budget, memory
from asyncmoe.plan.phases import moved
from asyncmoe.platform import megatron
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.model import gpt as model
from asyncmoe.trainer.model import mesh, optimizer
from asyncmoe.trainer.model.sleep import Sleeper, _File
from tests import families
from tests.configs import minimal

megatron.prepare()

from asyncmoe.platform.megatron.packed_attention import PackedSequences  # noqa: E402  only after the platform is prepared
from tests.ranks import group  # noqa: E402
from tests.ranks.leaving import leave  # noqa: E402

ROWS = 256
SPECIAL = ("distributed", "lora", "model")
PARTS = ("weights", "adapters", "gradients", "optimizer")
_SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_experts_per_tok": 4, "moe_intermediate_size": 128, "intermediate_size": 384,
}  # fmt: skip
_LATENT = {"q_lora_rank": 96, "kv_lora_rank": 80, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64}
"""Values of latent attention are as wide as queries: torch's kernel for CPUs keeps all scores where they are not."""
MODELS: dict[str, dict[str, Any]] = {
    name: {**families.sized(_SIZES, name), **{key: value for key, value in _LATENT.items() if model.get(key)}}
    for name, model in families.MODELS.items()
}
MODELS["qwen3_moe"]["mlp_only_layers"] = [1]


def main(*layouts: str) -> dict[str, list[Any]]:
    every = group.everyone({layout: compare(*configured(layout, dist.get_world_size())) for layout in layouts})
    return {layout: [one[layout] for one in every] for layout in layouts}


def configured(layout: str, ranks: int) -> tuple[Config, dict[str, Any]]:
    given = {key: yaml.safe_load(value) for key, value in (one.split("=") for one in layout.split(","))}
    if "recompute_modules" in given:
        given["recompute_modules"] = given["recompute_modules"].split("+")
    special = {key: given.pop(key, False) for key in SPECIAL}
    trainer = {"ranks": ranks, "tokens_per_microbatch": ROWS, "optimizer": {"distributed": special["distributed"]}, **given}
    config = minimal(tempfile.gettempdir(), train="lora" if special["lora"] else "full", lora={"rank": 8}, trainer=trainer)
    return config, MODELS[special["model"] or "qwen3_moe"]


def compare(config: Config, hf: dict[str, Any]) -> dict[str, Any]:
    """Bytes of this rank: {"held": by what they are for, "said": the same as planned for, "asleep": those kept elsewhere during sleep, and
    planned for}; and of a pass of one micro-batch {"kept": for the backward pass, "angles": of these the rotary ones, "foreseen": what is
    planned for}."""
    place = mesh.start(config.trainer)
    built = model.build(hf, config, place)
    stepped = optimizer.build(config, built)
    for chunk in built.ddp:
        chunk.zero_grad_buffer()
    stepped.step()
    parallel, training = trainer_parallel(config), budget.training(config, hf, cpu=True)
    said = memory.trainer(hf, parallel, training)[place.pp_rank].parts
    found: dict[str, Any] = {"held": held(built, stepped), "said": {name: said.get(name, 0) for name in PARTS}}
    if place.world == 1:
        m = family_of(hf).shape_of(hf)
        angles = None if isinstance(m.attention, Latent) else built.chunks[0].rotary_pos_emb(ROWS)  # type: ignore[operator]
        foreseen = activations.kept(m, parallel, 0, training.microbatch)
        found |= {"kept": kept(built, angles), "angles": 0 if angles is None else angles.nbytes, "foreseen": foreseen}
    found["asleep"] = asleep(Sleeper(config, built, stepped, tuple)), moved(memory.GpuMemory(said))
    leave()
    return found


def asleep(sleeper: Sleeper) -> int:
    """Bytes that a rank keeps elsewhere while it sleeps."""
    sleeper.hold(frozenset())
    assert isinstance(sleeper._keeper, _File)
    return sum(os.fstat(file.fileno()).st_size for file in sleeper._keeper._files.values())


def held(built: model.Model, stepped: Any) -> dict[str, int]:
    every = [parameter for chunk in built.chunks for parameter in chunk.parameters()]
    adapters = [] if built.adapter is None else list(attach.parameters(built.chunks).values())
    of_model = {tensor.untyped_storage().data_ptr() for tensor in every}
    state = {tensor.data_ptr(): tensor.nbytes for tensor in _state(stepped) if tensor.untyped_storage().data_ptr() not in of_model}
    in_adapters = sum(parameter.nbytes for parameter in adapters)
    return {
        "weights": sum(tensor.nbytes for _, tensor in model.named_tensors(built)),
        "adapters": in_adapters,
        "gradients": sum(parameter.main_grad.nbytes for parameter in every if parameter.requires_grad),
        "optimizer": sum(state.values()),
    }


def _state(stepped: Any) -> Iterator[torch.Tensor]:
    """What the optimizers step, which may be masters or the model's own parameters, and what they keep of each."""
    for one in getattr(stepped, "chained_optimizers", [stepped]):
        yield from (parameter for group in one.optimizer.param_groups for parameter in group["params"])
        for state in one.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim)


def kept(built: model.Model, angles: torch.Tensor | None) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the parameters and what comes after the last layer."""
    saved: dict[int, torch.Tensor] = {}
    parameters = {parameter.untyped_storage().data_ptr() for chunk in built.chunks for parameter in chunk.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    decoder: Any = built.chunks[0].decoder
    hidden = torch.randn(ROWS, 1, built.hf["hidden_size"], dtype=built.dtype, requires_grad=True)
    starts = torch.tensor([0, ROWS // 2, ROWS], dtype=torch.int32)
    packed = PackedSequences(starts, starts.tolist(), ROWS // 2)
    decoder.final_layernorm = None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


if __name__ == "__main__":
    group.run(main)
