"""Compiling and loading the stand-in for libnccl.so.2, and its functions beside NCCL's."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[1] / "standin").glob("standin*.[ch]"))
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]


def build(*defines: str) -> str:
    """Compile the stand-in, unless this very source has been compiled; return its path.

    Parameters
    ----------
    *defines : str
        ``"STANDIN_OLD"`` leaves out what is newer than NCCL 2.18.
    """
    text = b"".join(path.read_bytes() for path in SOURCES) + repr((FLAGS, defines)).encode()
    name = f"hpcdist-nccl-standin-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    target = folder / "libnccl.so.2"
    if target.exists() and folder.stat().st_uid == os.getuid():
        return str(target)
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler: set CC"
    made = Path(tempfile.mkdtemp(prefix="hpcdist-standin-"))
    sources = [str(path) for path in SOURCES if path.suffix == ".c"]
    # its calls of its own functions stay its own where torch has brought the real library
    options = [
        *FLAGS,
        "-Wl,-Bsymbolic",
        "-Wl,-soname,libnccl.so.2",
        *(f"-D{each}" for each in defines),
    ]
    subprocess.run(
        [*compiler.split(), *options, "-o", str(made / "libnccl.so.2"), *sources, "-lm", "-lrt"],
        check=True,
        timeout=120,
    )
    try:
        made.rename(folder)  # several ranks compile at once: the first one's stays
    except OSError:
        shutil.rmtree(made)
    return str(target)


@functools.cache
def library() -> ctypes.CDLL:
    """The stand-in's own functions, of the copy that hpcdist has loaded."""
    from hpcdist import _nccl_loader

    lib = ctypes.CDLL(_nccl_loader.load().path)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, arguments, result in (
        ("stream_create", [], pointer),
        ("stream_synchronize", [pointer], None),
        ("misuses", [], number),
        ("calls", [], number),
        ("slow", [ctypes.c_double], None),
        ("kernel", [pointer, pointer, pointer, size, number, ctypes.c_double], None),
        ("event_create", [ctypes.POINTER(pointer), ctypes.c_uint], number),
        ("event_destroy", [pointer], None),
        ("event_record", [pointer, pointer], number),
        ("stream_wait_event", [pointer, pointer, ctypes.c_uint], number),
        ("event_query", [pointer], number),
        ("stream_choose", [pointer], None),
        ("stream_captures", [pointer, ctypes.POINTER(number)], number),
        ("capture_begin", [pointer], None),
        ("capture_end", [pointer, ctypes.POINTER(number)], pointer),
        ("replay", [pointer, pointer], None),
        (
            "loop",
            [pointer, pointer, size, number, number, pointer, number, number],
            ctypes.c_double,
        ),
        (
            "loop_apart",
            [pointer, pointer, size, number, number, pointer, pointer, number],
            ctypes.c_double,
        ),
    ):
        function = getattr(lib, "standin_" + name)
        function.argtypes, function.restype = arguments, result
    return lib


def load(*defines: str) -> None:
    """Make the stand-in the NCCL of this process, for as long as it lives."""
    from hpcdist import _nccl_loader

    path = build(*defines)
    os.environ["HPCDIST_NCCL_LIBRARY"] = path
    found = _nccl_loader.load()
    assert found.path == path, (
        f"another NCCL is loaded already: {found}; run the tests marked standin in a process "
        "of their own, as tests/run.py does"
    )
