"""`asyncmoe export`: convert a checkpoint of a run to a Hugging Face checkpoint, by ranks in the run's parallel layout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from asyncmoe import checkpoints, models, storage
from asyncmoe import config as configuration
from asyncmoe.checkpoints import intact
from asyncmoe.checkpoints.manifest import MANIFEST
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.launch.model_card import card
from asyncmoe.launch.torchrun import trainer_command, trainer_environment
from asyncmoe.models import origin
from asyncmoe.models.quantised import float8_of
from asyncmoe.process import WARNING, Child
from asyncmoe.scratch import Scratch


def export(
    run_dir: Path,
    out: Path,
    form: Literal["weights", "adapter", "float8"] = "weights",
    timeout_s: float = 3600.0,
    step: int | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> None:
    """Write the checkpoint to `out`, with a model card. A failed export leaves its log in a temporary folder, but no `out`. The run,
    which may have been moved or copied, is not written to.

    Args:
        form: "weights" writes the weights in the trainer's dtype, "adapter" only the trained adapter, and "float8" the float8 weights of a
            model that was published in float8.
        step: number of the checkpoint's step; None: the newest.
        dtype: dtype of the weights or of the adapter; None: the trainer's.

    Raises:
        DataError: `run_dir` has no such checkpoint, the checkpoint is damaged, or `out` exists or cannot be created.
        StorageError: `out` cannot be written.
        UserError: the `form` needs an adapter or float8 weights that the run lacks, or the adapter was trained on another model.
        AsyncmoeError: the exporting processes failed or took longer than `timeout_s`.
    """
    checkpoint = intact.chosen(run_dir, step)
    storage.check_new("exported model", out)
    config = configuration.of_run(run_dir)
    if form == "adapter" and config.adapter is None:
        raise UserError("--adapter", got=f"a run with train = {config.train}", expected="one with train = lora")
    if form == "float8" and float8_of(models.load_hf_config(config.model.path)) is None:
        raise UserError("--float8", got=f"{config.model.path} without quantization_config", expected="a run of a float8 model")
    if not (checkpoint / MANIFEST).exists():  # asyncmoe 0.1.0 wrote none
        unknown = "nothing shows whether its files are undamaged"
        print(f"{WARNING}{checkpoint} has no {MANIFEST}: {unknown}", file=sys.stderr, flush=True)
    elif (fault := intact.fault(checkpoint, intact.QUICK_BYTES)) is not None:
        raise intact.refused(checkpoint, fault)
    if config.adapter is not None and form == "weights":
        origin.check_weights(config, checkpoint)
    facts = checkpoints.facts(checkpoint)
    command = trainer_command(config, run_dir, "asyncmoe.trainer.export", str(facts["step"]), str(out), form, dtype or "")
    scratch = Scratch()
    child = Child("export", command, scratch.path / "export.log", trainer_environment(os.environ))
    try:
        if not child.wait(timeout_s):
            raise AsyncmoeError(f"export took longer than {timeout_s:.0f} s; its log is {child.log}")
        if child.returncode != 0:
            raise AsyncmoeError(child.why())
    finally:
        child.end(5.0)
    for line in (one for one in child.log.read_text(errors="replace").splitlines() if one.startswith(WARNING)):
        print(line, file=sys.stderr, flush=True)
    scratch.remove()
    with storage.writing("model card", out):
        (out / "README.md").write_text(card(config, facts, out.absolute().name, adapter=form == "adapter"), encoding="utf-8")
    print(f"{out}: the model of step {facts['step']}, with a card")
