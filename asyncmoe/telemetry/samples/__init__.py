"""Trajectories of a run that people can read: which are kept, their records, their files, and `asyncmoe show`.

`choice` decides which groups are kept, alike in all processes. The controller writes samples/rollout.jsonl (what was asked, sampled and
scored, and what became of the group), trainer rank 0 writes samples/trainer.jsonl (what the trainer made of each token). `index` finds and
joins them, `tokens` aligns the two sides by token, also as the JSON that programs and the page of a run read, and `terminal` shows them.
"""
