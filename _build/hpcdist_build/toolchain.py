"""Try the C compiler before the build needs it, and say what it lacks and what installs that.

Only the standard library is used.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ToolchainError", "cause", "check", "install", "require"]

_PROGRAM = """\
#include <Python.h>
#include <stdlib.h>
int hpcdist_check(void) { return PY_MAJOR_VERSION + (int)strtol("1", NULL, 10); }
"""

#: A part of the toolchain -> its packages on Debian, on Red Hat's and on SUSE's systems.
_PACKAGES = {
    "compiler": ("build-essential", "gcc", "gcc"),
    "binutils": ("binutils", "binutils", "binutils"),
    "libc": ("libc6-dev", "glibc-devel", "glibc-devel"),
    "python": ("python{0}.{1}-dev", "python{0}.{1}-devel", "python{0}{1}-devel"),
    "mpi": (
        "libopenmpi-dev (or libmpich-dev)",
        "openmpi-devel (or mpich-devel)",
        "openmpi-devel (or mpich-devel)",
    ),
}
_MANAGERS = (
    ("Debian, Ubuntu", {"debian", "ubuntu"}, "apt-get install"),
    ("Red Hat and the like", {"rhel", "fedora", "centos", "rocky", "almalinux"}, "dnf install"),
    ("SUSE", {"suse", "sles", "opensuse", "opensuse-leap"}, "zypper install"),
)

_QUOTED = "[\N{LEFT SINGLE QUOTATION MARK}'\"]?"
_WORD = "([\\w.+/-]+)"
_NO_FILE = "(?:No such file or directory|file not found)"


class ToolchainError(Exception):
    """The C compiler is missing or incomplete; the message says what installs what it lacks."""


def install(part: str, release: str | None = None) -> str:
    """Return the command that installs a part of the toolchain on this system.

    Parameters
    ----------
    part : str
        A key of ``_PACKAGES``.
    release : str, optional
        Text in the format of ``/etc/os-release``, which is read when it is not given. Where it
        names no known system, the commands of all are returned.
    """
    if release is None:
        try:
            release = Path("/etc/os-release").read_text(errors="replace")
        except OSError:
            release = ""
    ids = set(" ".join(re.findall(r"^ID(?:_LIKE)?=\"?([^\"\n]*)", release, re.M)).split())
    commands = {
        system: f"{manager} {package.format(*sys.version_info)}"
        for (system, known, manager), package in zip(_MANAGERS, _PACKAGES[part], strict=True)
        if ids & known
    }
    if commands:
        return next(iter(commands.values()))
    return "; ".join(
        f"{system}: {manager} {package.format(*sys.version_info)}"
        for (system, _, manager), package in zip(_MANAGERS, _PACKAGES[part], strict=True)
    )


def _fix(part: str, module: str = "gcc") -> str:
    return (
        f"Install it as root ({install(part)}), or load your site's module (module load {module})"
    )


def _no_python() -> str:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    said = f"Python.h, of the headers of Python {version}, is missing"
    if sys.base_prefix in ("/usr", "/usr/local"):
        return f"{said}. {_fix('python', f'python/{version}')}"
    return (
        f"{said}: the Python in {sys.base_prefix} was installed without them. Use one that has "
        f"them: that of a site's module, or the system's ({install('python')})"
    )


def _no_compiler(name: str, env: Mapping[str, str]) -> str:
    others = [each for each in ("gcc", "cc", "clang") if shutil.which(each, path=env.get("PATH"))]
    if others:
        return (
            f"the C compiler {name}, which CC names or this Python was built with, is not on PATH; "
            f"{others[0]} is: set CC={others[0]}"
        )
    return (
        f"there is no C compiler: {name} is not on PATH. "
        f"{_fix('compiler')}; CC=/path/to/compiler selects another"
    )


def cause(text: str, command: Sequence[str] = ("the compiler",)) -> str:
    """Return what a failed compiler lacks and what installs it, or else what it printed.

    Parameters
    ----------
    text : str
        What it printed.
    command : sequence of str
        What was run.
    """
    program = os.path.basename(command[0])
    wrapped = re.search(rf"unable to find the specified compiler\s+{_WORD}", text)
    wrapped = wrapped or re.search(rf"line \d+: {_WORD}: (?:command )?not found", text)
    if wrapped:
        return (
            f"{program} runs the C compiler {wrapped[1]}, which is not on PATH. "
            f"{_fix('compiler')}, or name another one for it: OMPI_CC=gcc (Open MPI), "
            "MPICH_CC=gcc (MPICH)"
        )
    tool = re.search(rf"cannot (?:execute|find|exec) {_QUOTED}(cc1\w*|as|ld|collect2)\b", text)
    if tool:
        part = "binutils" if tool[1] in ("as", "ld") else "compiler"
        return f"the C compiler is incomplete, it finds no {tool[1]!r}. {_fix(part)}"
    header = re.search(rf"{_QUOTED}([\w./+-]+\.h){_QUOTED}:? {_NO_FILE}", text)
    if header and header[1] == "Python.h":
        return _no_python()
    if header and header[1] == "mpi.h":
        return f"mpi.h is missing: MPI is installed without its headers. {_fix('mpi', 'openmpi')}"
    if header and "/" not in header[1]:
        return f"{header[1]}, of the C library's headers, is missing. {_fix('libc')}"
    library = re.search(r"cannot find (-l\w+|\w*crt\w+\.o)", text)
    if library and "mpi" in library[1]:
        return f"the linker cannot find {library[1]}. {_fix('mpi', 'openmpi')}"
    if library:
        return f"the linker cannot find {library[1]}, of the C library. {_fix('libc')}"
    lines = [line.strip() for line in text.splitlines()]
    told = " ".join(line for line in lines if line.strip("-=* "))
    return told[:600] or "it printed nothing"


def check(
    compile_command: Sequence[str] | None = None,
    link_command: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Compile and link an extension module of three lines.

    Parameters
    ----------
    compile_command, link_command : sequence of str, optional
        As setuptools has them; by default that of ``CC``, or of this Python's own build.
    environ : mapping, optional
        The environment, `os.environ` by default.

    Raises
    ------
    ToolchainError
        If it does not work.
    """
    env = {**(os.environ if environ is None else environ), "LC_ALL": "C"}
    own = shlex.split(env.get("CC") or sysconfig.get_config_var("CC") or "cc")
    folders = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    with tempfile.TemporaryDirectory(prefix="hpcdist-") as folder:
        source, target = Path(folder, "check.c"), Path(folder, "check.o")
        source.write_text(_PROGRAM)
        includes = [f"-I{each}" for each in folders]
        compiling = [*(compile_command or [*own, "-fPIC"]), *includes, "-c", str(source)]
        _run([*compiling, "-o", str(target)], env)
        linking = [*(link_command or [*own, "-shared"]), str(target)]
        _run([*linking, "-o", str(Path(folder, "check.so"))], env)


def require() -> None:
    """End the build here if the C compiler does not work: before pip downloads anything else."""
    try:
        check()
    except ToolchainError as error:
        raise SystemExit(f"hpcdist: {error}") from None


def _run(command: list[str], env: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=120, env=dict(env)
        )
    except FileNotFoundError:
        raise ToolchainError(_no_compiler(command[0], env)) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"cannot run the C compiler {command[0]}: {error}") from None
    if done.returncode:
        raise ToolchainError(
            f"the C compiler {command[0]} does not work: "
            f"{cause(done.stderr + done.stdout, command)}"
        )
