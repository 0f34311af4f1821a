"""Other systems that send weights shard to shard, and why they cannot run this benchmark's cases."""

from __future__ import annotations

import importlib.util
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_AWEX = (
    "its transports between processes are files, NCCL, HCCL, AState and Mooncake (0.9.0, awex/config.py, _VALID_COMM_BACKENDS): none of "
    "them joins CPU processes without a GPU or a service of its own, and its readers and writers live inside running engines"
)
_MEGATRON = (
    "megatron.core.resharding moves weights between two Megatron models (0.16.1, refit.py: both sides are LanguageModules with Megatron's "
    "process groups on every rank), and SGLang's fused storage is none"
)


def obstacles() -> dict[str, str]:
    """Return why each of them cannot send from CPU processes to SGLang's layout here; tested now if that needs no cluster."""
    return {"awex": f"{_state('awex')}: {_AWEX}", "megatron_core": f"{_state('megatron-core')}: {_MEGATRON}; {_megatron_service()}"}


def _state(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} is not installed"


def _megatron_service() -> str:
    """Return the outcome of creating its gloo message service, in a process group of one."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core.resharding") is None:
        return "this environment has no megatron.core.resharding"
    import torch.distributed as dist
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
        try:
            GlooCopyService()
        except RuntimeError as error:
            return f"its service for gloo refuses a machine without CUDA ({str(error).splitlines()[0]})"
        finally:
            dist.destroy_process_group()
    return "its service for gloo could be made, so there is a CUDA device: it copies through it"
