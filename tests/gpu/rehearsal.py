#!/usr/bin/env python
"""Run a program for a GPU without one: tests/standin in the place of CUDA and NCCL.

    python tests/gpu/rehearsal.py PROGRAM ARGUMENTS...
    python tests/gpu/rehearsal.py -c CODE
    python tests/gpu/rehearsal.py -m MODULE ARGUMENTS...

Streams are threads and a GPU's memory is the host's, so figures mean nothing. What of torch.cuda
is put in place is what run.py and ranks.py call, with the signatures that torch has.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import standin  # noqa: E402
import torch  # noqa: E402

from hpcdist.backends import cuda as device  # noqa: E402

__all__ = ["install"]


class Stream(standin.Stream):
    """As torch.cuda.Stream."""

    made: list[Stream] = []

    def __init__(self, device: Any = None, priority: int = 0, *, handle: Any = None) -> None:
        super().__init__(handle)
        self.made.append(self)

    @property
    def cuda_stream(self) -> int:
        """The handle."""
        return self.handle

    def query(self) -> bool:
        """Whether all that is in it is done; its thread has a moment to say so."""
        event, until = standin.Event(self), time.monotonic() + 0.05
        while standin.library().standin_event_query(event.handle):
            if time.monotonic() > until:
                return False
        return True


class Runtime(standin.Runtime):
    """In lockstep with the host, where torch's own operations run."""

    capture = False

    def __init__(self) -> None:
        super().__init__(lockstep=True)

    def capturing(self) -> bool:
        return self.capture


class Graph:
    """As torch.cuda.CUDAGraph, but nothing can be captured: there is no replay()."""


@contextlib.contextmanager
def graph(
    cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """As torch.cuda.graph: hpcdist is told that a capture is under way."""
    Runtime.capture = True
    try:
        yield
    finally:
        Runtime.capture = False


def _current_stream(device: Any = None) -> Stream:
    return Stream(handle=standin.Runtime.current(0).handle)


def _synchronize(device: Any = None) -> None:
    for stream in [standin.Stream(0), *Stream.made]:
        stream.synchronize()


def _properties(device: Any = None) -> Any:
    return SimpleNamespace(total_memory=1 << 37, pci_domain_id=0, pci_bus_id=0, pci_device_id=0)


def install() -> None:
    """Put the stand-ins in place in this process, for as long as it lives."""
    standin.load()
    device.use(Runtime())
    _kept.enter_context(standin.training())
    for name, function in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "the stand-in of tests/standin, and no GPU",
        "get_device_properties": _properties,
        "synchronize": _synchronize,
        "current_stream": _current_stream,
        "stream": standin.on,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": graph,
        "is_current_stream_capturing": lambda: Runtime.capture,
        "empty_cache": lambda: None,
        "memory_reserved": lambda device=None: 0,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
    }.items():
        setattr(torch.cuda, name, function)


_kept = contextlib.ExitStack()


def main() -> None:
    sys.modules["rehearsal"] = sys.modules[__name__]  # by this, programs know where they are
    install()
    how, *rest = sys.argv[1:]
    if how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [how, *rest]
        sys.path.insert(0, str(Path(how).resolve().parent))
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    main()
