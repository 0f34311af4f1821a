"""What all ranks of the trainer say to each other goes through one module, which knows what each group can carry."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from asyncmoe.config.trainer import TrainerSection
from asyncmoe.platform import collectives
from asyncmoe.trainer.model import mesh


@pytest.fixture
def device_only() -> Iterator[None]:
    """A default group that, as NCCL's, takes nothing from a host: gloo's for devices alone."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    collectives.stop()


@pytest.mark.usefixtures("device_only")
def test_words_travel_between_hosts_where_the_default_group_takes_none() -> None:
    with pytest.raises(RuntimeError, match="device type cpu"):
        dist.all_reduce(torch.zeros(1))
    collectives.start(timedelta(seconds=10))
    collectives.start(timedelta(seconds=10))
    assert collectives.everyones({"a": 1}) == [{"a": 1}]
    collectives.barrier()
    with mock.patch.object(torch.cuda, "current_device", return_value=3):
        assert collectives.device() == torch.device("cuda", 3)


def test_between_hosts_alone_one_group_is_enough() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch.object(dist, "new_group", side_effect=AssertionError):
        collectives.start(timedelta(seconds=10))
    given = torch.tensor([2.0])
    assert collectives.total(given) == given
    assert collectives.total(given) is not given
    assert collectives.device() == torch.device("cpu")
    collectives.stop()


@pytest.mark.parametrize(("cuda", "backend"), [(True, "nccl"), (False, "gloo")])
def test_the_default_group_is_what_it_says(cuda: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups made of it are of the same kind; a group of two kinds would make Megatron's all of both."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    made = mock.Mock(side_effect=InterruptedError)
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=cuda),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(dist, "init_process_group", made),
        pytest.raises(InterruptedError),
    ):
        mesh.start(TrainerSection())
    assert made.call_args.args == (backend,)
