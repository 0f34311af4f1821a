"""Probes, which query the system, other processes and files without judging the results.

Whatever a probe queries may be missing, broken or hang: each query has a timeout, and a missing answer is a fact as well.
"""
