"""The engines of a run: their processes, the pool that dispatches requests, and the adapter they hold.

- `engine.py`, `types.py`: what the code needs of an engine. `sglang/` implements it, and only `backend.py` imports that.
- `pool.py`: dispatches requests, with `gate.py` (how many at a time) and `scheduling.py` (which next, and where).
- `decode.py`: what an engine records with a response. `adapters.py`: its adapter.
- `membership.py`, `engine_agent.py`, `engine_stay.py`: engines of other machines, as the controller and they themselves see it.
  `engine_python.py`: the Python that they run in.
- `nodes.py`: engines over several machines. `gathering.py`, `engine_node.py`: how their nodes come and end together, as the controller and
  they themselves see it.
"""
