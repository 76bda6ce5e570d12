"""Which GPU a rank takes and what is near it, from trees of /sys and /proc as nodes have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist import hardware
from hpcdist.cli.diagnose import gpu
from hpcdist.cli.diagnose.section import Place

pytestmark = pytest.mark.local

#: PCI paths of a DGX-like node: per socket one root with switches, a GPU and an adapter each.
GPUS = {
    "0000:1b:00.0": ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0"),
    "0000:43:00.0": ("pci0000:40", "0000:40:01.0", "0000:41:00.0", "0000:42:00.0"),
    "0000:9d:00.0": ("pci0000:97", "0000:97:01.0", "0000:98:00.0", "0000:99:00.0"),
}
ADAPTERS = {
    "mlx5_0": ("0000:18:00.0", ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:01.0")),
    "mlx5_1": ("0000:44:00.0", ("pci0000:40", "0000:40:03.0")),
    "mlx5_2": ("0000:45:00.0", ("pci0000:40", "0000:40:05.0")),
    "mlx5_3": ("0000:c1:00.0", ("pci0000:c0", "0000:c0:01.0")),
}
NODES = {"pci0000:15": 0, "pci0000:40": 0, "pci0000:97": 1, "pci0000:c0": 1}


def node(root: Path, driver: bool = True) -> Path:
    """A node with three GPUs and four adapters, as links and folders of sysfs."""
    for number, bus in enumerate(GPUS):
        folder = root.joinpath("sys/devices", *GPUS[bus], bus)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        (folder / "numa_node").write_text(f"{NODES[GPUS[bus][0]]}\n")
        link = root / "sys/bus/pci/devices" / bus
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        if driver:
            about = root / "proc/driver/nvidia/gpus" / bus / "information"
            about.parent.mkdir(parents=True)
            about.write_text(
                f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\nGPU UUID: \t GPU-{number}e2f-77\n"
            )
    for name, (bus, path) in ADAPTERS.items():
        folder = root.joinpath("sys/devices", *path, bus)
        (folder / "infiniband" / name).mkdir(parents=True)
        (folder / "numa_node").write_text(f"{NODES[path[0]]}\n")
        there = root / "sys/class/infiniband" / name
        there.mkdir(parents=True)
        (there / "device").symlink_to(folder)
    other = root / "sys/bus/pci/devices/0000:00:1f.0"  # no GPU
    other.mkdir(parents=True)
    (other / "vendor").write_text("0x8086\n")
    (other / "class").write_text("0x030000\n")
    return root


def test_gpus_and_their_places(tmp_path):
    assert hardware.gpus(tmp_path) == [] and hardware.adapters(tmp_path) == []
    found = hardware.gpus(node(tmp_path))
    assert [each.bus for each in found] == list(GPUS)
    assert [each.node for each in found] == [0, 0, 1]
    assert {each.model for each in found} == {"NVIDIA H200"}
    assert found[1].uuid == "GPU-1e2f-77"
    assert found[0].path == (*GPUS["0000:1b:00.0"], "0000:1b:00.0")


def test_gpus_without_a_driver(tmp_path):
    found = hardware.gpus(node(tmp_path, driver=False))
    assert [each.bus for each in found] == list(GPUS) and found[0].model == found[0].uuid == ""


@pytest.mark.parametrize(
    ("told", "numbers"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("GPU-2e2f,GPU-0e2f-77", [2, 0]),
        ("1,7,0", [1]),  # CUDA stops at what is not there
        ("-1", []),
        ("0,0", []),  # and takes nothing where one is named twice
        ("GPU-", []),  # means three
    ],
)
def test_what_cuda_visible_devices_leaves(tmp_path, told, numbers):
    there = hardware.gpus(node(tmp_path))
    env = {} if told is None else {"CUDA_VISIBLE_DEVICES": told}
    assert hardware.visible(there, env) == [there[each] for each in numbers]


def test_ranks_take_turns():
    assert [hardware.gpu_of(rank, 3) for rank in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="can see no GPU"):
        hardware.gpu_of(0, 0)


def test_the_nearest_adapter(tmp_path):
    node(tmp_path)
    there = hardware.adapters(tmp_path)
    assert [each.name for each in there] == list(ADAPTERS)
    near = [hardware.nearest(each, there) for each in hardware.gpus(tmp_path)]
    named = [([each.name for each in found], how) for found, how in near]
    assert named == [(["mlx5_0"], "PIX"), (["mlx5_1", "mlx5_2"], "PHB"), (["mlx5_3"], "NODE")]
    first = hardware.gpus(tmp_path)[0]
    assert hardware.nearest(first, there[3:])[1] == "SYS"
    assert hardware.nearest(first, []) == ([], "")
    nowhere = hardware.Adapter("mlx5_9", -1, ())
    assert hardware.nearest(first, [nowhere]) == ([], "")


# --- diagnose ------------------------------------------------------------------------------------


def look(root: Path, cpus: frozenset[int] = frozenset(), **env: str):
    section = gpu.collect(Place(env, root, cpus))
    return {each["name"]: each["value"] for each in section.facts}, section.findings


def test_diagnose_shows_the_gpu_of_a_rank(tmp_path):
    node(tmp_path)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version:  x  570.124.06  Tue\n")
    for number, cores in ((0, "0-3"), (1, "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    launch = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
              "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}  # fmt: skip
    facts, findings = look(tmp_path, frozenset({5}), **launch)
    assert facts["driver"] == "570.124.06" and facts["GPUs"] == "3: NVIDIA H200"
    assert facts["GPU of the rank"] == "cuda:2, 0000:9d:00.0" and facts["its NUMA node"] == 1
    assert facts["adapters nearest to it"] == "mlx5_3 (NODE)"
    assert facts["NVLink switches"] == 0 and facts["GDRCopy"] == "no"
    assert [each["severity"] for each in findings] == ["note"]  # no nvidia_peermem
    assert "nvidia_peermem" in findings[0]["fix"]
    (tmp_path / "sys/module/nvidia_peermem/parameters").mkdir(parents=True)
    facts, findings = look(tmp_path, frozenset({1}), **launch)
    assert facts["GPUDirect RDMA"] == "nvidia_peermem" and len(findings) == 1
    assert "on NUMA node 0, and its GPU is at node 1" in findings[0]["what"]


def test_diagnose_of_bad_lists_and_shared_gpus(tmp_path):
    node(tmp_path)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version:  x  570.124.06  Tue\n")
    (tmp_path / "sys/module/nvidia_peermem/parameters").mkdir(parents=True)
    _, findings = look(tmp_path, CUDA_VISIBLE_DEVICES="0,1,5")
    assert findings[0]["severity"] == "fault" and "takes 2 of this host's 3" in findings[0]["what"]
    launch = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
              "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}  # fmt: skip
    facts, findings = look(tmp_path, **launch)
    assert facts["GPU of the rank"].startswith("cuda:0")
    assert "4 ranks of this host share 3 GPUs" in findings[0]["what"]
    assert look(tmp_path, CUDA_VISIBLE_DEVICES="1", **launch)[1] == []  # the launcher's doing


def test_diagnose_of_gpus_without_a_driver(tmp_path):
    facts, findings = look(node(tmp_path, driver=False))
    assert facts["driver"] == "none" and facts["GPUs"] == "3: unknown"
    assert findings[0]["severity"] == "fault" and "docker run --gpus all" in findings[0]["fix"]


@pytest.mark.parametrize(
    ("cgroup", "files", "cores", "group"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5, ""),
        ("0::/", {"cpu.max": "max 100000"}, None, ""),
        ("0::/", {"cpu.max": "nonsense"}, None, ""),
        ("0::/", {"cpu.max": "1000 0"}, None, ""),
        ("0::/", {}, None, ""),
        ("", {"cpu.max": "150000 100000"}, None, ""),
        # a batch system limits the job, and the step within it more or not at all
        ("0::/job/step", {"job/cpu.max": "400000 100000"}, 4.0, "job"),
        (
            "0::/job/step",
            {"job/cpu.max": "400000 100000", "job/step/cpu.max": "200000 100000"},
            2.0,
            "job/step",
        ),
        # inside a container: the path is the host's, the mount the container's
        ("0::/docker/77", {"cpu.max": "300000 100000"}, 3.0, ""),
        (
            "4:memory:/x\n3:cpu,cpuacct:/job\n0::/",
            {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "100000"},
            2.5,
            "cpu/job",
        ),
        (
            "3:cpu:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
            "",
        ),
    ],
)
def test_what_the_control_group_grants(tmp_path, cgroup, files, cores, group):
    top = tmp_path / "sys/fs/cgroup"
    for name, text in {"README": "", **files}.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text + "\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    expected = cores and (cores, (top / group).stat().st_ino)
    assert hardware.cpu_quota(tmp_path) == expected
