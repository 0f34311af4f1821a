"""Publish weight versions from the trainer's ranks to the engines.

A version's path from the optimizer step to serving, with `sync.method: reshard`:

1. `trainer/loop.py` calls `begin` of a `Publisher` (`publisher.py`) at the start of the run and after every `sync.every` steps.
2. `reshard.py` computes the expected checksums if the version is verified (`expected_checksums.py`), updates the tensors to send
   (`sources.py`), and starts the sending thread.
3. `rendezvous.py`: for the first version, and if the set of engines has changed, the controller starts receivers in the engines; all
   trainer and engine ranks meet and compare plans (`TERMS`, `ready(rank)`, `VERDICT`).
4. `sender.py`: with `sync.delta`, every rank encodes its changes, and rank 0 decides whether to send a delta (`deltas.py`). Rank 0 asks the
   controller to stage the version and sets `header(N)`; every rank connects channel E if it has none and sends its shards (`sent(N, rank)`)
   while the next step computes. `trainer/loop.py` calls `wait_sent` before it changes the weights.
5. `sender.py`: when all ranks have reported `sent` and `staged`, rank 0 asks the controller to commit. `weights/coordinator/`
   pauses the engines (`driver.py`), has them swap (`ways.py`), compares their checksums with the expected ones
   (`expected_checksums.py`) and resumes them (`coordinator.py`); rank 0 sets `end(N)`.
6. `sender.py`: until `settle`, rank 0 watches whether the version must be sent again to new engines, then sets `over(N)`.

`asyncmoe.weights.receiver` lists the engine's side of steps 3 to 5. With `sync.method: broadcast`, `broadcast.py` gathers whole tensors to
rank 0 (`gather.py`) and broadcasts them in a process group with the paused engines (`broadcast_group.py`). With `sync.method: disk`,
`disk.py` writes them to a directory (`hf_files.py`), from which the engines load them.
"""
