"""The checks of ``diagnose`` on made-up machines, what they advise, and the forms of the report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpis import FAMILY
from places import ROOT

from hpcdist import config
from hpcdist.cli.diagnose import (
    advice,
    binding,
    build,
    gpu,
    infiniband,
    launcher,
    memory,
    settings,
    whole,
)  # fmt: skip
from hpcdist.cli.diagnose.section import FAULT, NOTE, WARNING, Place, Section

pytestmark = pytest.mark.local

NO_LIMITS = {"memlock": -1, "nofile": 65536}


def machine(root: Path, files: dict[str, str]) -> Path:
    """A root folder with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def two_nodes(root: Path, states: tuple[str, str] = ("4: ACTIVE", "4: ACTIVE")) -> Path:
    """Two NUMA nodes of four cores, and an adapter on each."""
    files = {"dev/infiniband/uverbs0": ""}
    for node in (0, 1):
        there = f"sys/devices/system/node/node{node}"
        files[f"{there}/cpulist"] = ("0-1,4-5", "2-3,6-7")[node]
        files[f"{there}/distance"] = ("10 21", "21 10")[node]
        adapter = f"sys/class/infiniband/mlx5_{node}"
        files[f"{adapter}/device/numa_node"] = str(node)
        files[f"{adapter}/ports/1/state"] = states[node]
        files[f"{adapter}/ports/1/rate"] = "200 Gb/sec (4X HDR)"
        files[f"{adapter}/ports/1/link_layer"] = "InfiniBand"
    return machine(root, files)


def facts(section: Section) -> dict[str, object]:
    return {fact["name"]: fact["value"] for fact in section.facts}


def only(section: Section) -> dict[str, str]:
    assert len(section.findings) == 1, section.findings
    return section.findings[0]


# --- cores ---------------------------------------------------------------------------------------


