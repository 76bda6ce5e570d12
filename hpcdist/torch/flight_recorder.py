"""Dumps of the flight recorder, which torch's groups and groups over NCCL fill."""

from __future__ import annotations

from hpcdist.flight_recorder import recorder

__all__ = ["dump_flight_recorder"]


def dump_flight_recorder(prefix: str | None = None) -> str:
    """Write a dump of the flight recorder, for ``torchfrtrace``.

    Local to this process: call it on all ranks, and give the folder to
    ``torchfrtrace -p PREFIX FOLDER``.

    Parameters
    ----------
    prefix : str, optional
        The file's path, to which the rank is added. By default the variable
        ``TORCH_FR_DUMP_TEMP_FILE``, else ``~/.cache/torch/comm_lib_trace_rank_``.

    Returns
    -------
    str
        The file.

    Raises
    ------
    RuntimeError
        If the recorder is off.
    OSError
        If the file cannot be written.

    Notes
    -----
    It has the operations of torch's groups, and those of hpcdist's own groups over NCCL. Those over
    MPI are labelled ``gloo:``, because torchfrtrace takes the names of torch's own backends only;
    before torch 2.12, which takes no ``gloo:``, they are labelled ``xccl:``.
    Source: ``torch._C._distributed_c10d._dump_nccl_trace``.
    """
    made = recorder()
    if made is None:
        raise RuntimeError(
            "the flight recorder is off: set TORCH_FR_BUFFER_SIZE=2000 before the first group is "
            "made"
        )
    return made.write(prefix)
