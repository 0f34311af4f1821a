"""A run inside a SLURM allocation, started on its first node: `python -m asyncmoe.launch.slurm CONFIG [key=value ...]`.

`allocation` reads SLURM's variables, `placement` assigns parts to nodes, `steps` builds the `srun` command of every part, `supervise`
starts and supervises the parts, `verdict` finds the root cause of a failure, and `outcome` reports a finished run or requeues the job.
`task` runs inside a step, `join` adds engines from another allocation, and `sweep` runs one task of a job array.
"""
