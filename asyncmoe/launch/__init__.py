"""Launchers, which start a run's processes on this machine (`local`), in a SLURM job (`slurm`) or on a Ray cluster (`ray`)."""
