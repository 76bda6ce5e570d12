"""Starts a program as a rank that cannot see the other ranks' processes, or their /dev/shm.

    mpirun -n 2 python apart.py WHAT program...

WHAT names what it has of its own, joined by "+": pid, user and ipc namespaces, shm (a mount
namespace with a /dev/shm of its own), proc (a /proc for its pid namespace). With eperm or enosys a
seccomp filter refuses, with that error, the calls by which a process copies from another or watches
it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

#: process_vm_readv, process_vm_writev, pidfd_open
CALLS = {"x86_64": (310, 311, 434), "aarch64": (270, 271, 434)}
SECCOMP, FILTER, NO_NEW_PRIVILEGES = 22, 2, 38
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


def refuse(code: int) -> None:
    """Have the kernel refuse the calls with that errno, here and in all children."""
    steps = [struct.pack("HBBI", LOAD, 0, 0, 0)]
    for number in CALLS[platform.machine()]:
        steps.append(struct.pack("HBBI", EQUAL, 0, 1, number))
        steps.append(struct.pack("HBBI", RETURN, 0, 0, REFUSE | code))
    steps.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    program = ctypes.create_string_buffer(b"".join(steps))
    head = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    whole = ctypes.create_string_buffer(head)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, whole, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    own = sys.argv[1].split("+")
    if "eperm" in own or "enosys" in own:
        refuse(errno.EPERM if "eperm" in own else errno.ENOSYS)
    spaces = [f"--{each}" for each in ("pid", "user", "ipc") if each in own]
    if os.getuid() and any(each in own for each in ("pid", "ipc", "shm")):
        spaces.append("--user")
    spaces += ["--map-root-user"] * ("--user" in spaces)
    spaces += ["--fork", "--kill-child"] * ("pid" in own)
    spaces += ["--mount-proc"] * ("proc" in own)
    spaces += ["--mount"] * ("shm" in own)
    command = [sys.executable, *sys.argv[2:]]
    if "shm" in own:
        mounted = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        command = ["sh", "-c", mounted, "sh", *command]
    if spaces:
        command = ["unshare", *spaces, *command]
    os.execvp(command[0], command)


main()
