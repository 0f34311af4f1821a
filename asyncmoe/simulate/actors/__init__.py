"""The actors of a simulation, a file each. They share a `RunState`; one imports another only to call it.

`asyncmoe.simulate.simulation` connects them: it decides which actor acts after another.
"""
