"""A discrete-event model of a run: engines, scoring, queue, trainer and weight sync, with the live system's own admission policy.

`asyncmoe simulate` predicts, before any GPU is rented, how many GPUs should generate, which eta to choose, and the speed-up. Start with
`asyncmoe.simulate.plant.Plant`, the parameters of the model, and `asyncmoe.simulate.laws`, the speed-up to expect.
"""
