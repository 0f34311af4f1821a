"""Move arrays between two shardings with asyncmoe.reshard alone: no Megatron, no SGLang, and with MPI no torch.

    mpirun -n 4 python examples/reshard_standalone.py        messages over MPI (needs mpi4py)
    torchrun --nproc-per-node 4 examples/reshard_standalone.py        messages over gloo

The first half of the ranks holds a small model as a trainer does: split by rows, with q, k and v separate. The second half receives it as
an engine does: split by columns, with q, k and v fused in one array. The program only describes both layouts; the plan finds the messages.
"""

from __future__ import annotations

import os

import numpy as np

from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, RankLayout, Transport, plan

HIDDEN, ROUNDS = 64, 3
TENSORS = {"q": (48, HIDDEN), "k": (16, HIDDEN), "v": (16, HIDDEN), "norm": (HIDDEN,)}


def transport_of_this_process() -> tuple[Transport, int]:
    """Return a transport to the other ranks, and the number of ranks, for torchrun or mpirun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed

        from asyncmoe.reshard.torch_transport import TorchTransport

        torch.distributed.init_process_group("gloo")
        return TorchTransport(), torch.distributed.get_world_size()
    from mpi4py import MPI

    from asyncmoe.reshard.mpi_transport import MpiTransport

    return MpiTransport(), MPI.COMM_WORLD.Get_size()


def source_layout(rank: int, count: int) -> RankLayout:
    """Layout of rank `rank` of `count`: its share of the rows of q, k and v, and all of norm."""
    builder = LayoutBuilder(rank, "float32")
    for name, shape in TENSORS.items():
        if name == "norm":
            builder.place(name, shape, [(name, Box((0,), shape), (0,))])
        else:
            rows = shape[0] // count
            builder.place(name, (rows, HIDDEN), [(name, Box((rank * rows, 0), (rows, HIDDEN)), (0, 0))])
    return builder.build()


def destination_layout(rank: int, number: int, count: int) -> RankLayout:
    """Layout of rank `rank`, receiver `number` of `count`: its share of the columns of stacked q, k and v, and of norm."""
    builder = LayoutBuilder(rank, "float32")
    columns = HIDDEN // count
    boxes = [(name, Box((0, number * columns), (TENSORS[name][0], columns))) for name in ("q", "k", "v")]
    builder.stack("qkv", boxes)
    builder.place("norm", (columns,), [("norm", Box((number * columns,), (columns,)), (0,))])
    return builder.build()


def whole(name: str, round_number: int) -> np.ndarray:
    """Return the content of a tensor in a round."""
    shape = TENSORS[name]
    return (1000.0 * round_number + len(name) + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape).astype(np.float32)


def main() -> None:
    transport, world = transport_of_this_process()
    rank, half = transport.rank, world // 2
    sources = [source_layout(r, half) for r in range(half)]
    destinations = [destination_layout(half + r, r, half) for r in range(half)]
    made = plan(TENSORS, sources, destinations)
    held = {name: np.empty(s.shape, np.float32) for name, s in sources[rank].storages.items()} if rank < half else {}
    wanted = (
        {name: np.empty(s.shape, np.float32) for name, s in destinations[rank - half].storages.items()} if half <= rank < 2 * half else {}
    )
    with Exchanger(made, transport, timeout_s=60) as exchanger:
        exchanger.bind(held, wanted)
        for round_number in range(ROUNDS):
            for name, array in held.items():
                full = whole(name, round_number)
                array[...] = full if name == "norm" else np.split(full, half)[rank]
            moved = exchanger.run()
            if wanted:
                columns = slice((rank - half) * HIDDEN // half, (rank - half + 1) * HIDDEN // half)
                expected = np.concatenate([whole(name, round_number)[:, columns] for name in ("q", "k", "v")])
                np.testing.assert_array_equal(wanted["qkv"], expected)
                np.testing.assert_array_equal(wanted["norm"], whole("norm", round_number)[columns])
    print(f"rank {rank}: sent {moved.sent} and received {moved.received} bytes, {ROUNDS} times, and all is right", flush=True)


if __name__ == "__main__":
    main()
