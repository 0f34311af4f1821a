"""A run on a Ray cluster (`launch: ray`): the processes of any run, in a placement group.

Ray reserves and releases nodes and reports lost ones; none of the run's data passes through Ray. Rollout and training are the command
lines that SLURM or a shell would start: `asyncmoe rollout`, `asyncmoe engine` and torchrun agents.

- `planning`: the nodes, their resources, and the processes to start on each. Pure.
- `cluster`: connects to the cluster and reserves a placement group.
- `node`: the actor on each node, which starts the processes there, and its counterpart in the driver.
- `driver`: the whole launcher, from `asyncmoe run` to the summary.
"""
