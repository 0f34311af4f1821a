"""Teaches a mixture whose experts were made to differ to say again what the dense model says, on text that the dense model wrote itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from asyncmoe.errors import UserError
from asyncmoe.models import load_hf_config
from asyncmoe.models.checkpoint import hf_name
from asyncmoe.models.families import family_of
from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.storage import writing

_WARMUP = 0.1
"""Share of the steps in which the learning rate rises; it falls linearly to 0 in the others."""
_WRITTEN_AT_ONCE = 8192
"""Tokens that are written at once: keys and values of them are held, and logits of the last of each sequence."""


@dataclass(frozen=True)
class Distillation:
    """How the mixture learns.

    Attributes:
        steps: optimizer steps, each of `batch` sequences of `tokens` tokens.
        lr: highest learning rate of AdamW.
        held_out: sequences that are only measured.
        seed: of the text.
    """

    steps: int = 100
    batch: int = 8
    tokens: int = 128
    lr: float = 1e-4
    held_out: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Distilled:
    """What came of it, on held-out sequences.

    Attributes:
        kl_before, kl_after: KL divergence of the mixture from the dense model, in nats a token.
        difference: mean relative difference between the outputs of two experts of a layer, |a - b| / ((|a| + |b|) / 2), over all pairs,
            layers and tokens.
    """

    kl_before: float
    kl_after: float
    difference: float


def distil(dense: Path, mixture: Path, how: Distillation, say: Callable[[str], None]) -> Distilled:
    """Train experts and routers of the mixture on KL(dense || mixture), and write it in place in its own dtype. Other weights stay.

    Runs in this process, on the first GPU if there is one, in float32.

    Args:
        say: is told of the progress, one line at a time.

    Raises:
        UserError: the divergence became infinite, not a number, or larger than before the distillation.
    """
    teacher, student = _loaded(dense), _loaded(mixture)
    text = own_text(teacher, how.steps * how.batch + how.held_out, how.tokens, how.seed, say)
    held, learnt = text[: how.held_out], text[how.held_out :]
    before = divergence(teacher, student, held, how.batch)
    say(f"held-out KL before distillation: {before:.4g} nats a token")
    _train(teacher, student, torch.split(learnt, how.batch), how, say)
    after = divergence(teacher, student, held, how.batch)
    if not after <= before:  # as no number is
        expected = f"at most {before:.4g}, as before the distillation"
        raise UserError("the distillation", got=f"a KL divergence of {after:.4g} on held-out text", expected=expected, hint=_cure(how))
    stored = HFCheckpoint(mixture).dtype("model.embed_tokens.weight")
    with writing("mixture", mixture):
        student.to(dtype=stored).save_pretrained(mixture)
    apart = difference(mixture, inputs_of_mlps(student.float(), held[: how.batch]))
    if not math.isfinite(apart):
        raise UserError("the distillation", got=f"experts that differ by {apart}", expected="a finite difference", hint=_cure(how))
    return Distilled(before, after, apart)


def own_text(model: Any, sequences: int, tokens: int, seed: int, say: Callable[[str], None]) -> torch.Tensor:
    """Return int64[sequences, tokens] that the model wrote at temperature 1, from its first token on. An end of text does not end a
    sequence: the model begins the next text."""
    first = next((token for token in (model.config.bos_token_id, model.config.eos_token_id) if isinstance(token, int)), 0)
    model.generation_config.eos_token_id = None
    found: list[torch.Tensor] = []
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        together = max(1, _WRITTEN_AT_ONCE // tokens)
        for start in range(0, sequences, together):
            count = min(together, sequences - start)
            begin = torch.full((count, 1), first, device=model.device)
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": tokens - 1}
            found.append(model.generate(begin, attention_mask=torch.ones_like(begin), pad_token_id=first, **options))
            say(f"the dense model has written {start + count} of {sequences} sequences")
    return torch.cat(found)


def divergence(teacher: Any, student: Any, text: torch.Tensor, batch: int) -> float:
    """Return KL(teacher || student) in nats a token. Logits of `batch` sequences are held at once."""
    with torch.no_grad():
        sums = [_loss(teacher, student, part).item() * len(part) for part in torch.split(text, batch)]
    return sum(sums) / len(text)


def inputs_of_mlps(model: Any, text: torch.Tensor) -> list[torch.Tensor]:
    """Return what the experts of each layer see: float32[tokens, hidden] a layer."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.post_attention_layernorm.register_forward_hook(lambda _module, _inputs, out: found.append(out.detach().flatten(0, 1)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model.model(text)  # without its logits
    for hook in hooks:
        hook.remove()
    return found


def difference(mixture: Path, inputs: list[torch.Tensor]) -> float:
    """Return `Distilled.difference` of a checkpoint.

    Args:
        inputs: see `inputs_of_mlps`.
    """
    hf = load_hf_config(mixture)
    family, checkpoint = family_of(hf), HFCheckpoint(mixture)
    m, shapes = family.shape_of(hf), family.tensors(hf)
    means: list[torch.Tensor] = []
    for layer, seen in enumerate(inputs):
        outs: list[torch.Tensor] = []
        for expert in range(m.experts):
            names = [f"layers.{layer}.experts.{expert}.{part}" for part in ("gate", "up", "down")]
            gate, up, down = (
                checkpoint.read(hf_name(m, family.hf_names, name), shapes[name], torch.float32).to(seen.device) for name in names
            )
            outs.append((functional.silu(seen @ gate.T) * (seen @ up.T)) @ down.T)
        for one in range(m.experts):
            means += [_relative(outs[one], outs[other]) for other in range(one)]
    return float(torch.stack(means).mean()) if means else 0.0


def _relative(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    apart: torch.Tensor = torch.linalg.vector_norm(one - other, dim=-1)
    size = torch.linalg.vector_norm(one, dim=-1) + torch.linalg.vector_norm(other, dim=-1)
    shares: torch.Tensor = 2 * apart / size.clamp_min(1e-30)
    return shares.mean()


def _cure(how: Distillation) -> str:
    return f"nothing was written: lower --lr = {how.lr:g}, or raise --steps = {how.steps}"


def _loaded(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The grouped kernel wants widths that are multiples of 16 bytes.
    made = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    return made.to(device).eval()


def _loss(teacher: Any, student: Any, text: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted: torch.Tensor = teacher(text).logits.log_softmax(-1)
    said: torch.Tensor = student(text).logits.log_softmax(-1)
    return functional.kl_div(said, wanted, log_target=True, reduction="sum") / text.numel()


def _train(teacher: Any, student: Any, batches: tuple[torch.Tensor, ...], how: Distillation, say: Callable[[str], None]) -> None:
    learnt = [value for name, value in student.named_parameters() if ".experts." in name or ".gate." in name]
    for value in student.parameters():
        value.requires_grad_(False)
    for value in learnt:
        value.requires_grad_(True)
    optimizer = torch.optim.AdamW(learnt, how.lr, weight_decay=0.0)
    rising = max(1, round(_WARMUP * len(batches)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, (len(batches) - step) / max(1, len(batches) - rising))
    )
    for step, batch in enumerate(batches, 1):
        loss = _loss(teacher, student, batch)
        if not torch.isfinite(loss):
            got = f"a KL divergence of {loss.item()} in step {step}"
            raise UserError("the distillation", got=got, expected="a finite one", hint=_cure(how))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        say(f"step {step} of {len(batches)}: KL {loss.item():.4g} nats a token")
