"""Rollout workers: processes that run all episodes, at all engines, and keep the trajectories until the trainer has them. The controller
keeps the ledger: what starts, is leased and has ended."""
