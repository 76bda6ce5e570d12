"""Spack's recipe: copy this folder to ``packages/py_hpcdist`` of a repository of your site's."""

# ruff: noqa: F403, F405, I001

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcdist(PythonPackage):
    """torch.distributed rebuilt for HPC clusters, MPI first."""

    pypi = "hpcdist/hpcdist-0.1.0.tar.gz"

    license("BSD-3-Clause", checked_by="hpcdist")

    # Its checksum is known when the release is made: `spack checksum py-hpcdist`.
    version("0.1.0")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cython@3.1:", type="build")
    depends_on("mpi@3:")
    depends_on("py-numpy", type=("build", "run"))
    depends_on("py-torch@2.10:", type="run")
    depends_on("py-mpi4py@4:", type="run")

    def setup_build_environment(self, env):
        env.set("HPCDIST_MPICC", self.spec["mpi"].mpicc)
