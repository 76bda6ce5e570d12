"""Build script: which C files go into which native module, and which packages there are.

All else is in pyproject.toml.
"""

import os
import sys

from setuptools import find_packages, setup

# For `python setup.py ...`; the PEP 517 front ends have it from pyproject's backend-path.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "_build"))

from hpcdist_build.extensions import BuildExt, BuildPy, Native, extensions  # noqa: E402
from hpcdist_build.metadata import EggInfo, SDist  # noqa: E402

# Modules not named here are Cython alone.
NATIVE = {
    "_engine": Native(c=("kernels/*.c",), mpi_c=("engine/*/*.c", "kernels/hd_mpi_ops.c"), mpi=True),
    "_bench": Native(c=("kernels/*.c",), mpi_c=("kernels/hd_mpi_ops.c",), mpi=True),
    "_buffer": Native(c=("kernels/hd_types.c",)),
    # The same kernels, importable without libmpi.
    "_ops": Native(c=("kernels/*.c",), leave_out=("kernels/hd_mpi_ops.c",)),
    "_store": Native(c=("store/*.c",)),
    "_nccl_loader": Native(c=("nccl/hd_nccl_load.c",)),
    "_nccl": Native(c=("nccl/*.c", "kernels/hd_types.c"), leave_out=("nccl/hd_nccl_load.c",)),
}

# What torch loads by itself must not import hpcdist, which loads libmpi: a package of its own.
PLUGIN = "hpcdist_torch_plugin"

setup(
    ext_modules=extensions(NATIVE),
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "egg_info": EggInfo, "sdist": SDist},
    packages=[*find_packages(include=["hpcdist", "hpcdist.*"], exclude=["*.plugin"]), PLUGIN],
    package_dir={PLUGIN: "hpcdist/torch/plugin"},
)
