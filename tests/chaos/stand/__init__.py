"""Light stand-ins for what makes a real run heavy: SGLang, torchrun and the trainer's ranks.

Everything else is real: the supervisor, the controller, the log, the client of the ranks, checkpoints. `engine` keeps SGLang's
HTTP protocol, `rank` the trainer's messages, `supervisor` starts both in place of the real ones.
"""
