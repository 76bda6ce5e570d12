"""Environment variables of UCX, Open MPI, MPICH, NCCL and OpenMP that matter, each with its reason.

The one table of them: ``jobscripts/env/infiniband.sh`` sets those that have a value here, and
docs/diagnose.md lists all. Judged here is what one variable alone shows; devices are judged by the
InfiniBand section, threads by the section on cores.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcdist import config

from . import advice
from .section import FAULT, WARNING, Place, Section

#: Beginnings of variables that are shown when they are set, known to the table or not.
_FAMILIES = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_", "UCC_", "NCCL_", "MPICH_",
             "MPIR_CVAR_", "FI_", "I_MPI_", "HPCDIST_", "RDMAV_", "IBV_", "OMP_", "KMP_",
             "TORCH_NCCL_")  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One variable.

    Parameters
    ----------
    variable : str
        Its name.
    good : str
        What to set on InfiniBand; empty where unset is right.
    why : str
        The reason.
    bad : tuple of str
        Values that are flagged; compared without regard to case.
    severity : str
        How badly.
    """

    variable: str
    good: str
    why: str
    bad: tuple[str, ...] = ()
    severity: str = WARNING


SETTINGS = (
    Setting("OMPI_MCA_pml", "ucx", "Open MPI moves data through UCX; asked for by name, a "
            "fall-back to TCP becomes an error. ob1 has no InfiniBand.", ("ob1", "^ucx")),
    Setting("OMPI_MCA_osc", "ucx", "One-sided operations over UCX as well."),
    Setting("OMPI_MCA_coll_hcoll_enable", "", "HCOLL deadlocks between threads and has had wrong "
            "MIN. SHARP is reached through UCC: OMPI_MCA_coll_ucc_enable=1 with "
            "OMPI_MCA_coll_ucc_priority=100.", ("1", "true", "yes"), FAULT),
    Setting("OMPI_MCA_btl_vader_single_copy_mechanism", "", "Without single copy, messages within "
            "a node are copied twice.", ("none",)),
    Setting("OMPI_MCA_smsc", "", "Without single copy, messages within a node are copied twice.",
            ("^cma", "^cma,xpmem", "^xpmem,cma")),
    Setting("OMPI_MCA_mpi_yield_when_idle", "", "hpcdist sets it where ranks share cores; 0 keeps "
            "waiting ranks spinning on cores that others need."),
    Setting("UCX_NET_DEVICES", "", "UCX takes the adapter nearest to a bound rank by itself. Name "
            "one (mlx5_0:1) only where that goes wrong."),
    Setting("UCX_TLS", "", "A list without shm or self sends messages within a node over the "
            "network.", ("tcp", "rc", "ud", "dc", "tcp,self", "rc,self", "rc_x,self",
                         "dc_x,self", "ud_x,self")),
    Setting("UCX_MAX_RNDV_RAILS", "1", "With one adapter for each rank, several for one message "
            "get into each other's way."),
    Setting("UCX_MEM_MMAP_HOOK_MODE", "", "Without hooks UCX does not learn that memory was freed, "
            "and sends what lies there now.", ("none",), FAULT),
    Setting("RDMAV_FORK_SAFE", "1", "libibverbs marks registered pages, so that a fork does not "
            "exchange them under the adapter.", ("0",)),
    Setting("IBV_FORK_SAFE", "1", "The same under its other name.", ("0",)),
    Setting("MPICH_MAX_THREAD_SAFETY", "", "hpcdist needs MPI_THREAD_MULTIPLE.",
            ("single", "funneled", "serialized"), FAULT),
    Setting("NCCL_IB_HCA", "mlx5", "The adapters NCCL uses: all whose names begin so."),
    Setting("NCCL_IB_DISABLE", "", "NCCL without InfiniBand goes over TCP.", ("1",), FAULT),
    Setting("NCCL_P2P_DISABLE", "", "GPUs of a node talk through host memory.", ("1",)),
    Setting("NCCL_SHM_DISABLE", "", "Processes of a node talk over the network.", ("1",)),
    Setting("NCCL_SOCKET_IFNAME", "^lo,docker,virbr", "For first contact NCCL needs an interface "
            "that the other hosts reach.", ("lo", "docker0")),
    Setting("NCCL_NET_GDR_LEVEL", "PHB", "How far apart GPU and adapter may be to talk directly.",
            ("loc", "0")),
    Setting("NCCL_COLLNET_ENABLE", "", "1 lets NCCL reduce in the switches (SHARP), where its "
            "plugin is installed."),
    Setting("OMP_NUM_THREADS", "cores of the rank - 1", "One core of each rank is left to hpcdist, "
            "which moves data while the program computes."),
    Setting("OMP_PROC_BIND", "false", "OpenMP must not bind all ranks' threads to the first cores.",
            ("true", "close", "master", "primary", "spread")),
)  # fmt: skip


def collect(place: Place, family: str | None = None) -> Section:
    """What is set, and what of it is bad for this MPI.

    Parameters
    ----------
    place : Place
        The environment to read.
    family : str, optional
        The MPI implementation; by default that of this process.
    """
    section = Section("settings", "Settings")
    known = {setting.variable: setting for setting in SETTINGS}
    secret = {option.variable for option in config.options() if option.secret}
    for name in sorted(place.env):
        value = place.env[name]
        if not (name in known or name.startswith(_FAMILIES)):
            continue
        if name in secret or name.endswith("_KEY"):
            continue
        if name.startswith("OMPI_MCA_") and name not in known and _launchers_own(name):
            continue
        section.fact(name, value[:200], "rank" if name == "UCX_NET_DEVICES" else "job")
        setting = known.get(name)
        if setting and advice.is_of_another(name, family):
            continue
        if setting and value.strip().lower() in setting.bad:
            fix = f"export {name}={setting.good}" if setting.good else f"unset {name}"
            section.find(setting.severity, f"{name}={value}: {setting.why}", fix)
    if not section.facts:
        section.fact("set", "none that matters")
    _own(section, place)
    return section


def _launchers_own(name: str) -> bool:
    """What mpirun itself puts into the environment of its ranks."""
    parts = ("orte", "ess", "prte", "pmix", "initial_wdir", "_base_", "hwloc", "mpi_oversubscribe",
             "PREFIXES", "cpu_type", "num_procs")  # fmt: skip
    return any(part in name for part in parts)


def _own(section: Section, place: Place) -> None:
    """hpcdist's settings: bad values, and names that hpcdist does not read."""
    for variable, text in config.faults(place.env).items():
        section.find(FAULT, text, f"export {variable}=..., or unset {variable}")
    for variable, near in config.unread(place.env).items():
        fix = f"export {near}=..." if near else f"unset {variable}"
        section.find(WARNING, f"nothing reads {variable}", fix)
