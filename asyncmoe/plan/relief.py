"""The error for a GPU with too little memory: it names configuration keys that lower memory use, by the part they govern."""

from __future__ import annotations

from collections.abc import Mapping

from asyncmoe.errors import ConfigError
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.plan.memory import USABLE, GpuMemory, usable
from asyncmoe.plan.phases import CHOSEN

NOTHING = GpuMemory({})
_LARGE = 0.25
"""A part counts as large if it is the largest, or above this share of the total."""
_TRAINER: Mapping[str, str] = {
    "weights": "more trainer.ranks with a larger trainer.tp, ep or pp",
    "gradients": "more trainer.ranks with a larger trainer.tp, ep or pp",
    "optimizer": "trainer.memory.optimizer_offload, or more trainer.ranks (trainer.optimizer.distributed shards its state)",
    "reference": "objective.kl.coefficient=0",
    "activations": "trainer.recompute=full",
    "working set": "fewer trainer.tokens_per_microbatch",
    "weight sync": "a smaller sync.bucket_bytes",
}
_ENGINE: Mapping[str, str] = {
    "weights": "a larger engines.tp on more GPUs",
    "KV cache": "fewer tokens (engines.max_total_tokens, environment.max_tokens)",
    "working set": "a smaller --chunked-prefill-size in engines.args",
    "weight sync": "a smaller sync.bucket_bytes",
}
_SLEEP = {part: f"{name} in trainer.sleep" for part, name in CHOSEN.items()}
_STAYS = {part: way for part, way in _SLEEP.items() if "parameters" not in way}
_IN_TURN = {DeviceTurn.TRAINING: _TRAINER, DeviceTurn.WAKING: {**_TRAINER, **_STAYS}, DeviceTurn.GENERATING: {**_TRAINER, **_SLEEP}}


def too_large(trainer: GpuMemory, engine: GpuMemory, gpu_gb: float, card: str = "a GPU", turn: DeviceTurn | None = None) -> ConfigError:
    """Return the error for a GPU that cannot hold a trainer rank, an engine rank, or both; `NOTHING` stands for an absent rank.

    The error names keys that shrink the largest parts, as far as a key governs them.

    Args:
        turn: the phase in which both are on the GPU.
    """
    keys = _TRAINER if turn is None else _IN_TURN[turn]
    sides = [side for side in (("the trainer", trainer.parts, keys), ("an engine", engine.parts, _ENGINE)) if side[1]]
    parts = [
        (nbytes, f"{part} of {whose}" if len(sides) > 1 else part, keys.get(part))
        for whose, held, keys in sides
        for part, nbytes in held.items()
    ]
    parts.sort(key=lambda part: -part[0])
    total, room = trainer.total + engine.total, usable(gpu_gb)
    governed = [(nbytes, way) for nbytes, _, way in parts if way is not None]
    ways = list(dict.fromkeys(way for nbytes, way in governed if nbytes >= min(governed[0][0], _LARGE * total) or way in _SLEEP.values()))
    apart = max(trainer.total, engine.total) <= room
    if len(sides) > 1 and apart:
        ways.append("more GPUs and placement=split")
    whose = " and ".join(side[0] for side in sides)
    largest = ", ".join(f"{name} {nbytes / 1e9:.3g}" for nbytes, name, _ in parts[:3])
    neither = "" if turn is None or apart else ", also with placement=split"
    return ConfigError(
        f"memory of {card}" if turn is None else f"memory of {card} while {turn}",
        got=f"{total / 1e9:.3g} GB of {whose} ({largest}), {(total - room) / 1e9:.3g} GB too many{neither}",
        expected=f"at most {room / 1e9:.3g} GB, as {1 - USABLE:.0%} of its {gpu_gb:.3g} GB are left free",
        hint=f"take {', or '.join(ways)}",
    )
