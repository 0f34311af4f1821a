"""A run inside a SLURM allocation, started on its first node: `python -m asyncmoe.launch.slurm CONFIG [key=value ...]`.

`allocation` reads what SLURM says, `placement` splits the nodes, `steps` writes the `srun` command of every part, `supervise` starts and
watches them, `verdict` finds the first cause of an end, `outcome` reports a finished run or puts the job back into the queue. `task` is
what runs inside a step. `join` adds engines from another allocation, `sweep` is one task of a job array.
"""
