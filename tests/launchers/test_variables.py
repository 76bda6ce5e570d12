"""torchrun's variables, from those of the launchers, and what stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpcdist import launchers
from hpcdist.launchers import rank, variables

pytestmark = pytest.mark.local

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_PROCID": "3",
    "PMIX_RANK": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[07-08]",
}
PLACE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def of(env: dict[str, str], **more: bool) -> dict[str, str]:
    launch = launchers.detect(env)
    assert launch is not None
    return variables.of_launch(launch, env, **more)


def test_what_a_launcher_does_not_say_is_missing():
    assert of(OPEN_MPI) == PLACE
    assert of(OPEN_MPI, in_blocks=True) == PLACE | {"NODE_RANK": "1"}
    assert of(SLURM) == PLACE | {"NODE_RANK": "1", "MASTER_ADDR": "n07"}
    unnamed = {name: value for name, value in SLURM.items() if name != "SLURM_MPI_TYPE"}
    assert of(unnamed)["NODE_RANK"] == "1" and of(unnamed)["MASTER_ADDR"] == "n07"
    one = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert of(one)["NODE_RANK"] == "0" and of(one)["MASTER_ADDR"] == "127.0.0.1"


def test_slurms_step_is_not_the_job_under_another_launcher():
    """Its daemon on the second node is a task of a step of its own, of that node alone."""
    daemon = {
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "n08",
    }
    assert of({**daemon, **OPEN_MPI}) == PLACE
    assert of({**daemon, **OPEN_MPI}, in_blocks=True) == PLACE | {"NODE_RANK": "1"}
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert of({**daemon, **hydra}) == PLACE
    assert of({**daemon, "PMIX_RANK": "3"}) == {"RANK": "3"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("", ""),
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3,7],m2", "n1"),
        ("n[007,9]", "n007"),
        ("r[1-2]n[03-04]x", "r1n03x"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str):
    assert variables.first_host(nodes) == first


def test_what_somebody_else_has_set_stays():
    env = {"LOCAL_RANK": "0", "MASTER_ADDR": "here", "RANK": "3", "WORLD_SIZE": ""}
    assert variables.export({**PLACE, "MASTER_ADDR": "there", "MASTER_PORT": "1"}, env) == {}
    exported = env.pop(variables.EXPORTED)
    size, local = PLACE["WORLD_SIZE"], PLACE["LOCAL_WORLD_SIZE"]
    assert exported == f"LOCAL_WORLD_SIZE={local},MASTER_PORT=1,WORLD_SIZE={size}"
    assert env == PLACE | {"LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


def test_the_place_in_another_job_is_replaced_as_a_whole():
    """A batch script that exports RANK=$SLURM_PROCID before mpirun: 0 on every rank."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "5", "MASTER_PORT": "1"}
    former = variables.export({**PLACE, "MASTER_PORT": "2"}, env)
    assert former == {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "5"}
    del env[variables.EXPORTED]
    assert env == PLACE | {"MASTER_PORT": "1"}


def test_what_hpcdist_set_in_an_outer_job_is_replaced_without_a_word():
    env: dict[str, str] = {}
    variables.export({**PLACE, "MASTER_PORT": "1"}, env)
    inner = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "2"}
    assert variables.export(inner, env) == {}
    assert {name: env[name] for name in inner} == inner


def test_what_a_program_has_changed_since_is_its_own():
    env: dict[str, str] = {}
    variables.export({**PLACE, "MASTER_PORT": "1"}, env)
    env["MASTER_PORT"] = "7"
    assert variables.exported(env) == set(PLACE)
    variables.export({"MASTER_PORT": "2"}, env)
    assert env["MASTER_PORT"] == "7"


def test_a_ranks_place_is_not_its_childs():
    """PMI_FD is the rank's connection to its launcher, which a child does not have."""
    env = {"PMI_FD": "9999"}
    variables.export({**PLACE, "MASTER_ADDR": "here", "MASTER_PORT": "1"}, env)
    left = launchers.own_variables(env)
    assert set(left) == {"PMI_FD", variables.EXPORTED}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        changed = {**env, name: "17"}
        assert launchers.own_variables(changed) == changed, name
    del env["PMI_FD"]
    assert launchers.own_variables(env) == env


def start(*command: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-IS", rank.__file__, *command], env=env, capture_output=True, text=True,
        timeout=30,
    )  # fmt: skip


def test_the_program_before_the_program():
    show = "import os, sys; print(sorted(os.environ.items()), sys.argv, sys.flags.isolated)"
    done = start("--blocks", sys.executable, "-c", show, "-x", **OPEN_MPI, RANK="7")
    assert done.returncode == 0, done.stderr
    assert "hpcdist launch: RANK=7 was set and is wrong here: it is now 3\n" == done.stderr
    for name, value in (PLACE | {"NODE_RANK": "1"}).items():
        assert f"('{name}', '{value}')" in done.stdout
    assert "['-c', '-x'] 0" in done.stdout
    # torchrun has said all, and without a launcher there is nothing to say
    for env in ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", **OPEN_MPI}, {}):
        done = start(sys.executable, "-c", "import os; print(os.environ.get('LOCAL_RANK'))", **env)
        assert (done.stdout, done.stderr) == ("None\n", "")


def test_it_loads_neither_torch_nor_mpi_and_is_quick():
    code = (
        f"import sys; sys.argv = ['', 'x']; sys.path.insert(0, {os.path.dirname(rank.__file__)!r});"
        "import os; os.execv = lambda *a: None; import rank; rank.main();"
        "print([m for m in sys.modules if m in ('torch', 'numpy', 'mpi4py', 'hpcdist')])"
    )
    done = subprocess.run(
        [sys.executable, "-IS", "-c", code], env=OPEN_MPI, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
