"""Looking at the machine: everything that asks the system, other processes or files. It judges nothing.

Whatever it asks may be missing, broken or hang: each question has a time-out, and no answer is a fact like others.
"""

from asyncmoe.doctor.probes.machine import gather

__all__ = ["gather"]
