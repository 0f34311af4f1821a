"""Loggers: W&B, MLflow and Trackio, each an optional package, each fed by a process of its own that reads the run's files.

- `points`: records as figures with a step. Pure.
- `tables`: samples as tables.
- `backend`: what the three have in common; `wandb_backend`, `mlflow_backend`, `trackio_backend`: the three.
- `state`: what a logger has been sent, in run.dir/loggers.
- `parameters`: configuration and versions, which a logger shows beside a run.
- `checks`: what can be refused before anything starts.
- `sender`: the process, also `asyncmoe resend RUN`. It reads metrics.jsonl, rollout.jsonl and evaluation.jsonl from the start, and skips
  what was sent; so a logger that was down, or a process that was killed, misses nothing.
- `supervised`: the sender as the live view starts, watches and ends it.
"""
