"""Adapters of a model, as plain data: what there is of them, and where it lies in whose memory. Nothing here needs torch.

adapter     pairs of a model, their canonical names, shapes and values
halves      which halves a layer of Megatron's has, how each is spread over the ranks, and what its gradient lacks
megatron    where every half lies on the trainer's ranks
sglang      where it lies in what SGLang is given, and in its adapter memory
peft        PEFT's files
"""
