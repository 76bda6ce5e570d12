"""The command lines for each launcher, and finding the one that belongs to this MPI."""

from __future__ import annotations

import argparse
import os
import sys

import pytest

from hpcdist import DistBackendError
from hpcdist.cli import launch
from hpcdist.launchers import commands, rank
from hpcdist.launchers.commands import Hydra, IntelMpi, OpenMpi, Srun

pytestmark = pytest.mark.local

STARTERS = {
    "openmpi": OpenMpi("/bin/run"),
    "hydra": Hydra("/bin/run"),
    "intel": IntelMpi("/bin/run"),
    "srun": Srun("/bin/run", "pmix"),
}


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(commands, "cores", lambda: 8)
    monkeypatch.setattr(commands.os, "geteuid", lambda: 1000)
    return monkeypatch


def line(kind, ranks, *hosts, env=None, **more):
    command = STARTERS[kind].command(ranks, ["prog", "-n"], hosts, environ=env or {}, **more)
    assert command[0] == "/bin/run" and command[-2:] == ["prog", "-n"]
    return " ".join(command[1:-2])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("openmpi", "--map-by ppr:4:node:PE=2 --bind-to core --output tag -n 4"),
        ("hydra", "-bind-to core:2 -prepend-rank -n 4"),
        ("intel", "-genv I_MPI_PIN_DOMAIN auto -prepend-rank -n 4"),
        ("srun", "--mpi=pmix --ntasks=4 --label"),
    ],
)
def test_each_rank_gets_its_share_of_the_cores(eight_cores, kind, expected):
    assert line(kind, 4) == expected


@pytest.mark.parametrize("ranks", [5, 16])
def test_where_cores_are_short_nobody_is_bound(eight_cores, ranks):
    """On one core a rank could not communicate while it computes."""
    assert line("openmpi", ranks, label=False) == (
        f"--map-by ppr:{ranks}:node:OVERSUBSCRIBE --bind-to none -x OMP_NUM_THREADS=1 -n {ranks}"
    )
    assert line("hydra", ranks) == (
        f"-bind-to none -genv OMP_NUM_THREADS 1 -prepend-rank -n {ranks}"
    )
    assert line("intel", ranks).startswith("-genv I_MPI_PIN off -genv OMP_NUM_THREADS 1 ")
    assert "--overcommit --cpu-bind=none --export=ALL,OMP_NUM_THREADS=1" in line("srun", ranks)
    assert "OMP" not in line("hydra", ranks, env={"OMP_NUM_THREADS": "3"})
    assert "OMP_NUM_THREADS 8" in line("hydra", 1, bind=False)


