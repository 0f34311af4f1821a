"""The trainer: one process per rank, started by torchrun, built on Megatron-core."""
