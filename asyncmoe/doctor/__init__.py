"""`asyncmoe doctor`: what of a machine would stop a run or slow it down, and the cure.

`gathering` looks and judges nothing; `facts` is what it found, as plain data; the checks (`software`, `built`, `devices`, `host`, `run`)
are pure functions from facts to a `Verdict`, all named in `examination`. `comparison` says what differs between the reports of nodes.
"""
