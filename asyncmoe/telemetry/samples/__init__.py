"""Readable trajectories of a run: the choice of those to keep, their records and files, and `asyncmoe show`.

`choice` decides which groups are kept, identically in all processes. The controller writes samples/rollout.jsonl (what was asked, sampled
and scored, and the outcome of the group), trainer rank 0 writes samples/trainer.jsonl (the trainer's values for each token). `index` finds
these records and joins them, `tokens` aligns the controller's and the trainer's values by token, also as the JSON that programs and the
page of a run read, and `terminal` shows them.
"""
