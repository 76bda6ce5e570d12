"""The recipes of Spack and conda ask for what pyproject.toml does."""

from __future__ import annotations

import ast
import re

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

PROJECT = (ROOT / "pyproject.toml").read_text()
SPACK = (ROOT / "docs/packaging/spack/package.py").read_text()
CONDA = (ROOT / "docs/packaging/conda/meta.yaml").read_text()


def needs(key: str) -> dict[str, str]:
    """Package -> least version, or "", of a list of requirements in pyproject.toml."""
    found = re.search(rf"^{key} = \[(.*?)\]", PROJECT, re.M | re.S)
    assert found, key
    pairs = (
        re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", x) for x in re.findall(r'"([^"]+)"', found[1])
    )
    return {pair[1]: pair[2] or "" for pair in pairs if pair}


def test_both_are_of_this_version_and_licence():
    version = re.search(r'^version = "([\d.]+)"', PROJECT, re.M)[1]
    assert f'version("{version}"' in SPACK and f'set version = "{version}"' in CONDA
    assert 'license("BSD-3-Clause"' in SPACK and "license: BSD-3-Clause" in CONDA


@pytest.mark.parametrize("key", ["requires", "dependencies"])
def test_both_ask_for_what_the_project_needs(key):
    for name, least in needs(key).items():
        in_spack = f"@{least.removesuffix('.0')}:" if least else ""
        assert f'depends_on("py-{name}{in_spack}"' in SPACK, name
        in_conda = {"torch": "pytorch"}.get(name, name) + (f" >={least}" if least else "")
        assert f"    - {in_conda}\n" in CONDA, name


def test_spacks_recipe_names_the_compiler_of_its_mpi():
    (recipe,) = (n for n in ast.parse(SPACK).body if isinstance(n, ast.ClassDef))
    assert (
        recipe.name == "PyHpcdist" and 'env.set("HPCDIST_MPICC", self.spec["mpi"].mpicc)' in SPACK
    )
    assert re.search(r'requires-python = ">=3\.10"', PROJECT) and "python@3.10:" in SPACK


def test_condas_recipe_builds_for_the_mpi_of_its_package():
    assert "- HPCDIST_MPI={{ mpi }}" in CONDA
    assert CONDA.count("{{") == CONDA.count("}}") and "\t" not in CONDA
    # conda-forge has no package impi
    assert CONDA.count('- {{ mpi }}  # [mpi != "impi"]\n') == CONDA.count("- {{ mpi }}") == 2
    assert CONDA.count('- impi-devel  # [mpi == "impi"]\n') == 1
    assert CONDA.count('- impi_rt  # [mpi == "impi"]\n') == 1
