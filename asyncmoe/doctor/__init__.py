"""`asyncmoe doctor`: find faults of a machine that would stop or slow down a run, and their fixes.

`gather` asks programs for `facts`, plain data; the checks in `packages`, `gpus` and `fit` are pure functions of the facts, because
`asyncmoe run` uses these checks, too. The checks in `host`, `infiniband` and `run` inspect the machine themselves. `examination` runs all
checks and reports their findings.
"""
