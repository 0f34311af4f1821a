"""`asyncmoe export`: convert the newest checkpoint of a run to a Hugging Face checkpoint, gathered under the run's parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from asyncmoe import checkpoints, models
from asyncmoe import config as configuration
from asyncmoe.errors import AsyncmoeError, DataError, UserError
from asyncmoe.launch.local import TRAINER_ENVIRONMENT, trainer_command
from asyncmoe.models.quantised import float8_of
from asyncmoe.process import Child


def export(run_dir: Path, out: Path, form: Literal["weights", "adapter", "float8"] = "weights", timeout_s: float = 3600.0) -> None:
    """Write the checkpoint to `out`. A failed export leaves no `out`.

    Args:
        form: "weights" writes the weights in the trainer's dtype, "adapter" only the trained adapter, and "float8" the float8 weights of a
            model that was published in float8.

    Raises:
        DataError: `run_dir` has no checkpoint, or `out` exists.
        UserError: the run has no adapter, or its model no float8 weights.
        AsyncmoeError: the exporting processes failed or took longer than `timeout_s`.
    """
    if checkpoints.newest(run_dir) is None:
        raise DataError(str(run_dir), got="no complete checkpoint", expected="a run directory with checkpoints/step-*")
    if out.exists():
        raise DataError(str(out), got="an existing path", expected="a new directory")
    resolved = run_dir / "config.yaml"
    config = configuration.load(resolved)
    if form == "adapter" and config.adapter is None:
        raise UserError("--adapter", got=f"a run with train = {config.train}", expected="one with train = lora")
    if form == "float8" and float8_of(models.load_hf_config(config.model.path)) is None:
        raise UserError("--float8", got=f"{config.model.path} without quantization_config", expected="a run of a model of float8")
    command = trainer_command(config, resolved, "asyncmoe.trainer.export", str(out), form)
    child = Child("export", command, run_dir / "logs" / "export.log", TRAINER_ENVIRONMENT)
    try:
        if not child.wait(timeout_s):
            raise AsyncmoeError(f"export took longer than {timeout_s:.0f} s; its log is {child.log}")
        if child.returncode != 0:
            raise AsyncmoeError(child.why())
    finally:
        child.end(5.0)
