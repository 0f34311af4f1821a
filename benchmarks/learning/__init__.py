"""Whether a real model learns, and what helps: arms that differ in one thing, three seeds each, with the same prompts and budget.

Each run is `asyncmoe run examples/real/sums.yaml` in processes of its own, below build/learning. A run that was stopped goes on from its
checkpoint, and one that is recorded is not run again, so the same command goes on at any time. What is kept of a run are its curves.
"""
