"""A discrete-event model of a run: engines, scoring, queue, trainer and weight sync, with the live system's own admission policy.

`asyncmoe simulate` predicts, before any GPU is rented, how many GPUs should generate, which staleness bound to choose, and the speed-up.
Start with `plant`, the keys of a plant, and `laws`, the speed-up to expect. `simulation` connects the engines (`generating`), with which it
shares a `state`, to scoring, queue, trainer and weight sync; `fleet` models decoding, `workload` draws lengths; `compare` and `sweep` run
many simulations, `show` prints them.
"""
