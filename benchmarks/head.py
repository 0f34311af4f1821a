"""The output layer and log-probabilities: logits of all rows and log_softmax, against the trainer's head over the trained rows.

A pass is forward and backward, down to the gradients of the hidden rows and of the weight, the latter added to a float32 `main_grad` as
under Megatron's data parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from asyncmoe.config.model import MadeModel
from asyncmoe.models import MegatronParallel, family_of, make
from asyncmoe.plan import activations
from asyncmoe.plan.activations import Microbatch
from asyncmoe.trainer.model.logprobs import target_logprobs
from benchmarks.live_tensors import LiveTensors
from benchmarks.memory import Growth, give_back
from benchmarks.peak import Peak
from benchmarks.provenance import here

ROWS, HIDDEN, VOCABULARY = 2048, 512, 32_768
COUNTED = (10, 50, 100)
"""Percentages of the rows with a loss."""
_MB = 1e6


@dataclass(frozen=True)
class Sizes:
    """Of the hidden rows and the vocabulary, and where they are."""

    rows: int = ROWS
    hidden: int = HIDDEN
    vocabulary: int = VOCABULARY
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class Case:
    """What a pass works on; the weight has a `main_grad`."""

    hidden: torch.Tensor
    weight: Any
    targets: torch.Tensor
    counted: torch.Tensor
    entropy: bool


def run(rounds: int = 7, threads: int = 1) -> dict[str, Any]:
    """Alternate both ways in one process in every round.

    Returns:
        {"date", "machine", "load", "rows", "hidden", "vocabulary", "threads", "products_cpu_s" (the three matrix products of all logits),
        "ways" and "with_entropy" (the same, and each row's entropy too, as in training)}. Ways are "full" and "rows_N", N in `COUNTED`;
        each has "s" and "cpu_s" (medians), "live_MB" (of a pass's own tensors, the most that exist at once), "peak_MB" (by how much the
        resident memory rises), and of rows also "ratio" and "cpu_ratio" to full (medians over rounds), "foreseen_MB" (by
        `asyncmoe plan`), and "logprobs_differ" (the largest difference from full).
    """
    measured_at = here()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ways = {name: _compared(rounds, entropy) for name, entropy in (("ways", False), ("with_entropy", True))}
        products = _products(rounds)
    finally:
        torch.set_num_threads(before)
    sizes = {"rows": ROWS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "threads": threads}
    return {**measured_at, **sizes, "products_cpu_s": products, **ways}


def _compared(rounds: int, entropy: bool) -> dict[str, dict[str, float]]:
    cases = {f"rows_{percent}": case_of(percent, entropy) for percent in COUNTED}
    passes: dict[str, Callable[[], torch.Tensor]] = {"full": partial(full, cases["rows_100"])}
    passes |= {name: partial(counted, case) for name, case in cases.items()}
    found = {name: _memory(pass_) for name, pass_ in passes.items()}
    wall: dict[str, list[float]] = {name: [] for name in passes}
    cpu: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, pass_ in passes.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            pass_()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - began_cpu)
    for name, one in found.items():
        one |= {"s": median(wall[name]), "cpu_s": median(cpu[name])}
    wanted = full(cases["rows_100"])
    for name, case in cases.items():
        found[name] |= {
            "ratio": median(a / b for a, b in zip(wall[name], wall["full"], strict=True)),
            "cpu_ratio": median(a / b for a, b in zip(cpu[name], cpu["full"], strict=True)),
            "foreseen_MB": foreseen(len(case.counted), entropy) / _MB,
            "logprobs_differ": float((counted(case) - wanted[case.counted]).abs().max()),
        }
    return found


def case_of(percent: int, entropy: bool, sizes: Sizes = Sizes()) -> Case:
    """Return hidden rows like a norm's output, whose logits spread about as much as a model's."""
    made, device = torch.Generator(sizes.device).manual_seed(0), sizes.device
    placed: Any = {"generator": made, "device": device, "dtype": getattr(torch, sizes.dtype)}
    hidden = torch.randn(sizes.rows, sizes.hidden, **placed).requires_grad_()
    weight: Any = torch.nn.Parameter(torch.randn(sizes.vocabulary, sizes.hidden, **placed) * (3 / sizes.hidden**0.5))
    weight.main_grad = torch.zeros(weight.shape, device=device)
    rows = torch.randperm(sizes.rows, generator=made, device=device)[: -(-sizes.rows * percent // 100)].sort().values
    return Case(hidden, weight, torch.randint(0, sizes.vocabulary, (sizes.rows,), generator=made, device=device), rows, entropy)


def full(case: Case) -> torch.Tensor:
    """Make a pass over the logits of all rows; return the targets' log-probabilities."""
    logprobs = torch.log_softmax((case.hidden @ case.weight.t()).float(), dim=1)
    if case.entropy:
        with torch.no_grad():
            -(logprobs.exp() * logprobs).sum(dim=1)
    chosen = logprobs.gather(1, case.targets[:, None]).squeeze(1)
    del logprobs
    chosen.sum().backward()  # type: ignore[no-untyped-call]
    case.weight.main_grad.add_(case.weight.grad)
    case.weight.grad = case.hidden.grad = None
    return chosen.detach()


def counted(case: Case) -> torch.Tensor:
    """As `full`, with the trainer's head over the counted rows."""
    rows = case.hidden.index_select(0, case.counted)
    found = target_logprobs(rows, case.weight, case.targets[case.counted], 1.0, None, entropy=case.entropy)
    found.sampled.sum().backward()  # type: ignore[no-untyped-call]
    case.weight.grad = case.hidden.grad = None
    return found.sampled.detach()


def _memory(pass_: Callable[[], torch.Tensor]) -> dict[str, float]:
    with LiveTensors() as seen:
        pass_()
    give_back()
    grown = Growth()
    pass_()
    return {"live_MB": seen.peak / _MB, "peak_MB": grown.peak_bytes() / _MB}


def foreseen(rows: int, entropy: bool, sizes: Sizes = Sizes()) -> int:
    """Return the bytes that `asyncmoe plan` expects a pass over the counted rows to take."""
    hf = {**make.settings(MadeModel(hidden=sizes.hidden)), "vocab_size": sizes.vocabulary}
    microbatch = Microbatch(rows, recompute=False, dtype=sizes.dtype, cpu=sizes.device == "cpu")
    return activations.head(family_of(hf).shape_of(hf), MegatronParallel(), microbatch, entropy=entropy)


def once(sizes: Sizes, warm: int = 2, rounds: int = 5) -> dict[str, float]:
    """Make passes over all rows with the trainer's head, on whatever device.

    Returns:
        s: seconds, median. rate: FLOP/s in the matrix products. peak, foreseen: bytes besides the weight, its gradient and the hidden rows,
        measured and by `asyncmoe plan`. differ: the log-probabilities' largest difference from `full`, in nats.
    """
    case, seconds = case_of(100, True, sizes), []
    for number in range(warm + rounds):
        if number == warm:
            peak = Peak()
        began = time.perf_counter()
        counted(case)
        if sizes.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found, step = {"peak": peak.nbytes, "foreseen": foreseen(sizes.rows, True, sizes)}, median(seconds[warm:])
    # The logits, once more for the backward pass, and the two gradients.
    rate = 4 * 2 * sizes.rows * sizes.hidden * sizes.vocabulary / step
    return {**found, "s": step, "rate": rate, "differ": float((counted(case) - full(case)).abs().max())}


def _products(rounds: int) -> float:
    hidden, weight = torch.randn(ROWS, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        logits = hidden @ weight.t()
        _ = logits @ weight, logits.t() @ hidden
        seconds.append(time.process_time() - began)
    return median(seconds)


def table(results: Mapping[str, Any]) -> str:
    """Format one line per way."""
    lines = [f"{'':<26}{'s':>7}{'ratio':>7}{'CPU':>7}{'live MB':>9}{'foreseen':>9}{'RSS MB':>8}"]
    for group in ("ways", "with_entropy"):
        for name, one in results[group].items():
            ratios = f"{one.get('ratio', 1.0):>7.2f}{one.get('cpu_ratio', 1.0):>7.2f}"
            memory = f"{one['live_MB']:>9.1f}{one.get('foreseen_MB', 0.0):>9.1f}{one['peak_MB']:>8.0f}"
            lines.append(f"{name + (', entropy' if group != 'ways' else ''):<26}{one['s']:>7.2f}{ratios}{memory}")
    return "\n".join(lines)
