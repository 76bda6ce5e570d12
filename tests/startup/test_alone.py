"""A process of its own as the world, and starts that went wrong.

Each case is a fresh process without a launcher, in which MPI is a world of one; the variables of a
launcher that started more are added by hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from mpis import FAMILY, OPEN_MPI

from hpcdist import hardware

pytestmark = pytest.mark.local

#: Beginnings of the variables by which launchers and MPI libraries speak to their processes.
_SPOKEN = ("OMPI_COMM", "PMI", "MPI_LOCAL", "SLURM", "PALS", "FLUX", "JSM", "MV2", "TORCHELASTIC",
           "RANK", "WORLD_SIZE", "MASTER", "LOCAL_")  # fmt: skip

SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
# the mpirun of the other MPI: its processes are worlds of one to this MPI
OTHER_MPIRUN = (
    {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}
    if OPEN_MPI
    else {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}
)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(_SPOKEN)}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**env, **variables},
    )


def test_a_world_of_one_without_a_launcher():
    done = run("""
import hpcdist as dist, torch
for _ in range(3):
    dist.init_process_group()
    t = torch.arange(5.0)
    dist.all_reduce(t)
    dist.broadcast(t, 0)
    out = [torch.zeros(5)]
    dist.all_gather(out, t)
    box = [None]
    dist.all_gather_object(box, {"a": 1})
    dist.barrier()
    dist.monitored_barrier()
    assert torch.equal(out[0], torch.arange(5.0)) and box == [{"a": 1}]
    print(dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank())
    dist.destroy_process_group()
""")
    assert done.stdout == "0 1 0\n" * 3, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (STEP, "srun --mpi=pmix" if OPEN_MPI else "srun --mpi=pmi2"),
        (OTHER_MPIRUN, "with the mpirun that belongs to"),
        (TORCHRUN, "mpirun" if OPEN_MPI else "env://"),
        (BY_HAND, "mpirun" if OPEN_MPI else "env://"),
    ],
    ids=["srun", "another mpirun", "torchrun", "by hand"],
)
def test_many_processes_and_an_mpi_that_sees_one(variables, expected):
    """Silent worlds of one each would train N models that know nothing of each other."""
    done = run("import hpcdist; hpcdist.init_process_group(init_method='mpi://')", **variables)
    assert done.returncode != 0
    assert "DistBackendError" in done.stderr and expected in done.stderr, done.stderr
    size = next(value for name, value in variables.items() if name in SIZES)
    assert f"started {size} processes" in done.stderr


@pytest.mark.skipif(not OPEN_MPI, reason="MPICH starts without a launcher")
@pytest.mark.parametrize("how", ["init_method='tcp://127.0.0.1:1', rank=0, world_size=2",
                                 "init_method='file:///tmp/x?rank=0&world_size=2'",
                                 "store=hpcdist.store.HashStore(), rank=0, world_size=2",
                                 "'gloo', rank=0, world_size=2",
                                 ""])  # fmt: skip
def test_open_mpi_without_its_launcher_is_told_the_command_at_once(how):
    program = f"import hpcdist, hpcdist.store\nhpcdist.init_process_group({how})"
    address = {name: BY_HAND[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    done = run(program, **(address if how else BY_HAND))
    assert "DistBackendError: 2 processes were started by" in done.stderr, done.stderr
    command = re.search(r"^  (\S*mpirun .*-n 2 \S+python -c 'import.*)", done.stderr, re.MULTILINE)
    assert command, done.stderr


@pytest.mark.skipif(OPEN_MPI, reason="Open MPI speaks PMIx")
def test_mpich_under_pmix_says_why_it_stops():
    """MPICH ends the process in MPI_Init, before an exception could be raised."""
    done = run(
        "import hpcdist; hpcdist.init_process_group()",
        **{**STEP, "SLURM_PROCID": "0", "SLURM_MPI_TYPE": "pmix_v4", "PMIX_RANK": "0"},
    )
    if FAMILY == "Intel MPI":  # it takes no notice of PMIx
        assert "Intel MPI sees one: each would be a world of its own" in done.stderr
        return
    assert "built without PMIx, by which srun --mpi=pmix speaks" in done.stderr, done.stderr
    assert "srun --mpi=pmi2" in done.stderr


def test_a_launcher_of_one_process_is_fine():
    done = run(
        "import hpcdist; hpcdist.init_process_group(); print(hpcdist.get_world_size())",
        **{**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    )
    assert done.stdout == "1\n", done.stderr


def test_a_missing_srun_is_noticed():
    """One process where a job of four was asked for trains alone, and the rest is paid for."""
    program = "import hpcdist; hpcdist.init_process_group(); print(hpcdist.get_world_size())"
    job = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    done = run(program, **job)
    assert done.stdout == "1\n", done.stderr
    assert "the Slurm job has 4 tasks" in done.stderr and "mpirun " in done.stderr, done.stderr
    assert "Slurm" not in run(program, **{**job, "SLURM_NTASKS": "1"}).stderr


def test_local_rank_before_the_start():
    program = "import hpcdist; print(hpcdist.get_node_local_rank())"
    assert run(program, **STEP).stdout == "1\n"
    assert run(program, **TORCHRUN).stdout == "1\n"
    assert run(program, LOCAL_RANK="3").stdout == "3\n"
    assert run("import hpcdist; print(hpcdist.get_node_local_rank(7))").stdout == "7\n"
    done = run(program)
    assert done.returncode != 0 and "RuntimeError: the node-local rank is not known" in done.stderr


@pytest.mark.parametrize("first", ["mpi4py", "hpcdist"])
def test_beside_mpi4py(first):
    """Whoever starts MPI, both work, and the process ends with 0."""
    start = ["from mpi4py import MPI", "import hpcdist; hpcdist.init_process_group()"]
    lines = start if first == "mpi4py" else start[::-1]
    done = run(
        "\n".join(lines)
        + """
