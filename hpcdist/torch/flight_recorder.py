"""Dumps of the flight recorder, which torch's groups and groups over NCCL fill."""

from __future__ import annotations

import os
import tempfile

from hpcdist import _engine
from hpcdist._dump_files import write_dump
from hpcdist.flight_recorder import recorder
from hpcdist.recordings import as_frtrace, read
from hpcdist.torch.compat import recorded_as


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
        If both recorders are off, or no group has been made yet.
    OSError
        If the file cannot be written.

    Notes
    -----
    With ``TORCH_FR_BUFFER_SIZE`` it has the operations of torch's groups, and those of hpcdist's
    own groups over NCCL. Without, it has all operations over MPI, as the native flight recorder
    noted them. Operations over MPI are labelled ``gloo:``, because torchfrtrace takes the names of
    torch's own backends only; before torch 2.12, which takes no ``gloo:``, they are labelled
    ``xccl:``.
    Source: ``torch._C._distributed_c10d._dump_nccl_trace``.
    """
    made = recorder()
    if made is not None:
        return made.write(prefix)
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "recorder")
        if not _engine.dump_recorder(copy):
            raise RuntimeError(
                "both flight recorders are off: remove HPCDIST_RECORDER=0, or set "
                "TORCH_FR_BUFFER_SIZE=2000, before the first group is made"
            )
        recording = read(copy)
    return write_dump(as_frtrace(recording, recorded_as()), prefix, recording.rank)