def test_lists_of_cores():
    assert binding.numbers("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
    assert binding.numbers("") == binding.numbers("junk,-,3-x") == frozenset()
    assert binding.short([8, 0, 1, 3]) == "0-1,3,8"


def test_one_core_for_several_threads(tmp_path):
    place = Place({}, tmp_path, frozenset({3}))
    found = only(binding.collect(place, "Open MPI", 8))
    assert found["severity"] == FAULT and "core 3 of 8" in found["what"]
    assert "--bind-to none" in found["fix"] and "--cpus-per-task" in found["fix"]
    assert "-bind-to none" in only(binding.collect(place, "MPICH", 8))["fix"]
    assert only(binding.collect(place, "MPICH", 1))["severity"] == WARNING


def test_more_threads_than_cores_and_a_quota(tmp_path):
    machine(tmp_path, {"sys/fs/cgroup/cpu.max": "150000 100000", "proc/self/cgroup": "0::/"})
    place = Place({"OMP_NUM_THREADS": "16"}, tmp_path, frozenset(range(4)))
    threads, quota = binding.collect(place, "MPICH", 8).findings
    assert threads["severity"] == FAULT and "OMP_NUM_THREADS=3" in threads["fix"]
    assert "grants 1.5 cores" in quota["what"] and "--cpus" in quota["fix"]
    machine(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000"})
    place = Place({"OMP_NUM_THREADS": "3"}, tmp_path, frozenset(range(4)))
    assert binding.collect(place, "MPICH", 8).findings == []


def test_ranks_that_share_cores():
    apart = [(0, frozenset({0, 1})), (1, frozenset({2, 3}))]
    assert binding.shared(apart, 4) is None
    assert binding.shared([(0, frozenset({0})), (1, frozenset({0}))], 4)["severity"] == FAULT
    many = binding.shared([(rank, frozenset({0, 1})) for rank in range(3)], 2)
    assert many["severity"] == WARNING and many["fix"] == "start at most 2 ranks per host"


# --- memory --------------------------------------------------------------------------------------


def test_memory_is_copied_from_this_process_and_not_from_one_that_is_gone():
    offer = memory.Offer()
    host, pid, address, content = offer.address()
    assert memory.can_copy((pid, address, content)) == ""
    assert "process numbers" in memory.can_copy((pid, address, bytes(len(content))))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert "No such process" in memory.can_copy((gone.pid, address, content))


def test_the_sibling_is_the_next_rank_of_the_same_host():
    offers = [("a", 1, 10, b"x"), ("b", 2, 20, b"y"), ("a", 3, 30, b"z")]
    assert memory.sibling_of(offers, 0) == (3, 30, b"z")
    assert memory.sibling_of(offers, 2) == (1, 10, b"x")
    assert memory.sibling_of(offers, 1) is None


def test_a_sibling_that_cannot_be_read(tmp_path):
    place = Place({}, tmp_path, sibling=(2**22 + 1, 0, b"x"))  # above the largest process number
    found = only(memory.collect(place, NO_LIMITS, 1 << 34))
    assert (
        found["severity"] == WARNING and "(CMA)" in found["what"] and "SYS_PTRACE" in found["fix"]
    )
    machine(tmp_path, {"dev/xpmem": ""})
    assert memory.collect(place, NO_LIMITS, 1 << 34).findings == []


def test_ptrace_scope_where_no_other_rank_can_be_tried(tmp_path):
    for scope, severity in ("1", NOTE), ("2", WARNING):
        machine(tmp_path, {"proc/sys/kernel/yama/ptrace_scope": scope})
        found = only(memory.collect(Place({}, tmp_path), NO_LIMITS, 1 << 34))
        assert found["severity"] == severity and "yama.ptrace_scope=0" in found["fix"]


def test_locked_memory_matters_with_adapters_only(tmp_path):
    limits = {"memlock": 65536, "nofile": 65536}
    assert memory.collect(Place({}, tmp_path), limits, 1 << 34).findings == []
    found = only(memory.collect(Place({}, two_nodes(tmp_path)), limits, 1 << 34))
    assert found["severity"] == FAULT and "64 KiB" in found["what"]
    assert "ulimit -l unlimited" in found["fix"]


def test_open_files_shared_memory_and_huge_pages(tmp_path):
    machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"})
    section = memory.collect(Place({}, tmp_path), {"memlock": -1, "nofile": 256}, 64 << 20)
    assert [each["severity"] for each in section.findings] == [NOTE, WARNING, FAULT]
    assert "ulimit -n" in section.findings[1]["fix"]
    assert "64 MiB" in section.findings[2]["what"] and "--shm-size" in section.findings[2]["fix"]
    assert facts(section)["transparent huge pages"] == "never"
    assert facts(section)["limit: bytes locked"] == "unlimited"
    assert "no /dev/shm" in memory.collect(Place({}, tmp_path), NO_LIMITS).findings[1]["what"]


# --- adapters ------------------------------------------------------------------------------------


def test_ports_with_their_rates_and_distances(tmp_path):
    place = Place({}, two_nodes(tmp_path), frozenset({2, 3}))
    first, second = infiniband.ports(place)
    assert (first.name, first.state, first.rate, first.node) == ("mlx5_0:1", "ACTIVE", 200.0, 0)
    assert (first.distance, second.distance) == (21, 10)
    assert infiniband.rate_of([first, second]) == 400.0
    section = infiniband.collect(place)
    assert section.findings == []
    assert facts(section)["mlx5_1:1"] == (
        "ACTIVE, 200 Gbit/s, InfiniBand, NUMA node 1, distance 10 from the rank"
    )


@pytest.mark.parametrize(
    ("env", "severity", "what", "fix"),
    [
        ({"UCX_NET_DEVICES": "mlx5_7:1"}, FAULT, "does not have", "choose from mlx5_0:1,mlx5_1:1"),
        ({"UCX_NET_DEVICES": "eth0"}, WARNING, "leaves the adapters out", "unset UCX_NET_DEVICES"),
        ({"UCX_NET_DEVICES": "mlx5_1:1"}, WARNING, "mlx5_0:1 is nearer", "mlx5_0:1 for this rank"),
        ({"NCCL_IB_HCA": "=hfi1"}, FAULT, "picks none", "name some of mlx5_0,mlx5_1"),
        ({"NCCL_IB_HCA": "^mlx5"}, FAULT, "picks none", "unset NCCL_IB_HCA"),
    ],
)
def test_settings_against_the_adapters(env, severity, what, fix, tmp_path):
    found = only(infiniband.collect(Place(env, two_nodes(tmp_path), frozenset({0, 1}))))
    assert found["severity"] == severity and what in found["what"] and fix in found["fix"]


def test_settings_that_choose_well(tmp_path):
    root = two_nodes(tmp_path)
    for env in (
        {"UCX_NET_DEVICES": "mlx5_0:1"}, {"UCX_NET_DEVICES": "all"}, {"NCCL_IB_HCA": "mlx5"},
        {"NCCL_IB_HCA": "^mlx5_1"},
    ):  # fmt: skip
        assert infiniband.collect(Place(env, root, frozenset({0}))).findings == []


def test_ports_that_are_not_active(tmp_path):
    root = two_nodes(tmp_path, ("2: INIT", "1: DOWN"))
    (root / "dev/infiniband/uverbs0").unlink()
    manager, none, verbs = infiniband.collect(Place({}, root, frozenset({0}))).findings
    assert "mlx5_0:1 is in state INIT" in manager["what"] and "opensm" in manager["fix"]
    assert "no port of any adapter is active" in none["what"]
    assert "--device=/dev/infiniband" in verbs["fix"]
    assert infiniband.rate_of(infiniband.ports(Place({}, root))) == 0


def test_no_adapters(tmp_path):
    assert infiniband.collect(Place({}, tmp_path)).findings == []
    found = only(infiniband.collect(Place({"UCX_NET_DEVICES": "mlx5_0:1"}, tmp_path)))
    assert found["severity"] == FAULT and found["fix"] == "unset UCX_NET_DEVICES"


def test_the_rate_of_network_cards(tmp_path):
    net = "sys/class/net"
    machine(tmp_path, {
        f"{net}/eth0/speed": "25000", f"{net}/eth0/operstate": "up", f"{net}/eth0/device/x": "",
        f"{net}/eth1/speed": "100000", f"{net}/eth1/operstate": "down", f"{net}/eth1/device/x": "",
        f"{net}/veth0/speed": "400000", f"{net}/veth0/operstate": "up",
    })  # fmt: skip
    assert whole.ethernet(Place({}, tmp_path)) == 25.0


# --- settings, launcher, build, GPUs -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "severity", "fix"),
    [
        ("OMPI_MCA_pml", "ob1", WARNING, "export OMPI_MCA_pml=ucx"),
        ("OMPI_MCA_coll_hcoll_enable", "1", FAULT, "unset OMPI_MCA_coll_hcoll_enable"),
        ("UCX_MEM_MMAP_HOOK_MODE", "None", FAULT, "unset UCX_MEM_MMAP_HOOK_MODE"),
        ("MPICH_MAX_THREAD_SAFETY", "funneled", FAULT, "unset MPICH_MAX_THREAD_SAFETY"),
        ("RDMAV_FORK_SAFE", "0", WARNING, "export RDMAV_FORK_SAFE=1"),
        ("HPCDIST_CHEK", "off", WARNING, "export HPCDIST_CHECK=..."),
        ("HPCDIST_CHECK", "perhaps", FAULT, "export HPCDIST_CHECK=..., or unset HPCDIST_CHECK"),
    ],
)
def test_bad_settings(name, value, severity, fix):
    family = "MPICH" if name.startswith("MPICH") else "Open MPI"
    section = settings.collect(Place({name: value}), family)
    found = only(section)
    assert (found["severity"], found["fix"]) == (severity, fix)
    assert facts(section) == {name: value} and name in found["what"]


@pytest.mark.parametrize(
    ("family", "variable"),
    [
        ("MPICH", "OMPI_MCA_coll_hcoll_enable=1"),
        ("Intel MPI", "OMPI_MCA_pml=ob1"),
        ("Open MPI", "MPICH_MAX_THREAD_SAFETY=single"),
    ],
)
def test_settings_of_another_mpi_are_shown_and_not_judged(family, variable):
    name, _, value = variable.partition("=")
    section = settings.collect(Place({name: value}), family)
    assert facts(section) == {name: value} and not section.findings


@pytest.mark.parametrize("subject", ["transport", "environment", "cores", "NUMA"])
def test_advice_is_in_the_words_of_the_mpi(subject):
    said = {mpi: advice.give(subject, mpi) for mpi in ("Open MPI", "MPICH", "Intel MPI", "else")}
    assert all(said.values())
    assert not re.search(r"OMPI_|--map-by|--bind-to|mpirun -x", said["MPICH"] + said["else"])
    assert not re.search(r"MPIR_|I_MPI_|-genv| -bind-to", said["Open MPI"] + said["else"])
    assert advice.give(subject) == said[FAMILY]


def test_good_settings_and_what_the_launcher_sets_itself():
    env = {"OMPI_MCA_pml": "ucx", "UCX_TLS": "rc,sm,self", "HOME": "/root", "HPCDIST_CHECK": "off"}
    launchers_own = {"OMPI_MCA_orte_ess_num_procs": "2", "OMPI_MCA_cpu_type": "x86_64"}
    section = settings.collect(Place(env | launchers_own), "Open MPI")
    assert section.findings == []
    assert sorted(facts(section)) == ["HPCDIST_CHECK", "OMPI_MCA_pml", "UCX_TLS"]
    assert facts(settings.collect(Place({}))) == {"set": "none that matters"}


def test_the_table_says_what_the_job_scripts_set():
    text = (ROOT / "jobscripts" / "env" / "infiniband.sh").read_text()
    exported = {}
    for line in re.findall(r"^export (.*)$", text, re.M):
        exported |= dict(re.findall(r"(\w+)=\$\{\1:-(\$\(\(.*\)\)|[^}]*)\}", line))
    table = {each.variable: each.good for each in settings.SETTINGS if each.good}
    assert set(exported) == set(table)
    assert len(exported) >= 10
    del exported["OMP_NUM_THREADS"], table["OMP_NUM_THREADS"]  # computed there, in words here
    assert exported == table
    assert len({each.variable for each in settings.SETTINGS}) == len(settings.SETTINGS)


def test_settings_without_secrets():
    """People put the report into public issues."""
    secret = [each.variable for each in config.options() if each.secret]
    assert {"HPCDIST_STORE_KEY", "HPCDIST_DEBUG_TOKEN"} <= set(secret)
    section = settings.collect(Place({**dict.fromkeys(secret, "xyz"), "HPCDIST_CHECK": "off"}))
    assert facts(section) == {"HPCDIST_CHECK": "off"}


def test_the_launchers_words_without_secrets():
    env = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    env |= {"PMI_SECURITY_KEY": "x", "PMI_FD": "7"}
    section = launcher.collect(Place(env))
    assert "hydra" in facts(section)["launcher"]
    assert {"PMI_RANK", "PMI_SIZE"} < set(facts(section))
    assert not {"PMI_SECURITY_KEY", "PMI_FD"} & set(facts(section))
    assert facts(launcher.collect(Place({}))) == {"launcher": "none"}
    assert only(launcher.collect(Place({**env, "PMI_RANK": "one"})))["severity"] == FAULT


def test_an_older_library_than_that_of_the_build():
    info = {"mpi_version": "Open MPI 5.0.1", "mpi_vendor": "Open MPI"}
    section = Section("build", "Build")
    build._compare(section, info, "Open MPI v5.0.3")
    assert section.findings == []
    build._compare(section, info, "Open MPI v4.1.6")
    assert "5.0.1 and runs on the older 4.1.6" in only(section)["what"]
    maps = "7f /usr/lib/libucp.so.0\n7f /opt/libfabric-1a2b.so.1\n7f /lib/libc.so.6"
    assert build.transports(maps) == ["fabric", "ucp"]


def test_gpus_from_proc(tmp_path):
    assert facts(gpu.collect(Place({}, tmp_path))) == {"GPUs": "none"}
    machine(tmp_path, {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200",
        "proc/driver/nvidia/gpus/0000:02:00.0/information": "Model: \t\t NVIDIA H200",
    })  # fmt: skip
    found = facts(gpu.collect(Place({}, tmp_path)))
    assert found["GPUs"] == "2: NVIDIA H200" and found["driver"] == "550.54.15"
    for setting, faults in (("-1", 0), ("NoDevFiles", 0), ("", 0), ("0,7", 1)):
        section = gpu.collect(Place({"CUDA_VISIBLE_DEVICES": setting}, tmp_path))
        said = [each for each in section.findings if "CUDA_VISIBLE_DEVICES" in each["what"]]
        assert len(said) == faults, setting


# --- the command ---------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not here")
sys.meta_path.insert(0, NoTorch())
from hpcdist.cli import main
sys.exit(main(["diagnose", "--no-run", *sys.argv[1:]]))
"""


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = ("SLURM_", "PMI", "OMPI_", "HPCDIST_", "OMP_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(words)}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        env=clean | env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_on_a_login_node_without_torch_and_without_starting_mpi():
    done = command("--json")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_status"] == int(not found["ok"])
    assert found["ranks"] == 1 and found["all_reduce"] is None
    values = {
        fact["name"]: fact["values"][0]["value"]
        for section in found["sections"]
        for fact in section["facts"]
    }
    assert values["run time: state"] == "none" and "run time: thread level" not in values
    assert {"hpcdist", "built with: MPI", "run time: libmpi", "cores of the rank", "GPUs",
            "CMA (process_vm_readv)", "adapters", "launcher"} <= set(values)  # fmt: skip


def test_a_fault_makes_the_exit_status_and_ranks_above_zero_say_it_on_standard_error():
    done = command(HPCDIST_CHECK="perhaps")
    assert done.returncode == 1 and "FAULT: HPCDIST_CHECK" in done.stdout
    done = command("--json", HPCDIST_CHECK="perhaps", PMI_RANK="1", PMI_SIZE="2")
    assert done.returncode == 1 and done.stdout == "" and "HPCDIST_CHECK" in done.stderr
