"""The SGLang engines of a run: their processes, the pool that dispatches requests, and the weights they serve."""
