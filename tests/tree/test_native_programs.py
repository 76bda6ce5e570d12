"""The programs that are built of chosen files of the engine: stress and simulation.

Both list those files by hand, and both run in long stages. A file that a list lacks, and a planted
mistake whose text is gone, are found here in seconds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def load(folder: str, name: str) -> ModuleType:
    """Import one of the files of a folder of tests, as its own programs do."""
    path = ROOT / "tests" / folder / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"{folder}_{name}", path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(path.parent))


programs = load("stress", "programs")
simulation = load("scale", "run")


def files(patterns: tuple[str, ...]) -> list[str]:
    """The files that the patterns of a program match, from the root."""
    return sorted(
        {
            path.relative_to(ROOT).as_posix()
            for pattern in patterns
            for path in ROOT.glob(pattern)
            if path.suffix == ".c"
        }
    )


def symbols(name: str, folder: Path, *flags: str) -> tuple[set[str], set[str]]:
    """Compile a file and return which names of the engine it defines, and which it lacks."""
    out = folder / f"{name.replace('/', '.')}.o"
    includes = [f"-I{ROOT / include}" for include in (*programs.INCLUDES, "tests/scale")]
    command = ["gcc", "-std=gnu11", "-w", "-O0", *includes, *flags, "-c", name, "-o", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert not done.returncode, f"{' '.join(command)}\n{done.stderr}"
    listed = subprocess.run(["nm", str(out)], capture_output=True, text=True, check=True).stdout
    defined, lacking = set(), set()
    for line in listed.splitlines():
        kind, symbol = line.split()[-2:]
        if symbol.startswith(("hd_", "shim_")):
            (lacking if kind == "U" else defined).add(symbol)
    return defined, lacking


def every(names: list[str], folder: Path, *flags: str) -> dict[str, tuple[set[str], set[str]]]:
    """Compile files side by side: their names of the engine, by file."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = pool.map(lambda name: symbols(name, folder, *flags), names)
        return dict(zip(names, objects, strict=True))


def missing(names: list[str], found: dict[str, tuple[set[str], set[str]]]) -> dict[str, list[str]]:
    """Names that a program of these files calls and none of them defines, by caller."""
    defined = set().union(*(found[name][0] for name in names))
    return {name: sorted(found[name][1] - defined) for name in names if found[name][1] - defined}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> dict[str, tuple[set[str], set[str]]]:
    """The files of the simulation, compiled."""
    names = files(simulation.SOURCES)
    assert len(names) == len(simulation.SOURCES)
    return every(names, tmp_path_factory.mktemp("scale"), "-include", "tests/scale/shim.h")


def test_stress_programs_have_all_files_that_they_call(tmp_path):
    # Those that take all files of a kind cannot lack one, and the kernels take long to compile.
    by_hand = [one for one in programs.PROGRAMS if not any("*" in name for name in one.sources)]
    by_program = {program.name: files(program.sources) for program in by_hand}
    assert by_program and all(by_program.values())
    found = every(sorted({name for names in by_program.values() for name in names}), tmp_path)
    lost = {name: missing(used, found) for name, used in by_program.items()}
    assert not any(lost.values()), {name: what for name, what in lost.items() if what}


def test_the_simulation_has_all_files_that_it_calls(simulated):
    assert not missing(list(simulated), simulated)


def test_a_file_that_is_left_out_is_missed(simulated):
    names = [name for name in simulated if not name.endswith("/hd_ballot.c")]
    lost = missing(names, simulated)
    assert any("hd_ballot" in symbol for symbols in lost.values() for symbol in symbols), lost


def test_each_planted_mistake_and_each_delay_has_its_place():
    planted = [
        (program.name, change)
        for program in programs.PROGRAMS
        for change in (program.mutation, program.delay)
        if change is not None
    ]
    assert planted
    for name, (file, old, new) in planted:
        assert (ROOT / file).read_text().count(old) == 1, f"{name}: {file} has {old!r} not once"
        assert old != new
        program = next(one for one in programs.PROGRAMS if one.name == name)
        assert file in files(program.sources), f"{name} is not built of {file}"
