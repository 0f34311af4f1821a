"""A run inside a SLURM allocation, started on its first node: `python -m asyncmoe.launch.slurm CONFIG [key=value ...]`.

`steps` reads SLURM's variables, assigns parts to nodes and builds the `srun` command of each process, `supervise` starts and supervises
them (`parts`), and `outcome` reports a finished run or requeues the job. `command` has the signals that stop a batch script,
and `control` SLURM's own commands. `task` runs inside a step, and `join` adds engines from another allocation.
"""
