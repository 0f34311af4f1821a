"""Placement and addresses of a run on several machines."""

from __future__ import annotations

from asyncmoe.config.fields import NonNegative, Port, Positive, Seconds, Section


class ClusterSection(Section):
    """A run on several machines: how processes reach each other, and how they are spread over nodes."""

    network: str = "loopback"
    """Address at which other machines reach this one. loopback: the run has one machine; hostname: the address the host's name resolves to;
    the name of an interface (ib0); or a network (10.1.0.0/16) in which this machine has an address. The environment variable ASYNCMOE_HOST
    overrides it."""
    port: Port = 0
    """Port of the controller; 0: any free port, which rendezvous.json names. With network loopback, 0 opens no port: the processes use a
    Unix socket. Set it if a firewall admits only fixed ports."""
    trainer_nodes: Positive = 1
    """Nodes of the trainer; trainer.ranks are spread over them evenly."""
    engine_nodes: Positive = 1
    """Nodes over which the engines are spread; the controller runs on the first."""
    heartbeat_timeout_s: Seconds = 30.0
    """Seconds without a heartbeat after which an engine counts as dead and its responses continue elsewhere."""
    requeues: NonNegative = 3
    """How many times a SLURM job may requeue itself after it lost a process."""
