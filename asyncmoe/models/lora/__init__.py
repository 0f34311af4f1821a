"""Adapters of a model as plain data: their tensors, and the layouts of these tensors in memory. This package does not need torch.

adapter     pairs of a model, their canonical names, shapes and values
halves      the halves of a Megatron layer, their sharding over ranks, their layouts, and the reductions that their gradients need
sglang      layouts of the halves in the tensors that SGLang loads, and in its adapter memory
peft        PEFT's files
"""
