"""Speeds of a trainer and of engines: measured by `asyncmoe bench step`, or estimated.

The estimate assumes H100s and needs only the model and its KV cache. It serves to compare trainer and engines, not to predict a run:

- Training a token takes 6 FLOPs per active parameter: 2 forward, 2 for gradients of activations, and 2 for gradients of weights, which
  adapters avoid; 2 more with full recomputation (Korthikanti et al., arXiv 2205.05198, appendix A, without the terms of attention). GPUs
  reach `_EFFICIENCY` of their peak. The CPU's update of offloaded parameters is left out.
- A decoding step reads the engine's weights and the KV cache of all its conversations once, at `_READING` of the GPU's bandwidth, and takes
  2 FLOPs per token and active parameter. Prefill is left out.
- A conversation has half the context, on average.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from asyncmoe.errors import ConfigError, DataError
from asyncmoe.models import EngineParallel, shape_of
from asyncmoe.plan import memory
from asyncmoe.plan.memory import EngineMemory, Hf

_PEAK, _BANDWIDTH = 989e12, 3.35e12
"""FLOP/s in bfloat16 and bytes/s of an H100 SXM (NVIDIA's data sheet)."""
_EFFICIENCY, _READING = 0.3, 0.6

Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(gt=0)]


class MeasuredSide(msgspec.Struct, frozen=True):
    """Speed of the trainer, whose tokens include prompts, or of all engines with `running` conversations at once on each."""

    gpus: Count
    tokens_per_s: Amount
    running: Count = 1

    @property
    def each(self) -> float:
        """Tokens per second of a GPU, by which speeds are scaled."""
        return self.tokens_per_s / self.gpus


class MeasuredLengths(msgspec.Struct, frozen=True):
    """Mean lengths in tokens."""

    prompt: Annotated[float, msgspec.Meta(ge=0)]
    response: Amount


class Measured(msgspec.Struct, frozen=True):
    """What `asyncmoe bench step` measured, as far as it is used here."""

    format: Literal[1]
    parameters: Count
    trainer: MeasuredSide
    engines: MeasuredSide
    lengths: MeasuredLengths


def read(file: Path, hf: Hf | None = None) -> Measured:
    """Read what `asyncmoe bench step CONFIG --json FILE` wrote.

    Args:
        hf: the model for which the speeds must have been measured; None: any.

    Raises:
        DataError: the file is missing or does not have this format.
        ConfigError: the measured model's number of parameters differs from that of `hf`.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(str(file), got=str(error), expected="what asyncmoe bench step CONFIG --json FILE wrote") from error
    if hf is not None and found.parameters != (planned := memory.whole(hf).all):
        raise ConfigError("--measured", got=f"a model of {found.parameters:,} parameters", expected=f"{planned:,}, as --model has")
    return found


def active(hf: Hf) -> int:
    """Return the number of parameters that a token uses."""
    m, whole = shape_of(hf), memory.whole(hf)
    return whole.dense + (whole.experts * m.experts_per_token // m.experts if m.experts else 0)


def of_trainer(hf: Hf, gpus: int, flops: int, measured: Measured | None) -> float:
    """Return the sampled tokens per second that a trainer can train, with the prompts that belong to them.

    Args:
        flops: FLOPs per token and active parameter.
    """
    if measured is not None:
        lengths = measured.lengths
        return measured.trainer.each * gpus * lengths.response / (lengths.prompt + lengths.response)
    return gpus * _EFFICIENCY * _PEAK / (flops * active(hf))


def of_engine(hf: Hf, parallel: EngineParallel, serving: EngineMemory, context: int, measured: Measured | None) -> float:
    """Return the tokens per second of an engine."""
    if measured is not None:
        return measured.engines.each * parallel.world
    step_s, batch = decoding(hf, parallel, serving, context)
    return serving.running / (step_s * (1 + serving.running / batch))


def decoding(hf: Hf, parallel: EngineParallel, serving: EngineMemory, context: int) -> tuple[float, float]:
    """Return the estimated seconds of an empty decoding step, and the batch that makes it take twice as long."""
    bandwidth = _READING * _BANDWIDTH
    empty_s = memory.engine(hf, parallel, serving).parts["weights"] / bandwidth
    each_s = memory.kv_bytes(hf, parallel, serving.dtype) * context / 2 / bandwidth / parallel.attn_dp
    each_s += 2 * active(hf) / (parallel.world * _EFFICIENCY * _PEAK)
    return empty_s, empty_s / each_s
