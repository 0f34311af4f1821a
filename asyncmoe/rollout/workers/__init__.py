"""Workers run episodes and hold the trajectories until the trainer has them: one in the controller, or several processes, each on engines
of its own (`rollout.workers`). The controller keeps the ledger: what starts, what is leased, what is over."""
