"""Low-rank adapters in the Megatron model.

An *adapter* is the set of all pairs; a *pair* is A [rank, in] and B [out, rank] of one linear layer, or of one expert's linear layer:
y = W x + (alpha / rank) B A x. The halves of pairs have the model's names: "layers.3.q_proj.a", "layers.3.experts.17.gate_proj.b", and
"layers.3.experts.shared.gate_proj.a" if the experts of a layer share a half. `asyncmoe.models.lora` defines which halves exist, and on
which rank.

    values      initial values
    pairs       modules that hold pairs and add them to a layer's output
    module      all pairs of a model chunk as one module; checkpoint form
    hooks       where Megatron's layers add pairs
    attach      attaching adapters to a GPTModel; switching them off
    merge       merging adapters into the weights
    canonical   distributing whole tensors over the ranks
"""
