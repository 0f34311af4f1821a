"""Low-rank adapters in the Megatron model.

An *adapter* is the set of all pairs; a *pair* is A [rank, in] and B [out, rank] of one linear layer, or of one expert's:
y = W x + (alpha / rank) B A x. The halves of pairs are named as the model is: "layers.3.q_proj.a",
"layers.3.experts.17.gate_proj.b", and "layers.3.experts.shared.gate_proj.a" where the experts of a layer share a half.
Which there are, and on which rank, is `asyncmoe.models.lora`.

    values      what training starts from
    pairs       the modules and what they add to a layer's output
    module      those of a model chunk together; how they are saved
    hooks       where in Megatron's layers they are added
    attach      into a GPTModel; switching off
    snapshot    what engines are sent, shard to shard
    files       the other way to them: files
    merge       into the weights
    gradients   the sums over ranks that Megatron does not do
    canonical   whole tensors put into the ranks
"""
