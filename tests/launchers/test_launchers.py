"""What the launchers' environment variables mean, and which launcher wins when they nest."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from hpcdist import launchers
from hpcdist.launchers import Launch
from hpcdist.launchers.slurm import unused_tasks

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
# recorded from version 5.0.11
OPEN_MPI = {
    "OMPI_VERSION": "5.0.11",
    "OMPI_UNIVERSE_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_num_procs": "4",
    "PRTE_LAUNCHED": "1",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-vm-10833@1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_num_nodes": "2",
    "OMPI_MCA_orte_ess_num_procs": "4",
    "PMIX_RANK": "3",
}
# recorded from MPICH 5.0.2; Intel MPI adds variables of its own
HYDRA = {
    "PMI_RANK": "2",
    "PMI_SIZE": "6",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "3",
    "HYDI_CONTROL_FD": "7",
}
INTEL = {**HYDRA, "I_MPI_INFO_NUMA_NODE_NUM": "2", "I_MPI_HYDRA_BOOTSTRAP": "ssh"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MV2_NUM_NODES_IN_JOB": "1",
}
PALS = {
    "PALS_RANKID": "7",
    "PALS_NODEID": "1",
    "PALS_APID": "9a6c",
    "PMI_RANK": "7",
    "PMI_SIZE": "8",
    "PALS_LOCAL_RANKID": "3",
    "PALS_LOCAL_SIZE": "4",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "LSB_JOBID": "77",
    "LSB_DJOB_RANKFILE": "/tmp/ranks",
}
FLUX = {
    "FLUX_TASK_RANK": "9",
    "FLUX_JOB_SIZE": "16",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_LOCAL_ID": "1",
}
STEP = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NNODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
PMI2 = {**STEP, "SLURM_MPI_TYPE": "pmi2", "PMI_RANK": "2", "PMI_SIZE": "4"}
PMIX = {**STEP, "SLURM_MPI_TYPE": "pmix_v4", "PMIX_RANK": "2"}
# what a process sees in an sbatch script, where no srun has started it
BATCH = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, 2)),
        (OPEN_MPI, Launch("Open MPI's mpirun", 3, 4, 1, 2)),
        (OPEN_MPI_4, Launch("Open MPI's mpirun", 3, 4, 1, 2, 2)),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            Launch("Open MPI's mpirun", 3, 4, 1, 4, 1),
        ),
        (HYDRA, Launch("hydra (the mpirun of MPICH and Intel MPI)", 2, 6, 0, 3)),
        (INTEL, Launch("hydra (the mpirun of MPICH and Intel MPI)", 2, 6, 0, 3)),
        (
            {**HYDRA, "PMI_SIZE": "3"},
            Launch("hydra (the mpirun of MPICH and Intel MPI)", 2, 3, 0, 3, 1),
        ),
        (MVAPICH, Launch("MVAPICH's mpirun_rsh", 1, 2, 1, 2, 1)),
        (PALS, Launch("PALS", 7, 8, 3, 4)),
        ({"PALS_RANKID": "7"}, Launch("PALS", 7, None, None, None)),
        (JSRUN, Launch("jsrun", 1, 12, 1, 6)),
        (FLUX, Launch("flux run", 9, 16, 1, None, 2)),
        (STEP, Launch("srun", 2, 4, 0, 2, 2)),
        (PMI2, Launch("srun --mpi=pmi2", 2, 4, 0, 2, 2)),
        (PMIX, Launch("srun --mpi=pmix", 2, 4, 0, 2, 2)),
        ({"PMIX_RANK": "1"}, Launch("a PMIx process manager", 1, None, None, None)),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            Launch("a PMI process manager", 1, 2, None, None),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host"},
            Launch("the variables RANK and WORLD_SIZE", 1, 2, None, None),
        ),
    ],
    ids=lambda value: value.launcher if isinstance(value, Launch) else "",
)
def test_reads_each_launcher(env, expected):
    assert launchers.detect(env) == expected


@pytest.mark.parametrize("env", [{}, BATCH, {"RANK": "1"}, {"PMI_RANK": "1"}])
def test_finds_no_launcher(env):
    assert launchers.find(env) is None
    assert launchers.detect(env) is None


@pytest.mark.parametrize(
    ("env", "name", "rank", "size"),
    [
        # mpirun inside sbatch: every rank inherits the batch script's SLURM_PROCID=0
        ({**BATCH, **OPEN_MPI}, "Open MPI's mpirun", 3, 4),
        ({**STEP, "SLURM_PROCID": "0", **OPEN_MPI}, "Open MPI's mpirun", 3, 4),
        ({**BATCH, **HYDRA}, "hydra (the mpirun of MPICH and Intel MPI)", 2, 6),
        # torchrun inside srun, one agent per node: the step has fewer tasks than there are ranks
        ({**STEP, **TORCHRUN}, "torchrun", 5, 8),
        ({**PMIX, **TORCHRUN}, "torchrun", 5, 8),
        ({**OPEN_MPI, **TORCHRUN}, "torchrun", 5, 8),
        # a shell under srun, and mpirun inside it
        ({**PMIX, "PMIX_RANK": "3", **OPEN_MPI}, "Open MPI's mpirun", 3, 4),
        # variables of the vendor beside those of the interface it offers
        ({**FLUX, "PMI_RANK": "9", "PMI_SIZE": "16"}, "flux run", 9, 16),
        # RANK and WORLD_SIZE exported by a script under mpirun
        (
            {**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h"},
            "Open MPI's mpirun",
            3,
            4,
        ),
    ],
)
def test_innermost_launcher_wins(env, name, rank, size):
    launch = launchers.detect(env)
    assert (launch.launcher, launch.rank, launch.size) == (name, rank, size)


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("2(x2)", "0", 2),
        ("2(x2)", "1", 2),
        ("2(x2),1", "2", 1),
        ("4,3(x2),1", "2", 3),
        ("4", "0", 4),
        ("4", "1", None),
        ("", "0", None),
        ("nonsense", "0", None),
    ],
)
def test_slurm_tasks_of_a_node(tasks, node, expected):
    env = {**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert launchers.detect(env).local_size == expected


def test_slurm_without_node_number():
    env = {name: value for name, value in STEP.items() if name != "SLURM_NODEID"}
    assert launchers.detect(env).local_size is None


def test_malformed_number_is_named():
    with pytest.raises(ValueError, match=r"OMPI_COMM_WORLD_RANK='three'.*whole number"):
        launchers.detect({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "three"})


@pytest.mark.parametrize(
    ("library", "family"),
    [
        ("Open MPI v5.0.11, package: Open MPI build@host", "Open MPI"),
        ("MPICH Version:      5.0.2\nMPICH Release date: today", "MPICH"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "Intel MPI"),
        ("MVAPICH2 Version      :\t2.3.7", "MVAPICH"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29", "Cray MPICH"),
        ("Some other MPI", "this MPI"),
    ],
)
def test_family_of_a_library(library, family):
    assert launchers.mpi_family(library) == family


@pytest.mark.parametrize(
    ("env", "library", "expected"),
    [
        (STEP, "Open MPI v5.0", "srun --mpi=pmix"),
        (PMI2, "Open MPI v5.0", "srun --mpi=pmix"),
        (STEP, "MPICH Version: 5.0", "srun --mpi=pmi2"),
        (PMIX, "MPICH Version: 5.0", "srun --mpi=pmi2"),
        (STEP, "Intel(R) MPI Library 2021", "I_MPI_PMI_LIBRARY"),
        (STEP, "Some other MPI", "srun --mpi=list"),
        (HYDRA, "Open MPI v5.0", "mpirun that belongs to Open MPI"),
        (OPEN_MPI, "MPICH Version: 5.0", "mpirun that belongs to MPICH"),
        (TORCHRUN, "Open MPI v5.0", "mpirun -n N python"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "Open MPI", "mpirun -n N python"),
    ],
)
def test_fix_names_the_command(env, library, expected):
    assert expected in launchers.find(env).fix(library)


@pytest.mark.parametrize(
    ("env", "tasks"),
    [
        (BATCH, 4),
        ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4"}, 4),  # salloc's shell
        ({**BATCH, "SLURM_NTASKS": "1"}, 0),
        ({**BATCH, "SLURM_NTASKS": "many"}, 0),
        ({**BATCH, **STEP}, 0),
        ({"SLURM_NTASKS": "4"}, 0),
        ({}, 0),
    ],
)
def test_tasks_of_a_job_that_srun_did_not_start(env, tasks):
    assert unused_tasks(env) == tasks


def test_imports_without_torch_and_without_starting_mpi():
    program = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not here")
sys.meta_path.insert(0, NoTorch())
import hpcdist.launchers
from hpcdist import _engine
print(_engine.mpi_state(), "torch" in sys.modules, "mpi4py.MPI" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["none", "False", "False"], done.stderr


def test_a_child_of_a_rank_is_not_the_launchers(monkeypatch):
    """It has the variables, but not the connection whose descriptor PMI_FD names."""
    others = ("OMPI_", "PMIX", "SLURM", "TORCHELASTIC")
    for name in [name for name in os.environ if name.startswith(others)]:
        monkeypatch.delenv(name)
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    ours, theirs = socket.socketpair()
    monkeypatch.setenv("PMI_FD", str(ours.fileno()))
    assert launchers.find().name.startswith("hydra") and launchers.starts_mpi()
    ours.close()
    assert not launchers.starts_mpi() and launchers.detect() is None
    reader, writer = os.pipe()
    monkeypatch.setenv("PMI_FD", str(reader))
    assert not launchers.starts_mpi()
    monkeypatch.delenv("PMI_FD")
    assert launchers.starts_mpi()
    theirs.close()
    os.close(reader)
    os.close(writer)
