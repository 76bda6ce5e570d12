"""Stock torch.distributed, with hpcdist as its backend and with MPI as its way to meet."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import plain_environment, run_job
from mpis import OPEN_MPI
from places import ROOT
from ports import free_port

from hpcdist.torch import compat

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

HERE = Path(__file__).parent
PROGRAM, SAME, RECORDER, ELASTIC = (
    str(HERE / f"bridge{name}.py") for name in ("", "_same", "_recorder", "_elastic")
)
CHECKS = ["collectives", "objects and messages", "groups, mesh, DTensor", "DDP and FSDP2"]


@pytest.mark.parametrize(("np", "backend"), [(3, "hpcdist"), (2, "gloo")])
def test_stock_torch_runs_over_mpi(np: int, backend: str) -> None:
    ended = run_job(np, PROGRAM, backend)
    # a thread of torch's own gloo that drops a tensor while Python ends aborts the process
    gloos = backend == "gloo" and "terminate called without an active exception" in ended.text
    assert ended.code == 0 or gloos, ended.text
    said = ended.text.splitlines()
    assert [line for line in said if line in CHECKS] == CHECKS, ended.text
    for more in ("timeouts", "both sides", "methods", "other backends"):
        assert (more in said) == (backend == "hpcdist")
    assert sum("is done" in line for line in said) == np


@pytest.mark.parametrize("first", ["native", "torch"])
def test_both_sides_see_one_world_whichever_is_started_first(first: str) -> None:
    ended = run_job(2, str(HERE / "bridge_both.py"), first)
    assert ended.code == 0 and ended.text.count("well") == 2, ended.text


def test_a_nan_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCDIST_NAN_CHECK", "1")
    ended = run_job(2, str(HERE / "bridge_nans.py"))
    assert ended.code == 0 and ended.text.count("well") == 2, ended.text


def test_tensors_on_a_gpu_go_to_the_backend_of_their_device() -> None:
    ended = run_job(3, str(HERE / "bridge_cuda.py"))
    assert ended.code == 0 and ended.text.count("well") == 3, ended.text


@pytest.mark.parametrize("case", ["apart", "again", "turned", "swapped", "told"])
def test_groups_beside_a_default_group_of_gloo(case: str) -> None:
    env = {"HPCDIST_TIMEOUT": "70", "HPCDIST_TEST_PORT": str(free_port())}
    np = 3 if case == "swapped" else 2
    ended = run_job(np, str(HERE / "bridge_beside.py"), case, env=env)
    assert ended.code == 0 and ended.text.count("well") == np, ended.text


@pytest.mark.any_mpi
def test_arguments_that_mpi_answers_and_groups_of_others_are_refused() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import torch.distributed as td, hpcdist.torch
for call in (
    lambda: hpcdist.torch.init_process_group(rank=0),
    lambda: hpcdist.torch.group(),
    lambda: hpcdist.torch.group(7),
):
    try:
        call()
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
""",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second, third = done.stdout.splitlines()
    assert first == "TypeError ['rank'] come from MPI and cannot be given", done.stderr
    assert second == "ValueError torch.distributed has no default group yet"
    assert third.startswith("TypeError 7 is not a group of the backend 'hpcdist'")


# --- what runs over it ---------------------------------------------------------------------------

#: Cases that need four ranks.
FOUR = {
    "device mesh",
    "hierarchical averager",
    "FSDP1 hybrid",
    "FSDP2 hybrid and with tensor parallel",
}
#: Compilers take long: the default one runs with two ranks over Open MPI, the others not with four
#: over MPICH.
DEFAULT_COMPILER = {"compiled collectives"}
COMPILED = DEFAULT_COMPILER | {"compiled calls in place", "compiled DDP"}


def cases_said(text: str, np: int) -> set[str]:
    """The cases that were equal on all ranks."""
    ranks: list[set[str]] = [set() for _ in range(np)]
    for rank, name in re.findall(r"^rank (\d+): (.+): same$", text, re.M):
        ranks[int(rank)].add(name)
    return set.intersection(*ranks)


def all_cases() -> set[str]:
    """As their modules have them, without importing those."""
    found = set()
    for path in (ROOT / "tests" / "support").glob("bridge_*.py"):
        names = re.findall(r"^@case\n(?:@.*\n)*def (\w+)", path.read_text(), re.M)
        found |= {name.replace("_", " ") for name in names}
    return found


@pytest.mark.deadline(310)
@pytest.mark.parametrize("np", [2, 4])
def test_torchs_own_programs_get_the_results_that_gloo_gives(np: int, tmp_path: Path) -> None:
    wanted = all_cases() - (FOUR if np < 4 else DEFAULT_COMPILER)
    if not OPEN_MPI:
        wanted -= COMPILED if np == 4 else DEFAULT_COMPILER
    assert len(wanted) > 25
    ended = run_job(np, SAME, str(tmp_path), *sorted(wanted))
    assert ended.code == 0, ended.text
    assert cases_said(ended.text, np) == wanted, ended.text


