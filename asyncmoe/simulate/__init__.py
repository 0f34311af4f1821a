"""A discrete-event model of a run: engines, scoring, queue, trainer and weight sync, with the live system's own admission policy.

It answers before any GPU is rented how many of them should generate, which eta is worth having, and what that gains
(`asyncmoe simulate`). Start with `asyncmoe.simulate.plant.Plant`, what is modelled, and `asyncmoe.simulate.laws`, what to expect of it.
"""
