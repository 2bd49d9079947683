"""The section [launch] of RUN.toml: how ranks meet, watch each other and end, whoever started them."""

from typing import Annotated, Literal

from pydantic import Field

from megalite.config.sections.section import Section


class LaunchSection(Section):
    """How ranks meet, watch each other and end, whichever launcher started them."""

    rendezvous_seconds: float = Field(
        300.0, gt=0, description="seconds in which all ranks of a launcher must have met"
    )
    heartbeat_seconds: float = Field(
        30.0,
        ge=2,
        description="seconds without an answer after which a host or the network to it counts as lost",
    )
    collective_seconds: float = Field(
        1800.0, gt=0, description="seconds that a rank waits in a collective for the others"
    )
    bind_cores: bool | Literal["auto"] = Field(
        "auto",
        description='bind each rank to its own cores; "auto": with several NUMA nodes or GPUs',
    )
    interface: str = Field(
        "auto",
        min_length=1,
        description='network interface between hosts, as "eth0"; "auto": by the route to rank 0',
    )
    grace_seconds: float = Field(
        240.0,
        gt=0,
        description="seconds after a signal until a run is ended that neither ends nor writes its checkpoint",
    )
    restarts: Annotated[int, Field(ge=0)] = Field(
        0, description="restarts after a failure of ranks that megalite train starts itself; 0: none"
    )
