"""Loggers: TensorBoard, W&B, MLflow and Trackio, each an optional package, each fed by a thread of the supervisor.

- `points`: records as figures with a step. Pure.
- `checks`: what can be refused before anything starts.
- `sink`: the thread, and what a logger has been sent, in run.dir/loggers.
- `tensorboard_client`, `wandb_client`, `mlflow_client`, `trackio_client`: the four.
"""
