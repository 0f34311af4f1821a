"""A run inside a SLURM allocation, started on its first node: `python -m asyncmoe.launch.slurm CONFIG [key=value ...]`.

`allocation` reads SLURM's variables, `steps` assigns parts to nodes and builds the `srun` command of each, `supervise` starts and
supervises the `parts`, which find the root cause of a failure, and `outcome` reports a finished run or requeues the job. `command` and
`control` are shared: the main function with its signals, and SLURM's own commands. `task` runs inside a step, `join` adds engines from
another allocation, and `sweep` runs one task of a job array.
"""
