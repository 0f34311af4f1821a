"""Loggers: TensorBoard, W&B, MLflow and Trackio, each an optional package, each fed by a thread of the supervisor.

- `points`: converts records to values by step. Pure.
- `checks`: checks before anything starts.
- `sink`: the thread, and the record of what a logger has been sent, in run.dir/loggers.
- `tensorboard_client`, `wandb_client`, `mlflow_client`, `trackio_client`: the four clients.
"""
