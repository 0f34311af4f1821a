"""`asyncmoe doctor`: what of a machine would stop a run or slow it down, and the cure.

`probes` look and judge nothing; `facts` is what they found, as plain data; the checks (`software`, `built`, `devices`, `host`, `run`)
are pure functions from facts to a `Verdict`, all named in `examination`. `comparison` says what differs between the reports of nodes.
"""
