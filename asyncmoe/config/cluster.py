"""Where the processes of a run are when they are not all on one machine."""

from __future__ import annotations

from pydantic import Field

from asyncmoe.config.fields import NonNegative, Port, Positive, PositiveFloat, Section


class ClusterSection(Section):
    """Several machines: how their processes reach each other, and how they are spread."""

    network: str = Field(
        "loopback",
        description="At which address processes of other machines reach those of this one. loopback: there are none; hostname: what the "
        "host's name stands for; the name of an interface (ib0); or a network (10.1.0.0/16) that this machine has an address in. "
        "ASYNCMOE_HOST in the environment wins.",
    )
    port: Port = Field(0, description="The controller's; 0: any free one, which rendezvous.json names.")
    trainer_nodes: Positive = Field(1, description="trainer.ranks are spread over so many nodes, as many on each.")
    engine_nodes: Positive = Field(1, description="engines.count are spread over so many nodes; the controller lives on the first of them.")
    silence_s: PositiveFloat = Field(30.0, description="An engine that has not been heard of for so long is taken for dead.")
    clock_s: PositiveFloat = Field(10.0, description="How far the clocks of two machines may be apart.")
    requeues: NonNegative = Field(3, description="How often a SLURM job goes back into the queue after it lost a process.")
