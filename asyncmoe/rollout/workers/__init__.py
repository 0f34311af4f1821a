"""Rollout workers: processes that run all episodes, at all engines, and hold the trajectories until the trainer has them. The controller
keeps the ledger: what starts, what is leased, what is over."""