@pytest.mark.any_mpi
def test_torchfrtrace_reads_the_flight_recorder(tmp_path: Path) -> None:
    from torch.distributed.flight_recorder import fr_trace

    good, bad = tmp_path / "good", tmp_path / "bad"
    env = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": f"{bad}/trace_"}
    ended = run_job(2, RECORDER, f"{good}/trace_", env=env)
    assert ended.code == 0, ended.text
    assert ended.text.count("mismatch") == 2 and "torchfrtrace -p trace_" in ended.text
    said = {}
    for folder in (good, bad):
        assert sorted(os.listdir(folder)) == ["trace_0", "trace_1"]
        out = str(tmp_path / "db")
        with contextlib.redirect_stdout(io.StringIO()):
            fr_trace.main([str(folder), "-p", "trace_", "-o", out])
        with open(out, "rb") as file:
            _, said[folder] = pickle.load(file)
    whole = [c for c in said[good].collectives if c.group_id == "0"]
    assert all(c.pass_check for c in said[good].collectives)
    assert [c.collective_name for c in whole] == [
        f"{compat.recorded_as()}:{name}"
        for name in ["all_reduce"] * 5
        + ["_all_gather_base", "_reduce_scatter_base", "broadcast", "all_gather", "all_to_all"]
        + ["all_reduce_barrier", "send 0->1", "all_reduce_barrier"]
    ]
    assert {g.desc for g in said[good].groups} == {"default_pg", "the pair"}
    wrong = [c for c in said[bad].collectives if not c.pass_check]
    assert len(wrong) == 1
    assert "COLLECTIVE_TYPE_MISMATCH" in str(
        next(iter(wrong[0].mismatch_collectives.values())).type_of_mismatch
    )
    with open(good / "trace_0", "rb") as file:
        entries = pickle.load(file)["entries"]
    assert {entry["state"] for entry in entries} == {"completed"}
    line = Path(RECORDER).read_text().splitlines().index("        td.all_reduce(torch.ones(5))") + 1
    assert entries[0]["frames"][0] == {"name": "main", "filename": RECORDER, "line": line}
    assert entries[3]["input_sizes"] == [[2, 3]] and entries[3]["input_dtypes"] == ["Float"]


# --- starting ------------------------------------------------------------------------------------


def python(*arguments: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        env=plain_environment(**more),
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.skipif(OPEN_MPI, reason="Open MPI needs its launcher, and says so (next test)")
def test_torchrun_starts_the_workers_again_and_the_training_goes_on(tmp_path: Path) -> None:
    ended = python(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"),
        *(ELASTIC, str(tmp_path)),
    )
    text = ended.stdout
    assert ended.returncode == 0, text + ended.stderr
    assert [text.count(f"attempt 0 rank {rank} of 2 from 0") for rank in range(2)] == [1, 1], text
    again = [re.search(rf"attempt 1 rank {rank} of 2 from (\d)", text) for rank in range(2)]
    assert [found and found[1] for found in again] == ["2", "2"], text
    assert text.count("attempt 1 is done") == 2 and "attempt 0 is done" not in text


def test_several_processes_without_an_mpi_job_are_told_the_command() -> None:
    """Rather than being a world each."""
    program = (
        "import torch.distributed as td, hpcdist.torch; td.init_process_group('gloo', 'mpi://')"
    )
    ended = python("-c", program, RANK="0", WORLD_SIZE="2", MASTER_ADDR="x", MASTER_PORT="1")
    assert ended.returncode != 0
    assert "mpirun" in ended.stderr and "-n 2" in ended.stderr, ended.stderr


def plugin(folder: Path) -> str:
    """A folder with the metadata of an installed hpcdist, as pyproject.toml says them."""
    text = (ROOT / "pyproject.toml").read_text()
    (entry,) = re.findall(
        r'^\[project.entry-points."torch.backends"\]\n(hpcdist) = "(.+)"$', text, re.M
    )
    info = folder / "hpcdist_as_installed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hpcdist-as-installed\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{entry[0]} = {entry[1]}\n")
    (folder / "hpcdist_torch_plugin").symlink_to(ROOT / "hpcdist" / "torch" / "plugin")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


LOADED_BY_ITSELF = """
import sys, torch, torch.distributed as td
assert td.is_backend_available("hpcdist"), "torch has not loaded the entry point"
assert not [name for name in sys.modules if name.split(".")[0] in ("hpcdist", "mpi4py")]
assert "libmpi" not in open("/proc/self/maps").read()
config = td.distributed_c10d.BackendConfig("cpu:hpcdist,cuda:nccl")
assert config.get_device_backend_map() == {"cpu": "hpcdist", "cuda": "nccl"}
config = td.distributed_c10d.BackendConfig(td.Backend("hpcdist"))
assert config.get_device_backend_map() == {"cpu": "hpcdist", "cuda": "hpcdist"}
td.init_process_group("hpcdist", init_method="mpi://")
t = torch.ones(3)
td.all_reduce(t)
assert t.tolist() == [1.0] * 3 and td.get_backend() == "hpcdist"
td.destroy_process_group()
td.init_process_group("cpu:hpcdist,cuda:nccl", init_method="mpi://")
td.all_reduce(t)
td.destroy_process_group()
import hpcdist.torch
assert td.Backend._plugins["HPCDIST"].creator_fn.__module__ == "hpcdist_torch_plugin"
print("well")
"""

WITHOUT_LIBMPI = """
import sys
sys.modules["hpcdist._engine"] = None  # as where libmpi is missing: its import fails
import torch, torch.distributed as td
assert td.is_backend_available("hpcdist") and torch.ones(2).sum() == 2
try:
    td.init_process_group("hpcdist", init_method="mpi://")
except ImportError as error:
    print("well")
"""

SWITCHED_OFF = """
import torch.distributed as td
assert not td.is_backend_available("hpcdist"), "TORCH_DEVICE_BACKEND_AUTOLOAD=0 was not obeyed"
print("well")
"""


@pytest.mark.any_mpi
def test_torch_finds_the_installed_backend_by_itself(tmp_path: Path) -> None:
    path = plugin(tmp_path)
    for program, more in (
        (LOADED_BY_ITSELF, {}),
        (WITHOUT_LIBMPI, {}),
        (SWITCHED_OFF, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    ):
        ended = python("-c", program, PYTHONPATH=path, **more)
        assert ended.stdout == "well\n", ended.stderr
