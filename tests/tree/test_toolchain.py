"""What the build says of a C compiler that is missing or incomplete.

The compilers are shell scripts that print what gcc and MPI's wrappers print, so that every fault is
covered on a machine without any.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

sys.path.insert(0, str(ROOT / "_build"))

from hpcdist_build import backend, mpicc, toolchain  # noqa: E402

DEBIAN, ROCKY = 'ID=ubuntu\nID_LIKE="debian"\n', 'ID="rocky"\nID_LIKE="rhel centos fedora"\n'

#: What is printed -> what must be said of it.
CAUSES = {
    "no cc1": (
        "gcc: fatal error: cannot execute \u2018cc1\u2019: execvp: No such file or directory\n",
        ["incomplete, it finds no 'cc1'", "{compiler}", "module load gcc"],
    ),
    "no assembler": (
        "cc: fatal error: cannot execute 'as': execvp: No such file or directory",
        ["it finds no 'as'", "{binutils}"],
    ),
    "no linker": ("collect2: fatal error: cannot find 'ld'", ["it finds no 'ld'", "{binutils}"]),
    "no headers of the C library": (
        "t.c:1:10: fatal error: stdlib.h: No such file or directory\n    1 | #include <stdlib.h>",
        ["stdlib.h, of the C library's headers, is missing", "{libc}"],
    ),
    "no C library": (
        "/usr/bin/ld: cannot find crti.o: No such file or directory\ncollect2: error: ld",
        ["cannot find crti.o, of the C library", "{libc}"],
    ),
    "no headers of Python": (
        "check.c:1:10: fatal error: Python.h: No such file or directory",
        ["Python.h, of the headers of Python", "is missing", "{python}"],
    ),
    "no headers of Python, clang": (
        "check.c:1:10: fatal error: 'Python.h' file not found",
        ["Python.h, of the headers of Python", "{python}"],
    ),
    "no headers of MPI": (
        "<stdin>:1:10: fatal error: mpi.h: No such file or directory",
        ["MPI is installed without its headers", "{mpi}", "module load openmpi"],
    ),
    "no library of MPI": (
        "/usr/bin/ld: cannot find -lmpi: No such file or directory",
        ["cannot find -lmpi", "{mpi}"],
    ),
    "Open MPI's wrapper without a compiler": (
        "-" * 74 + "\nThe Open MPI wrapper compiler was unable to find the specified compiler\n"
        "icc in your PATH.\n\nNote that this compiler was either specified at configure time or\n"
        + "-"
        * 74,
        ["mpicc runs the C compiler icc, which is not on PATH", "{compiler}", "OMPI_CC=gcc"],
    ),
    "MPICH's wrapper without a compiler": (
        "/opt/mpich/bin/mpicc: line 352: cc: command not found",
        ["mpicc runs the C compiler cc, which is not on PATH", "MPICH_CC=gcc"],
    ),
    "dash instead of bash": (
        "/opt/mpich/bin/mpicc: line 352: nvc: not found",
        ["mpicc runs the C compiler nvc"],
    ),
    "something else": (
        "-----\nthe license server\n\ndoes not answer\n-----",
        ["the license server does not answer"],
    ),
    "nothing": ("", ["it printed nothing"]),
}


@pytest.mark.parametrize("fault", CAUSES)
def test_what_is_missing_is_said_with_the_command_that_installs_it(fault: str) -> None:
    printed, wanted = CAUSES[fault]
    found = toolchain.cause(printed, ["/opt/mpi/bin/mpicc"])
    commands = {part: toolchain.install(part) for part in toolchain._PACKAGES}
    for words in wanted:
        assert words.format(**commands) in found


@pytest.mark.parametrize(
    ("release", "command"),
    [
        (DEBIAN, "apt-get install libc6-dev"),
        (ROCKY, "dnf install glibc-devel"),
        ('ID="sles"\nID_LIKE="suse"\n', "zypper install glibc-devel"),
    ],
)
def test_the_command_is_that_of_the_system(release: str, command: str) -> None:
    assert toolchain.install("libc", release) == command


def test_on_an_unknown_system_the_commands_of_all_are_told() -> None:
    found = toolchain.install("compiler", "ID=plan9\n")
    assert "apt-get install build-essential" in found and "dnf install gcc" in found


def test_the_compiler_of_this_machine_works() -> None:
    toolchain.check()


def script(folder: Path, name: str, body: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_missing_compiler_ends_the_build_before_pip_downloads_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-cc")
    for ask in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        with pytest.raises(SystemExit, match="there is no C compiler: no-such-cc is not on PATH"):
            ask()
    script(tmp_path, "gcc", "exit 0")
    with pytest.raises(SystemExit, match="no-such-cc, which CC names .* gcc is: set CC=gcc"):
        backend.get_requires_for_build_wheel()


def test_an_incomplete_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = script(tmp_path, "mycc", "echo \"cannot execute 'cc1': execvp: No\" >&2; exit 1")
    monkeypatch.setenv("CC", f"{broken} -pipe")
    with pytest.raises(toolchain.ToolchainError, match="mycc does not work: .* finds no 'cc1'"):
        toolchain.check()
    monkeypatch.setenv("CC", script(tmp_path, "no-program", ""))
    (tmp_path / "no-program").write_text("\0")
    with pytest.raises(toolchain.ToolchainError, match="cannot run the C compiler .*no-program"):
        toolchain.check()


def test_a_linker_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'case "$*" in *-shared*) echo "cannot find \'ld\'" >&2; exit 1;; esac'
    monkeypatch.setenv("CC", script(tmp_path, "halfcc", body))
    with pytest.raises(toolchain.ToolchainError, match="finds no 'ld'"):
        toolchain.check()


def test_mpis_wrapper_says_which_compiler_it_lacks(tmp_path: Path) -> None:
    text = CAUSES["Open MPI's wrapper without a compiler"][0]
    broken = script(tmp_path, "mpicc", f"cat >&2 <<'END'\n{text}\nEND\nexit 1")
    with pytest.raises(mpicc.MPICompilerError, match="runs the C compiler icc, which is not on"):
        mpicc.probe((broken,), "PATH", os.environ)


def test_the_build_itself_says_it_too(tmp_path: Path) -> None:
    """With --no-build-isolation pip asks for no requirements first."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-temp", str(tmp_path / "temp"),
         "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT, env={**os.environ, "CC": "no-such-cc", "PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "hpcdist: there is no C compiler: no-such-cc is not on PATH" in done.stderr, done.stderr
