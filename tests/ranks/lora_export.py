"""Worker: writes an adapter in PEFT's form, and the weights with it merged into them. `lora_export.py RESULT REFERENCES OUT LAYOUT`.

Both adapters of `lora_case.BOTH`, to OUT/NAME/adapter and OUT/NAME/merged; RESULT has the errors of the merged model's own logits,
and what a merge into bfloat16 loses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from asyncmoe.trainer import export
from asyncmoe.trainer.lora.merge import merge
from asyncmoe.trainer.model import mesh
from asyncmoe.weights.sender.gather import Gatherer
from asyncmoe.weights.sender.hf_files import SHARD_BYTES, write_hf
from tests.ranks import case, group, lora_case, parity
from tests.ranks.leaving import leave
from tests.ranks.lora import SEED, adapter_job, logits_error


def main(references: str, folder: str, layout: str) -> dict[str, float]:
    out, found = Path(folder), {}
    for name in lora_case.BOTH:
        path = Path(references) / lora_case.ADAPTERS[name][0]
        config = case.config(path, ranks=dist.get_world_size(), **case.settings_of(layout), pack=True)
        job = adapter_job(path, config, mesh.start(config.trainer, SEED), name)
        built = job.model()
        export.write_adapter(built, path / "hf", out / name / "adapter", Gatherer(built, SHARD_BYTES, 60.0, adapter=True))
        merge(built.chunks)
        built = replace(built, hf={**built.hf, "dtype": "bfloat16", "torch_dtype": "bfloat16"})  # as the original may have been
        write_hf(built, path / "hf", out / name / "merged", Gatherer(built, SHARD_BYTES, 60.0))
        found[name] = parity.worst({"logits": logits_error(job, built, job.oracle["logits"])})["logits"]
        halved = config.trainer.model_copy(update={"dtype": "bfloat16"})
        job = replace(job, config=config.model_copy(update={"trainer": halved}))
        found[f"{name} lost"] = merge(job.model().chunks)
        leave()
    return found


if __name__ == "__main__":
    group.run(main)
