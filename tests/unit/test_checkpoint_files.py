"""A rank's file of an asynchronous save, and the memory that it is written from."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncmoe import storage
from asyncmoe.checkpoints import manifest
from asyncmoe.checkpoints.manifest import Sealed
from asyncmoe.platform.megatron import snapshot
from asyncmoe.platform.megatron.snapshot import Planned, Shard
from asyncmoe.trainer.model import checkpoint_files
from asyncmoe.trainer.model.checkpoint_buffers import Buffers
from tests.disks import mounted

CPU = torch.device("cpu")


def planned(*tensors: torch.Tensor) -> Planned:
    shards = tuple(Shard(f"tensor{number}", (0,) * tensor.ndim, tensor) for number, tensor in enumerate(tensors))
    of_tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        shard.name: TensorStorageMetadata(
            TensorProperties.create_from_tensor(shard.live),
            shard.live.size(),
            [ChunkStorageMetadata(torch.Size(shard.offset), shard.live.size())],
        )
        for shard in shards
    }
    return Planned(shards, (("made._extra_state", b"nothing"),), Metadata(of_tensors), {}, {"sharded_backend": "torch_dist"}, (), True)


def test_the_copy_is_of_its_moment_and_is_what_torch_reads(tmp_path: Path) -> None:
    weight = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    live = [weight[1:3], torch.randn(5, 7), torch.tensor(3.0), torch.empty(0, 4)]
    plan = planned(*live)
    buffers = Buffers(plan.shards, CPU)
    buffers.copy()
    expected = [tensor.clone() for tensor in live]
    for tensor in live:
        tensor += 1
    moves: list[int] = []
    written = checkpoint_files.write_shards(tmp_path, 3, plan, buffers.copies, lambda: moves.append(1))
    assert manifest.seal(tmp_path / "__3_0.distcp") == Sealed(written.nbytes, written.crc32c)
    assert written.nbytes == sum(shard.nbytes for shard in written.shards)
    assert written.nbytes < buffers.nbytes + 2048 * len(live), "only a tensor's own bytes are written, not its storage's"
    assert moves
    assert plan.metadata is not None
    plan.metadata.state_dict_metadata.pop("tensor3")  # torch's reader has nothing to read of an empty one
    checkpoint_files.write_common(tmp_path, plan, {"step": 3}, [written])
    state = {f"tensor{number}": torch.empty_like(tensor) for number, tensor in enumerate(live[:3])}
    loader.load(state, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    for number, tensor in enumerate(expected[:3]):
        assert torch.equal(state[f"tensor{number}"], tensor)
    assert json.loads((tmp_path / "metadata.json").read_text()) == {"sharded_backend": "torch_dist"}
    assert torch.load(tmp_path / "common.pt", weights_only=True) == {"step": 3}


def test_buffers_are_used_again() -> None:
    live = torch.zeros(1000)
    buffers = Buffers([Shard("one", (0,), live)], CPU)
    places = []
    for value in (1.0, 2.0):
        live.fill_(value)
        buffers.copy()
        buffers.wait()
        places.append(buffers.copies[0].data_ptr())
        assert torch.equal(buffers.copies[0], live)
    assert places[0] == places[1] != live.data_ptr()
    assert buffers.nbytes == 4032  # 4000, to a multiple of 64


def test_a_full_disk_is_named_whatever_torch_makes_of_it(tmp_path: Path) -> None:
    plan = planned(torch.ones(4 << 20, dtype=torch.uint8))
    with mounted(tmp_path / "full", "1m") as folder:
        with pytest.raises(OSError, match="No space left") as refused:
            checkpoint_files.write_shards(folder, 0, plan, [shard.live for shard in plan.shards], lambda: None)
        assert refused.value.errno == errno.ENOSPC
        said = storage.explain(refused.value, "checkpoint of step 1", folder)
    assert said is not None
    assert "No space left on device (ENOSPC)" in str(said)


class Stepped:
    """An optimizer of Megatron's, as far as `refreshed` looks."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.optimizer = torch.optim.Adam([parameter], lr=0.5)


def test_what_ranks_have_in_common_is_as_of_the_save() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    one = Stepped(parameter)

    def step() -> None:
        parameter.grad = torch.ones(3)
        one.optimizer.step()

    step()
    groups = [{name: value for name, value in one.optimizer.param_groups[0].items() if name != "params"}]
    adam = one.optimizer.state[parameter]
    distributed = {"optimizer": {"optimizer": {"param_groups": [{**groups[0], "step": 1.0}]}}}
    plain = {"optimizer": {"param_groups": groups, "state": {"common_step": adam["step"]}}}
    step()
    one.optimizer.param_groups[0]["lr"] = 0.25
    found = snapshot.refreshed(distributed, one)["optimizer"]["optimizer"]["param_groups"][0]
    assert (found["lr"], found["step"], type(found["step"])) == (0.25, 2.0, float)
    copied = snapshot.refreshed(plain, one)["optimizer"]
    step()
    assert (copied["param_groups"][0]["lr"], copied["state"]["common_step"]) == (0.25, torch.tensor(2.0)), "not a reference to the count"
    assert groups[0]["lr"] == 0.5, "the plan's own is as it was"


def test_a_value_that_might_change_unseen_is_found() -> None:
    assert list(snapshot._unknown({"optimizer": {"param_groups": [{"lr": 1.0}], "state": {"common_step": 3}, "kind": "x"}})) == []
    assert list(snapshot._unknown({"optimizer": {"grad_scaler": {"scale": 2.0}}})) == [2.0]


def test_memory_that_is_no_longer_where_it_was_is_planned_anew() -> None:
    module = torch.nn.Linear(3, 2)
    weight: Any = module.weight
    one = Stepped(weight)
    plan = Planned((), (), None, {}, {}, snapshot._identity(snapshot._memory([module], one)), True)
    assert snapshot.holds(plan, [module], one)
    weight.grad = torch.ones(2, 3)
    one.optimizer.step()  # makes the optimizer's state
    assert not snapshot.holds(plan, [module], one)


def test_a_view_is_found_in_the_memory_it_lies_in() -> None:
    memory = torch.arange(100)
    spans = snapshot._joined([(memory.data_ptr(), memory.data_ptr() + 800), (memory.data_ptr() + 80, memory.data_ptr() + 160)])
    assert len(spans) == 1
    assert snapshot._within(memory[20:30], spans)
    assert snapshot._within(memory.view(10, 10)[:, 3], spans)
    assert not snapshot._within(memory[20:30].clone(), spans)


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb", buffering=0) as file:
        stream = checkpoint_files._Digested(file, lambda: None)
        assert isinstance(stream, io.RawIOBase)
        assert stream.write(memoryview(b"abcdef")) == 6
        assert stream.tell() == 6
    assert manifest.seal(tmp_path / "file") == Sealed(6, stream.digest)
