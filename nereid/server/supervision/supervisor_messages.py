"""Events that the supervisor of a server receives, and commands that it returns."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nereid.backends.triton.stub_processes import Process, Stub


@dataclass(frozen=True, slots=True)
class ProcessesSeen:
    """Event: the states of the known processes; `found` has the living stubs if they were listed, too.

    `failed` has the pids that have reported a failed device since the last event.
    """

    states: Mapping[Process, str]
    found: Collection[Stub] | None = None
    failed: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """Event: the ready versions by model, the models that take images, and those of them to probe."""

    ready: dict[str, set[int]]
    image_models: Collection[str]
    due: Collection[str]


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """Event: a probe that began at `began_s` has ended; `failure` is None for a success."""

    probe: "Probe"
    failure: str | None
    began_s: float


@dataclass(frozen=True, slots=True)
class IndexRead:
    """Event: the ready versions by model, read for a repair."""

    ready: Mapping[str, set[int]]


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Event: Triton has loaded a model again, or rejected that for the reason `refusal`."""

    refusal: str = ""


@dataclass(frozen=True, slots=True)
class RepairInterrupted:
    """Event: `ReadIndex` or `Reload` ended without a response."""


@dataclass(frozen=True, slots=True)
class InstancesChanged:
    """Event: Triton has loaded a model with another number of instances; the processes `old` will end."""

    model: str
    old: Collection[Process]


@dataclass(frozen=True, slots=True)
class ServerEnded:
    """Event: the server's process has ended, or ends because of a signal."""


@dataclass(frozen=True, slots=True)
class FindStubs:
    """Command: list the server's processes immediately."""


@dataclass(frozen=True, slots=True)
class ProbeSoon:
    """Command: start the next round of probes immediately."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Command: send an image to a model."""

    model: str
    number: int
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ReadIndex:
    """Command: read the server's index for a repair."""


@dataclass(frozen=True, slots=True)
class Reload:
    """Command: make Triton start new stubs for versions of a model."""

    model: str
    versions: frozenset[int]
    cause: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Command: kill a process."""

    process: Process


@dataclass(frozen=True, slots=True)
class ReportBroken:
    """Command: publish the models that are broken, each with the reason."""

    models: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Log:
    """Command: log a line."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Command: end the supervision; the reason why the server must be restarted, empty if it has ended."""

    reason: str = ""


Event = (
    ProcessesSeen
    | RoundStarted
    | ProbeEnded
    | IndexRead
    | Reloaded
    | RepairInterrupted
    | InstancesChanged
    | ServerEnded
)
Command = FindStubs | ProbeSoon | Probe | ReadIndex | Reload | Kill | ReportBroken | Log | End
Commands = list[Command]
