"""Rollout workers: processes that run episodes for the controller, each on engines of its own, and hold the trajectories until the trainer
has them (`rollout.workers`). The controller keeps the ledger: what starts, what is leased, what is over."""
