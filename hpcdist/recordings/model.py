"""What a flight recorder has, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The name of the collectives by which the default group starts; its next one is number 1 again.
_START = "init_process_group"


@dataclass(frozen=True)
class Site:
    """A line of the program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{'/'.join(self.file.rsplit('/', 2)[-2:])}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Group:
    """A group: this process's rank in it, and the world ranks of its members in order."""

    name: str
    rank: int
    size: int
    uid: int
    ranks: tuple[int, ...]

    @property
    def series(self) -> tuple[str, str]:
        """Names of its two series of numbers: the program's collectives, those of its start."""
        return str(self.uid), f"{self.uid} start"


@dataclass(frozen=True)
class Operation:
    """One operation of one rank; times are nanoseconds since 1970.

    Attributes
    ----------
    number : int
        Counts the operations of the process, from 1 on.
    name, kind : str
        The public function; what the engine does for it.
    group : Group or None
        None if the recorder had no room for its name.
    seq : int
        Number of a collective in its group; 0 for a message.
    dtype : str
        Empty without a tensor.
    elements, inputs, outputs : int
        Elements of the tensor, of all inputs, and of all outputs.
    itemsize : int
        Bytes of one element.
    shape : tuple of int or None
        None if it has too many dimensions.
    peer, tag : int
        Of a message; a collective's `peer` is its root, or -1.
    op : str
        The reduction, or empty.
    state : {"queued", "running", "done", "failed"}
        How far it got.
    failure : str
        Why it failed, in a word.
    queued : bool
        Whether it was asynchronous, or behind such an operation.
    called : int
        When the program called it.
    started, agreed, ended : int or None
        When its lane began it, when all ranks had arrived, and when it ended; None where that was
        not timed. An operation of a few bytes that did not wait takes less than 50 us.
    site : Site or None
        The calling line.
    """

    number: int
    name: str
    kind: str
    group: Group | None
    seq: int
    dtype: str
    elements: int
    inputs: int
    outputs: int
    itemsize: int
    shape: tuple[int, ...] | None
    peer: int
    tag: int
    op: str
    state: str
    failure: str
    queued: bool
    called: int
    started: int | None
    agreed: int | None
    ended: int | None
    site: Site | None

    @property
    def message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind in ("send", "recv")

    @property
    def starts(self) -> bool:
        """Whether the default group's start called it, not the program."""
        return self.name == _START

    @property
    def series(self) -> str:
        """The series in which it is numbered, see :attr:`Group.series`; empty without a group."""
        return self.group.series[self.starts] if self.group else ""

    @property
    def bytes(self) -> int:
        """The size as benchmarks define it: the larger of this rank's input and output."""
        return max(self.inputs, self.outputs, self.elements) * self.itemsize

    @property
    def finished(self) -> bool:
        """Whether it is done or failed."""
        return self.state in ("done", "failed")

    def __str__(self) -> str:
        if self.message:
            where = "to" if self.kind == "send" else "from"
            peer = f"rank {self.peer}" if self.peer >= 0 else "any rank"
            text = f"{self.name} {where} {peer}, tag {self.tag}"
        else:
            text = f"{self.name} #{self.seq}"
        text += f" of group '{self.group.name}'" if self.group else ""
        if self.dtype:
            shape = f"[{', '.join(map(str, self.shape))}]" if self.shape is not None else ""
            text += f", {self.dtype}{shape or f', {self.elements} elements'}"
        text += f", {self.op}" if self.op else ""
        return text + (f", at {self.site}" if self.site else "")


@dataclass
class Survival:
    """What has become of a job that goes on when a rank dies.

    Attributes
    ----------
    waits : int
        1 if the process is a spare.
    spares : int
        How many spares the job has.
    deaths, recoveries : int
        How many processes have died, and how often the others went on.
    took : int
        Nanoseconds of all recoveries, with the return to the last commit.
    last : int
        Nanoseconds since 1970: when the last one ended.
    """

    waits: int = 0
    spares: int = 0
    deaths: int = 0
    recoveries: int = 0
    took: int = 0
    last: int = 0


@dataclass
class Recording:
    """What one process's flight recorder has.

    Attributes
    ----------
    path : str
        The file.
    rank, size, pid, host : int, int, int, str
        The process.
    job : str
        Eight digits, the same on all ranks of a job.
    launch : str
        Slurm's number of the job, or empty.
    program : str
        The command line.
    seen : int
        Nanoseconds since 1970: when the process was last known to live.
    left : bool
        Whether it has ended in order.
    alive : bool
        Whether the file belongs to a process that lives; False for a copy.
    groups : list of Group
        Those that it was a member of.
    operations : list of Operation
        The oldest first.
    stacks, stacks_at : str, int
        The stacks of its threads as last asked for, and when; empty and 0 if nobody has.
    survival : Survival
        What the process knows of deaths.
    """

    path: str
    rank: int
    size: int
    pid: int
    host: str
    job: str
    launch: str
    program: str
    seen: int
    left: bool
    alive: bool
    groups: list[Group] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    stacks: str = ""
    stacks_at: int = 0
    survival: Survival = field(default_factory=Survival)
