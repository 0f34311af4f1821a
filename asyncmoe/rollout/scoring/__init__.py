"""Score responses while generation continues.

A scorer is one of
- a function `f(prompt, response, answer)`, which may also take `columns`, the example's other columns: a plain function runs in worker
  processes, a coroutine function in the rollout worker's event loop;
- a class with `score(sample)`, constructed with `scoring.options`; it runs where a function would and may have a `close()`;
- an HTTP endpoint that receives each sample by POST.
It returns a number, or {"reward": number} and optionally "metrics" (numbers by name) and "steps" (process rewards). A teacher may supply
log-probabilities, with or without a scorer. If scorer or teacher raises, times out, cannot be reached or returns an invalid answer, the
response is rejected; each of these failures has its own reason, and none becomes a reward of zero.
"""

from __future__ import annotations

# Every scorer process imports this file, so it imports only types.
from asyncmoe.rollout.scoring.types import Sample, Score, Scorer

__all__ = ["Sample", "Score", "Scorer"]