import torch
from hpcdist import _engine
t = torch.ones(2)
hpcdist.all_reduce(t)
print(MPI.COMM_WORLD.allreduce(1), int(t[0]), _engine.owns_mpi())
"""
    )
    assert done.stdout == f"1 1 {first == 'hpcdist'}\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_after_mpi_was_finalized():
    done = run("""
from mpi4py import MPI
MPI.Finalize()
import hpcdist
hpcdist.init_process_group()
""")
    assert done.returncode != 0
    assert "DistBackendError: MPI has been finalized" in done.stderr, done.stderr


def test_log_setting_shows_the_rank():
    done = run("import hpcdist; hpcdist.init_process_group()", HPCDIST_LOG="info")
    assert "[rank 0/1] group 'world' made: backend cpu:mpi" in done.stderr, done.stderr


def test_wrong_setting_is_named():
    done = run("import hpcdist; hpcdist.init_process_group()", HPCDIST_CHECK="sometimes")
    assert (
        "HPCDIST_CHECK='sometimes' is not valid: it must be one of off, fast, on, full"
        in done.stderr
    )
    # also one that only later calls would read, natively
    for name, value in {"HPCDIST_CHECK_TRANSPORT": "tcp", "HPCDIST_STORE_LIMIT": "much"}.items():
        done = run("import hpcdist; hpcdist.init_process_group()", **{name: value})
        assert done.returncode and f"ValueError: {name}={value!r} is not valid" in done.stderr


def test_a_variable_that_nothing_reads_is_named():
    done = run("import hpcdist; hpcdist.init_process_group()", HPCDIST_TIMOUT="60")
    assert done.returncode == 0, done.stderr
    assert "nothing reads HPCDIST_TIMOUT: is HPCDIST_TIMEOUT meant?" in done.stderr


@pytest.mark.parametrize(
    ("family", "cpus", "machine", "hint"),
    [
        ("Open MPI", {3}, 8, "mpirun --bind-to none"),
        ("MPICH", {0}, 2, "mpirun -bind-to none"),
        ("Intel MPI", {0}, 2, "mpirun -genv I_MPI_PIN off"),
        ("Cray MPICH", {0}, 2, "launcher's option"),
        ("Open MPI", {0, 1}, 8, None),
        ("Open MPI", {0}, 1, None),
    ],
)
def test_binding_advice(family, cpus, machine, hint):
    advice = hardware.binding_advice(family, frozenset(cpus), machine)
    if hint is None:
        assert advice is None
    else:
        assert hint in advice and "--cpu-bind=cores" in advice
        assert f"core {min(cpus)} of {machine}" in advice


def test_allowed_cpus_are_those_of_the_mask():
    assert hardware.allowed_cpus() == frozenset(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to give one up")
def test_a_rank_on_one_core_is_told():
    start = "import hpcdist; hpcdist.init_process_group()"
    bound = run("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + start)
    assert bound.stderr.count("bound to core") == 1, bound.stderr
    assert "bound to core" not in run(start).stderr
