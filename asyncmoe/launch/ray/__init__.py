"""A run on a Ray cluster (`launch: ray`): the same processes as elsewhere, in placement groups.

Ray gives nodes and takes them back, and says when one is gone; nothing of the run goes through it. What generates and trains are the
same command lines that SLURM or a shell would start: `asyncmoe rollout`, `asyncmoe engine` and torchrun agents.

- `planning`: which nodes, with what, and what is started on each. Pure.
- `cluster`: finding the cluster, and reserving a placement group.
- `node`: the actor on each node that starts the processes there.
- `post`: the driver's side of such an actor.
- `driver`: all of it, from `asyncmoe run` to the summary.
"""
