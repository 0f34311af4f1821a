"""The trainer: one process a rank, started by torchrun. Megatron-core underneath."""
