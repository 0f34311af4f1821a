"""SmolLM2-135M-Instruct, as `make real-model` writes it: trainer, engine and transformers give every sampled token the same probability."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.runs import REPOSITORY, Command, summary_of

MODEL = REPOSITORY / "runs" / "models" / "smollm2"
pytestmark = [
    pytest.mark.system,
    pytest.mark.thorough,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="no runs/models/smollm2: run make real-model"),
]

TEMPERATURE, TOP_P, TOP_K, CLOSE = 0.7, 0.9, 64, 1e-4
_SETTINGS = (
    *("run.steps=2", "rollout.groups_per_step=4", "rollout.group_size=4", "evaluation.every=0", "telemetry.samples.groups=4"),
    *("trainer.dtype=float32", "engines.dtype=float32", "verify.max_logprob_diff=1.0e-4"),
    *(f"rollout.temperature={TEMPERATURE}", f"rollout.top_p={TOP_P}", f"rollout.top_k={TOP_K}"),
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("real") / "run"
    Command("run", "examples/real/sums.yaml", f"run.dir={made}", *_SETTINGS).succeed(900)
    return made


def test_trainer_and_engine_agree(run_dir: Path) -> None:
    summary = summary_of(run_dir)
    print(f"largest difference at the same version: {summary['max_abs_logprob_diff_same_version']:.2e} nats")
    assert summary["max_abs_logprob_diff_same_version"] <= CLOSE


def test_the_engine_and_transformers_agree(run_dir: Path) -> None:
    """Of what version 0 sampled. The ids that top-p leaves are found anew from transformers' probabilities."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    records = [json.loads(line) for line in (run_dir / "samples" / "rollout.jsonl").read_text().splitlines()]
    differences: list[float] = []
    for group in (one for one in records if one["record"] == "group" and one["version"] == 0):
        for member in group["members"]:
            prompt, response = group["prompt"]["tokens"], member["rest"]["tokens"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            said = as_sampled(logits, response)
            differences += [abs(one - other) for one, other in zip(said, member["logprobs"], strict=True)]
    print(f"{len(differences)} tokens, largest difference {max(differences):.2e} nats")
    assert len(differences) > 100
    assert max(differences) <= CLOSE


def as_sampled(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    """Log-probabilities of tokens at `TEMPERATURE` among the most probable ids that together reach `TOP_P` (nucleus sampling, arXiv
    1904.09751), `TOP_K` at most.

    Args:
        logits: float32[tokens, vocabulary].
    """
    probabilities, ids = (logits / TEMPERATURE).softmax(-1).sort(descending=True)
    inside = (probabilities.cumsum(-1) - probabilities < TOP_P) & (torch.arange(ids.shape[1]) < TOP_K)
    kept: Any = (probabilities * inside).sum(-1)
    place = (ids == torch.tensor(tokens)[:, None]).int().argmax(-1, keepdim=True)
    assert inside.gather(1, place).all()
    found: list[float] = (probabilities.gather(1, place)[:, 0] / kept).log().tolist()
    return found
