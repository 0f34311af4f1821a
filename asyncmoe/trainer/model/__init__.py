"""The Megatron model of a rank: building, parallelism, optimisation, checkpoints and routing replay."""
