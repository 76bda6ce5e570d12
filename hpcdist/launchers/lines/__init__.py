"""Whole lines of output from ranks that hydra, MPICH's launcher, started.

Hydra puts the rank in front of whatever it reads from a rank at once, and writes that between the
output of other ranks. Python writes blocks of 8 KiB into its pipe, and with PYTHONUNBUFFERED every
argument of ``print`` by itself. Here it is made to write a line at a time, as on a terminal: by a
``sitecustomize`` in this folder, which runs before the program and leaves no other trace.

Importing this module needs neither hpcdist nor MPI.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["ask_for"]

#: What PYTHONUNBUFFERED was: it wins over any other buffering, so Python must start without it.
_KEPT = "_PYTHONUNBUFFERED_OF_RANK"


def ask_for(env: MutableMapping[str, str]) -> None:
    """Have a Python that is started with this environment write whole lines.

    Parameters
    ----------
    env : mutable mapping
        It is changed. The program finds PYTHONPATH and PYTHONUNBUFFERED as they were.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    before = env.get("PYTHONPATH", "")
    if before.partition(os.pathsep)[0] == here:
        return
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (here, before)))
    if "PYTHONUNBUFFERED" in env:
        env[_KEPT] = env.pop("PYTHONUNBUFFERED")
