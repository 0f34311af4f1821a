"""Turns `torch_dist` checkpoints of Megatron-LM and Megatron-Bridge into Hugging Face ones, from which runs start. Megatron is not needed.

    folder    finds the checkpoint of an iteration, and reads parts of its tensors
    settings  what the checkpoint says of its model, compared with a Hugging Face configuration
    names     under which name, and where in it, a checkpoint has what a rank of Megatron calls a parameter
    command   `asyncmoe import-checkpoint`: writes the Hugging Face checkpoint, tensor by tensor

Source: megatron/core 0.16.1 and 0.19.2 (dist_checkpointing, transformer), Megatron-LM (training/checkpointing.py).
"""