def test_hosts(eight_cores):
    env = {"PATH": "/bin", "HPCDIST_LOG": "info", "HPCDIST_STORE_KEY": "secret", "HOME": "/root"}
    assert line("openmpi", 8, "a", "b", env=env) == (
        "--host a:4,b:4 -x HPCDIST_LOG -x PATH --map-by ppr:4:node:PE=2 --bind-to core "
        "--output tag -n 8"
    )
    assert line("hydra", 8, "a", "b") == "-hosts a,b -ppn 4 -bind-to core:2 -prepend-rank -n 8"
    # else srun takes as many nodes as the batch job has, spare and dead ones among them
    env = {"SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "3"}
    assert "--nodes=2 --nodelist=a,b --ntasks-per-node=4" in line("srun", 8, "a", "b", env=env)


def test_srun_takes_the_batch_jobs_cores_over(eight_cores):
    env = {"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_NUM_NODES": "2"}
    assert line("srun", 4, env=env) == (
        "--mpi=pmix --ntasks=4 --cpus-per-task=4 --cpu-bind=cores --label"
    )


BATCH_JOBS = {
    "slurm": {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b"},
    "step": {"SLURM_JOB_NUM_NODES": "9", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a,b"},
    "pbs": {"PBS_JOBID": "7", "PBS_NODEFILE": "{nodefile}"},
    "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 32 b 32"},
}


@pytest.fixture(params=BATCH_JOBS)
def batch_job(request, tmp_path):
    """The variables of a job of two nodes."""
    nodefile = tmp_path / "nodes"
    nodefile.write_text("a\na\nb\nb\n")
    job = BATCH_JOBS[request.param]
    return {name: value.format(nodefile=nodefile) for name, value in job.items()}


@pytest.mark.parametrize("kind", ["openmpi", "hydra", "intel"])
def test_mpirun_spreads_the_ranks_over_the_batch_jobs_nodes(eight_cores, batch_job, kind):
    """mpirun takes the nodes from the batch system; it is told how many ranks each has."""
    said = line(kind, 8, env=batch_job)
    assert {"openmpi": "ppr:4:node:PE=2", "hydra": "-ppn 4", "intel": "-ppn 4"}[kind] in said
    assert launch._environment(STARTERS[kind], (), batch_job)["MASTER_ADDR"] == "a"
    one = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    assert launch._environment(STARTERS[kind], (), one)["MASTER_ADDR"] == "127.0.0.1"


def test_a_list_of_nodes_that_cannot_be_read_is_one_node(tmp_path):
    for env in ({"PBS_NODEFILE": str(tmp_path / "none")}, {"LSB_MCPU_HOSTS": ""}, {}):
        assert STARTERS["hydra"].nodes(env) == 1


def test_root_says_so_to_open_mpi(eight_cores):
    eight_cores.setattr(commands.os, "geteuid", lambda: 0)
    assert line("openmpi", 1).startswith("--allow-run-as-root ")
    assert "root" not in line("hydra", 1)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that say what they are, on a PATH of their own, and no mpirun beside Python."""
    monkeypatch.setattr(commands, "beside_python", lambda: None)
    env = {"PATH": f"{tmp_path}"}

    def make(name, says):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho '{says}'\n")
        path.chmod(0o755)
        return str(path)

    return make, env, monkeypatch


@pytest.mark.parametrize(
    ("family", "says", "kind"),
    [
        ("openmpi", "mpirun (Open MPI) 5.0.11", OpenMpi),
        ("mpich", "HYDRA build details:", Hydra),
        ("mpich", "Intel(R) MPI Library for Linux* OS", IntelMpi),
    ],
)
def test_the_mpirun_of_this_mpi_is_found(programs, family, says, kind):
    make, env, monkeypatch = programs
    monkeypatch.setattr(commands, "family", lambda: family)
    path = make("mpirun", says)
    assert commands.find("auto", env) == kind(path)
    assert commands.find(path, env) == kind(path)


def test_the_mpirun_of_another_mpi_is_refused(programs):
    make, env, monkeypatch = programs
    monkeypatch.setattr(commands, "family", lambda: "mpich")
    make("mpirun", "mpirun (Open MPI) 5.0.11")
    with pytest.raises(DistBackendError, match=r"is Open MPI's, but hpcdist is built for MPICH"):
        commands.find("auto", env)
    make("mpirun", "something else")
    with pytest.raises(DistBackendError, match=r"neither Open MPI's nor hydra's"):
        commands.find("auto", env)


def test_no_mpirun_at_all(programs):
    _, env, _ = programs
    with pytest.raises(DistBackendError, match="mpirun is not found"):
        commands.find("auto", env)
    with pytest.raises(DistBackendError, match="there is no srun"):
        commands.find("srun", env)


def test_srun_inside_a_slurm_job_if_it_has_the_plugin(programs):
    make, env, monkeypatch = programs
    monkeypatch.setattr(commands, "family", lambda: "openmpi")
    mpi = make("mpirun", "mpirun (Open MPI) 5.0.11")
    srun = make("srun", "MPI plugin types are... none pmix pmi2")
    assert commands.find("auto", env).path == mpi
    job = {**env, "SLURM_JOB_ID": "7"}
    assert commands.find("auto", job) == Srun(srun, "pmix")
    assert commands.find("auto", {**job, "SLURM_PROCID": "0"}).path == mpi
    make("srun", "MPI plugin types are... none")
    assert commands.find("auto", job).path == mpi
    with pytest.raises(DistBackendError, match="no MPI plugin for Open MPI"):
        commands.find("srun", env)


@pytest.mark.parametrize(("cray", "plugin"), [(False, "pmi2"), (True, "cray_shasta")])
def test_crays_plugin_is_for_crays(programs, tmp_path, cray, plugin):
    """Slurm's packages have it everywhere."""
    make, env, monkeypatch = programs
    monkeypatch.setattr(commands, "family", lambda: "mpich")
    monkeypatch.setattr(commands, "_CRAY", str(tmp_path if cray else tmp_path / "none"))
    srun = make("srun", "MPI plugin types are... cray_shasta none pmi2 pmix")
    assert commands.find("auto", {**env, "SLURM_JOB_ID": "7"}) == Srun(srun, plugin)


def test_cores_of_this_process():
    assert 1 <= commands.cores() <= len(os.sched_getaffinity(0))


def run_launch(*arguments):
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return launch.run(parser.parse_args(arguments))


def test_launch_only_says_what_it_would_run(programs, capsys):
    make, env, monkeypatch = programs
    monkeypatch.setattr(commands, "family", lambda: "mpich")
    monkeypatch.setenv("PATH", env["PATH"])
    path = make("mpirun", "HYDRA build details:")
    assert run_launch("-n", "2", "--no-bind", "--dry-run", __file__, "--epochs", "3") == 0
    said = capsys.readouterr().err
    assert said.startswith(f"+ {path} -bind-to none ")
    shim = f"{sys.executable} -IS {rank.__file__} --blocks"
    assert said.endswith(f"-prepend-rank -n 2 {shim} {sys.executable} {__file__} --epochs 3\n")
    assert "MASTER_PORT" not in os.environ
    assert run_launch("-n", "2", "--no-label", "--dry-run", "-m", "a.b", "-x") == 0
    said = capsys.readouterr().err
    assert "prepend" not in said and said.endswith("-m a.b -x\n")
    for before in ((), ("--",)):  # the program's own dashes are all left to it
        assert run_launch("-n", "2", "--dry-run", *before, __file__, "--", "-x", "--") == 0
        assert capsys.readouterr().err.endswith(f" {__file__} -- -x --\n")


def test_nodes_of_a_batch_job_that_get_unequal_numbers_are_no_blocks(programs, capsys):
    """The last rank of 3 + 2 was on the third of two nodes."""
    make, env, monkeypatch = programs
    monkeypatch.setattr(commands, "family", lambda: "mpich")
    monkeypatch.setenv("PATH", env["PATH"])
    make("mpirun", "HYDRA build details:")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    for ranks, blocks in (("4", True), ("5", False)):
        assert run_launch("-n", ranks, "--launcher", "mpirun", "--dry-run", __file__) == 0
        assert (f"{rank.__file__} --blocks " in capsys.readouterr().err) == blocks
    assert run_launch("-n", "3", "--hosts", "a,b,c", "--dry-run", __file__) == 0
    assert f"{rank.__file__} --blocks " in capsys.readouterr().err


def test_a_plain_launch_loads_no_torch(programs):
    make, env, monkeypatch = programs
    monkeypatch.setattr(commands, "family", lambda: "mpich")
    monkeypatch.setenv("PATH", env["PATH"])
    make("mpirun", "HYDRA build details:")
    monkeypatch.setitem(sys.modules, "hpcdist.cli.restarts", None)
    monkeypatch.delattr("hpcdist.cli.restarts", raising=False)
    assert run_launch("-n", "2", "--dry-run", __file__) == 0


def test_launch_refuses_what_cannot_be(programs, capsys):
    assert run_launch("-n", "2", "nothing.py") == 2
    assert "no file nothing.py" in capsys.readouterr().err
    assert run_launch("-n", "3", "--hosts", "a,b", __file__) == 2
    assert "3 ranks cannot be divided among 2 hosts" in capsys.readouterr().err
    assert run_launch("-n", "2", "--launcher", "/no/mpirun", __file__) == 1
    assert "/no/mpirun is not found" in capsys.readouterr().err
    for wrong in (["-n", "0", "x.py"], ["-n", "2", "--hosts", ",", "x.py"], ["x.py"]):
        with pytest.raises(SystemExit):
            run_launch(*wrong)
