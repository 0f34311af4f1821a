"""The SGLang engines of a run: their processes, the pool that requests go to, and the weights they serve."""
