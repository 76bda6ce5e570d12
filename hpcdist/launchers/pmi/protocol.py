"""The lines of PMI-1: what MPI asks, and the answers.

A request is one line, ``cmd=put kvsname=job key=k value=v``; the value is the rest of the line. The
answer is one line, with ``rc=0`` if it went well. Source: MPICH's ``src/pmi`` (the interface is
described in Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale
Systems", 2010), and recorded conversations of MPICH 5 with hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# Longest name of a key space, key and value that MPI may use, the same as hydra's: MPICH itself
# divides longer values.
NAME_MAX, KEY_MAX, VALUE_MAX = 256, 64, 1024


class Space(Protocol):
    """Where puts go: the job's key-value space."""

    def put(self, key: str, value: str) -> None:
        """Store a value, for all ranks to see after the next barrier."""

    def get(self, key: str) -> str | None:
        """Return a value; None if there is none."""

    def barrier(self) -> None:
        """Wait until all ranks have called."""


def parse(line: str) -> dict[str, str]:
    """Divide a request into its fields.

    Parameters
    ----------
    line : str
        Without the line's end. A value may contain spaces: it is the last field.

    Returns
    -------
    dict
        Name to value; ``cmd`` is among them.

    Raises
    ------
    ValueError
        If the line is not a request.
    """
    fields: dict[str, str] = {}
    rest = line.strip(" \r\n")
    while rest:
        name, equals, tail = rest.partition("=")
        if not equals or not name or " " in name:
            raise ValueError(f"not a PMI request: {line[:200]!r}")
        if name == "value":
            fields[name] = tail
            break
        fields[name], _, rest = tail.partition(" ")
        rest = rest.lstrip(" ")
    if "cmd" not in fields:
        raise ValueError(f"not a PMI request: {line[:200]!r}")
    return fields


def mapping(nodes: Sequence[object]) -> str:
    """Return which rank is on which node, in the notation of ``PMI_process_mapping``.

    Parameters
    ----------
    nodes : sequence
        The node of each rank, as anything that can be compared.

    Returns
    -------
    str
        ``(vector,(0,2,4))``: from node 0 on, two nodes with four ranks each; more blocks where the
        ranks are placed otherwise.
    """
    numbers: dict[object, int] = {}
    blocks: list[list[int]] = []  # first node, number of nodes, ranks on each
    runs: list[tuple[int, int]] = []  # node, consecutive ranks on it
    for node in nodes:
        number = numbers.setdefault(node, len(numbers))
        if runs and runs[-1][0] == number:
            runs[-1] = (number, runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    for number, count in runs:
        if blocks and blocks[-1][2] == count and blocks[-1][0] + blocks[-1][1] == number:
            blocks[-1][1] += 1
        else:
            blocks.append([number, 1, count])
    return "(vector," + ",".join(f"({a},{b},{c})" for a, b, c in blocks) + ")"


class Manager:
    """Answers one process's requests.

    Parameters
    ----------
    size : int
        Number of processes in the job.
    name : str
        Name of the job's key-value space. MPICH names shared memory after it, so no two jobs of a
        machine may have the same.
    placement : str
        From :func:`mapping`.
    space : Space
        Where puts go.
    """

    def __init__(self, size: int, name: str, placement: str, space: Space) -> None:
        self.size = size
        self.name = name
        self.placement = placement
        self.space = space
        #: True after the last request: MPI has ended, or aborts.
        self.done = False

    def answer(self, line: str) -> str | None:
        """Answer a request.

        Parameters
        ----------
        line : str
            Without the line's end.

        Returns
        -------
        str or None
            The answer, with its line's end; None where none is expected.
        """
        try:
            fields = parse(line)
        except ValueError:
            return "cmd=unknown_result rc=-1 msg=not_understood\n"
        handler = getattr(self, "_" + fields["cmd"], None)
        if handler is None:
            return f"cmd={fields['cmd'][:64]}_result rc=-1 msg=there_is_no_process_manager\n"
        return handler(fields)

    def _init(self, fields: dict[str, str]) -> str:
        fine = fields.get("pmi_version") == "1"
        return f"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc={0 if fine else -1}\n"

    def _get_maxes(self, fields: dict[str, str]) -> str:
        return (
            f"cmd=maxes rc=0 kvsname_max={NAME_MAX} keylen_max={KEY_MAX} vallen_max={VALUE_MAX}\n"
        )

    def _get_appnum(self, fields: dict[str, str]) -> str:
        return "cmd=appnum rc=0 appnum=0\n"

    def _get_my_kvsname(self, fields: dict[str, str]) -> str:
        return f"cmd=my_kvsname rc=0 kvsname={self.name}\n"

    def _get_universe_size(self, fields: dict[str, str]) -> str:
        return f"cmd=universe_size rc=0 size={self.size}\n"

    def _put(self, fields: dict[str, str]) -> str:
        key, value = fields.get("key", ""), fields.get("value", "")
        if not key or len(key) > KEY_MAX or len(value) > VALUE_MAX:
            return "cmd=put_result rc=-1 msg=key_or_value_too_long\n"
        self.space.put(key, value)
        return "cmd=put_result rc=0 msg=success\n"

    def _get(self, fields: dict[str, str]) -> str:
        key = fields.get("key", "")
        value: str | None
        if key == "PMI_process_mapping":
            value = self.placement
        elif key.startswith("PMI_"):  # optional queries that a process manager need not answer
            value = None
        else:
            value = self.space.get(key)
        if value is None:
            return "cmd=get_result rc=-1 msg=key_not_found value=unknown\n"
        return f"cmd=get_result rc=0 msg=success value={value}\n"

    def _barrier_in(self, fields: dict[str, str]) -> str:
        self.space.barrier()
        return "cmd=barrier_out rc=0\n"

    def _finalize(self, fields: dict[str, str]) -> str:
        self.done = True
        return "cmd=finalize_ack rc=0\n"

    def _abort(self, fields: dict[str, str]) -> None:
        self.done = True
