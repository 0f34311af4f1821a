"""`asyncmoe doctor`: find faults of a machine that would stop or slow down a run, and their fixes.

`probes` gather facts without judging them; `facts` defines the facts as plain data; the checks (`software`, `built`, `devices`, `host`,
`run`, `run_on_gpus`) are pure functions from facts to a `Verdict`, all listed in `examination`. `report` prints them, and compares nodes.
"""
