"""`asyncmoe init`: a commented configuration for a model, a data set and this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from asyncmoe import config as configuration
from asyncmoe import models, storage
from asyncmoe.config.lora import LoraSection
from asyncmoe.config.task import ColumnsSection, WeightedSource
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.launch import gpus
from asyncmoe.models import hub
from asyncmoe.models.hf_folder import tokenizer_settings
from asyncmoe.models.lora.adapter import kind_of
from asyncmoe.plan import budget, render_plan
from asyncmoe.plan.split import Cluster, suggest
from asyncmoe.rollout.scoring import mathematics
from asyncmoe.rollout.scoring.types import MARK
from asyncmoe.rollout.tasks import datasets_reader
from asyncmoe.rollout.tasks.rows import reached
from asyncmoe.rollout.tasks.types import Finite

Values = dict[str, Any]
_QUESTIONS = ("question", "problem", "prompt", "messages", "query", "instruction")
_ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "final_answer", "expected_answer", "solution", "target")
_COMMENTS = {
    "run": "Starting again with the same directory resumes the run.",
    "model": "Directory of a Hugging Face checkpoint, or its id on the hub.",
    "task": "Questions and reference answers; a scorer of your own gets the other columns too.",
    "scoring": "1 if right, else 0. math_verify: the final answer, by value (ab equals ba); exact: the whole text; or your own function.",
    "rollout": "A step trains groups_per_step * group_size responses. Raise max_new_tokens if they are cut off before their answer.",
    "environment": "Tokens of the longest conversation, which fit into a micro-batch of the trainer.",
    "evaluation": "The same questions every few steps, held out from training.",
    "train": "full trains all weights; lora trains adapters, where memory does not suffice for more.",
    "lora": "Adapters of every layer.",
    "engines": "SGLang servers.",
    "trainer": "Megatron ranks.",
    "placement": "Trainer and engine use the GPU in turn.",
}


def write(model: Path, source: WeightedSource, out: Path) -> None:
    """Write a configuration that trains a model on a data set with the GPUs of this machine, or without any.

    Args:
        model: directory of a Hugging Face checkpoint, or its id on the hub.
        source: the data set: its path, subset and split.

    Raises:
        DataError: `out` exists; the model or the data cannot be read; or the data has no column of questions or of answers.
        ConfigError: the GPUs have too little memory.
        UserError: unsupported model family.
    """
    storage.check_new("configuration", out)
    question, rows = _questions(source)
    answer, scorer = _answers(source, rows)
    task = {"kind": "dataset", **source.model_dump(mode="json", exclude_none=True, include={"path", "subset", "split"})}
    task["columns"] = {"question": question, "answer": answer}
    values: Values = {"run": {"dir": f"runs/{out.stem}", "steps": 100, "seed": 0}, "model": {"path": str(model)}, "task": task}
    with tempfile.TemporaryDirectory(prefix="asyncmoe-init-") as scratch:
        config, _ = hub.described(configuration.parse(values), Path(scratch, "described"))
        folder, hf = config.model.path, models.hf_config_of(config)
        settings = tokenizer_settings(folder)
        if "auto_map" in settings:
            values["model"]["trust_remote_code"] = True  # nothing here runs it
        if "chat_template" not in settings and not any(folder.glob("chat_template*")):
            task["chat_template"] = False
    values["scoring"] = {"scorer": scorer}
    here = _sized(values, hf, len(rows))
    models.check(configuration.parse(values), hf)
    lines = [f"# For {here}, by asyncmoe init; docs/config.md has every key.", f"#   asyncmoe config validate {out} && asyncmoe run {out}"]
    for name, section in values.items():
        written = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 16).partition("\n")[0]
        trusts = " trust_remote_code runs the Python that lies beside it: read that first." if "trust_remote_code" in written else ""
        lines += [f"# {_COMMENTS[name]}{trusts}", f"{name}: {written}"]
    with storage.writing("configuration", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _questions(source: WeightedSource) -> tuple[str, Finite]:
    """Return the name of the column of questions, and all rows, with their other columns."""
    refused: list[DataError] = []
    for name in _QUESTIONS:
        try:
            return name, datasets_reader.read(source.model_copy(update={"columns": ColumnsSection(question=name, answer=None)}), "task")
        except DataError as error:
            refused.append(error)
    raise refused[0]  # names the file, or the columns


def _answers(source: WeightedSource, rows: Finite) -> tuple[str, str]:
    """Return the name of the column of answers, which may be nested in another, and the scorer for the first answer."""
    first = rows[0].columns
    for name in _ANSWERS:
        with suppress(KeyError):
            if isinstance(value := reached(first, name), str | int | float) and str(value).strip():
                with suppress(ValueError):
                    mathematics.reference(str(value).rpartition(MARK)[2].strip())
                    return name, "math_verify"
                return name, "exact"
    hint = "rename the column of answers; without any, write a configuration with task.columns.answer=null and a scorer of your own"
    got = f"no answers; columns besides the question: {', '.join(first) or 'none'}"[:300]
    raise DataError(str(source.path), got=got, expected=f"a column named {', '.join(_ANSWERS[:-1])} or {_ANSWERS[-1]}", hint=hint)


def _sized(values: Values, hf: Mapping[str, Any], rows: int) -> str:
    """Add sections whose sizes follow from the model and this machine; return the machine in words."""
    count, gpu_gb = gpus.here()
    groups, most, context = (16, 4096, 8192) if count else (4, 256, 2048)
    context = min(context, hf.get("max_position_embeddings") or context)
    values["rollout"] = {"groups_per_step": groups, "group_size": 8, "max_new_tokens": min(most, context // 2)}
    values["environment"] = {"max_tokens": context}
    if held := min(64, rows // 4):
        values["evaluation"] = {"every": 10, "prompts": held}
    values |= {"train": "full", "engines": {"count": 1}, "trainer": {"ranks": 1, "tokens_per_microbatch": context, "optimizer": {}}}
    values["engines"] |= {"dtype": "bfloat16"} if count else {}  # SGLang's attention on Hopper does not support float32
    if count == 1:
        values["placement"], values["trainer"]["recompute"] = "colocated", "full"
        if budget.of_run(configuration.parse(values), hf, gpu_gb).refusals:
            values["train"] = "lora"
    for name, section in _split(hf, Cluster(2, count // 2, gpu_gb, context)).items() if count > 1 else ():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    values["trainer"]["optimizer"]["lr"] = 1e-6 if count and values["train"] == "full" else 1e-5
    return f"{count} GPU(s) of {gpu_gb:.0f} GB" if count else "a CPU"


def _split(hf: Mapping[str, Any], halves: Cluster) -> Values:
    """Return the sections for this machine's GPUs split in two halves, with adapters if the GPUs cannot train all weights."""
    adapter = kind_of(LoraSection(), models.shape_of(hf))
    for cluster in (halves, replace(halves, adapter=adapter)):
        with suppress(ConfigError):
            found = render_plan.sections(suggest(hf, cluster)[0])
            del found["cluster"], found["queue"], found["sync"], found["engines"]["join"]  # on one machine, `asyncmoe run` starts them
            del found["rollout"]["groups_per_step"], found["rollout"]["group_size"]  # those of a cluster
            if "memory" not in found["trainer"]:  # else training needs host memory
                return found
    got = f"{halves.gpus} GPUs of {halves.gpu_gb:.0f} GB each for trainer and engines"
    raise ConfigError("this machine", got=got, expected="room for the model", hint="asyncmoe plan --nodes N plans several machines")
