"""Sparse upcycling (arXiv 2212.05055): a mixture of experts from a dense model, each expert a copy of its MLP.

The mixture computes what the dense model does: the weights of the chosen experts sum to 1, whatever the router says. Experts that are equal
get equal gradients from equal tokens, and the router none; `diversify` makes them differ.
"""
