"""The job scripts: mpirun.sh for real, those of batch systems against stand-ins that take notes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import find_mpirun

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "jobscripts"
HELLO = str(ROOT / "examples" / "01_hello.py")


def run(script: str, *arguments: str, first: Path | None = None, **env: str) -> str:
    """Run a job script, with `first` before everything else on PATH; return what it printed."""
    mine = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "HOSTS")}
    mine["PATH"] = f"{first or Path(find_mpirun()).parent}:{mine['PATH']}"
    if os.getuid() == 0:
        mine |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["bash", str(SCRIPTS / script), *arguments]
    done = subprocess.run(
        command, env=mine | env, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stand_in(folder: Path, name: str, help_text: str = "") -> None:
    """Put a program into `folder` that prints its arguments and the threads per rank."""
    program = folder / name
    program.write_text(
        "#!/bin/bash\n"
        f'case "$1" in --help|--version) echo "{help_text}"; exit;; esac\n'
        f'echo "{name} $* (OMP_NUM_THREADS=$OMP_NUM_THREADS)"\n'
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
    stand_in(tmp_path, "mpirun", "HYDRA build details:")
    text = run("mpirun.sh", "python", "x.py", first=tmp_path, **env)
    assert "mpirun -n 12 -ppn 4 -bind-to core:8 -f" in text
    assert "python x.py (OMP_NUM_THREADS=7)" in text


def test_slurm(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun")
    text = run("slurm.sh", "python", "x.py", first=tmp_path, SLURM_CPUS_PER_TASK="8")
    assert text.strip() == (
        "srun --mpi=pmix --cpus-per-task=8 --cpu-bind=cores --kill-on-bad-exit=1 python x.py "
        "(OMP_NUM_THREADS=7)"
    )
    text = run("slurm.sh", "x", first=tmp_path, SLURM_CPUS_PER_TASK="1", MPI_PLUGIN="pmi2")
    assert "--mpi=pmi2" in text and "OMP_NUM_THREADS=1" in text


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


def test_lsf_and_flux(tmp_path: Path) -> None:
    stand_in(tmp_path, "jsrun")
    text = run("lsf.sh", first=tmp_path, PROGRAM="python x.py", RANKS="4", CORES_PER_RANK="16")
    assert text.strip() == (
        "jsrun -n 4 -a 1 -c 16 -bind packed:16 python x.py (OMP_NUM_THREADS=15)"
    )
    stand_in(tmp_path, "flux")
    text = run("flux.sh", "python", "x.py", first=tmp_path, RANKS="4", CORES_PER_RANK="1")
    assert text.strip() == "flux run -n 4 -c 1 python x.py (OMP_NUM_THREADS=1)"


def test_every_script_is_in_the_readme() -> None:
    text = (SCRIPTS / "README.md").read_text()
    scripts = sorted(SCRIPTS.glob("*.sh"))
    assert len(scripts) == 5
    for script in scripts:
        assert f"[{script.name}]({script.name})" in text
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK)
