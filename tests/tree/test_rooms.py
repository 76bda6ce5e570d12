"""Each module has tests where its name leads, and each file of tests says how it is run."""

from __future__ import annotations

import subprocess
import sys

import kinds
import pytest
from places import ROOT, TESTS

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

#: Modules and folders of hpcdist/ -> the file for those in them that have none of their own name.
#: The longest row that fits counts.
SHARED = {
    "_device_options": "test_config.py",
    "_store_options": "test_config.py",
    "_dump_files": "recordings/test_dumps.py",
    "_environment": "test_loader.py",
    "_intel": "test_loader.py",
    "_loader_texts": "test_loader.py",
    "_option": "test_config.py",
    "algorithms": "tree/test_aliases.py",
    "backends": "backends/test_registry.py",
    "backends/aliasing": "backends/nccl/test_aliasing.py",
    "backends/cuda": "backends/cuda_over_mpi/test_operations.py",
    "backends/cuda_over_mpi": "backends/cuda_over_mpi/test_operations.py",
    "backends/nccl": "backends/nccl/test_group.py",
    "cli/analyze": "cli/test_analyze.py",
    "cli/attach": "debug/test_breakpoints.py",
    "cli/bench": "cli/test_bench.py",
    "cli/diagnose": "cli/test_diagnose.py",
    "cli/launch": "launchers/test_commands.py",
    "cli/top": "recordings/test_top.py",
    "codec": "codec/test_codec.py",
    "groups/windows": "groups/windows/test_window.py",
    "groups/rooted": "collectives/test_gather.py",
    "collectives/deprecated": "collectives/test_reduce.py",
    "collectives/objects_p2p": "collectives/test_objects.py",
    "debug/server": "debug/test_server.py",
    "debug/standard_input": "debug/test_breakpoints.py",
    "device_mesh": "tree/test_aliases.py",
    "distributed_c10d": "tree/test_aliases.py",
    "dtypes": "kernels/test_ops.py",
    "flight_recorder": "backends/nccl/test_recording.py",
    "group": "tree/test_aliases.py",
    "groups": "groups/test_groups.py",
    "groups/comparison": "parallel/ddp/test_faults.py",
    "groups/dropped": "groups/test_new_group.py",
    "groups/subgroups": "groups/test_new_group.py",
    "groups/shrink": "backends/nccl/test_derive.py",
    "launchers": "launchers/test_launchers.py",
    "launchers/batch": "launchers/test_commands.py",
    "launchers/pmi": "launchers/test_pmi.py",
    "log": "startup/test_alone.py",
    "profiler_events": "engine/test_profiler_events.py",
    "elastic": "elastic/test_elastic.py",
    "elastic/batch": "elastic/test_shares.py",
    "recordings": "recordings/test_read.py",
    "recordings/analysis": "cli/test_analyze.py",
    "mesh": "mesh/test_device_mesh.py",
    "nn": "nn/test_functional.py",
    "optim/post_local_sgd": "parallel/test_averaging.py",
    "parallel/comm_hooks": "parallel/test_comm_hooks.py",
    "parallel/ddp": "parallel/ddp/test_features.py",
    "parallel/ddp/arguments": "parallel/ddp/test_faults.py",
    "parallel/ddp/settings": "parallel/ddp/test_extras.py",
    "parallel/ddp/shares": "elastic/test_turns.py",
    "parallel/describe": "parallel/ddp/test_faults.py",
    "parallel/optimizer_state": "elastic/test_optimizers.py",
    "parallel/zero_arguments": "parallel/test_zero.py",
    "typing": "types/public_api.py",
    "parallel/reducer": "parallel/ddp/test_ddp.py",
    "parallel/reducer/failure": "parallel/ddp/test_faults.py",
    "parallel/reducer/grad_bucket": "parallel/comm_hooks/test_register.py",
    "parallel/reducer/bounded": "parallel/comm_hooks/test_register.py",
    "parallel/reducer/results": "parallel/comm_hooks/test_wrappers.py",
    "parallel/reducer/graph": "parallel/reducer/test_unused.py",
    "parallel/reducer/stats": "parallel/ddp/test_extras.py",
    "parallel/reducer/streams": "backends/nccl/test_training.py",
    "parallel/reducer/texts": "parallel/ddp/test_faults.py",
    "parallel/reducer/transfer": "parallel/reducer/test_pieces.py",
    "parallel/sync": "parallel/ddp/test_module.py",
    "parallel/host": "parallel/test_zero.py",
    "rendezvous": "tree/test_aliases.py",
    "startup": "startup/test_init.py",
    "startup/rendezvous": "startup/test_rendezvous.py",
    "startup/spawn": "startup/test_without_launcher.py",
    "store": "store/test_base.py",
    "store/_files": "store/test_file.py",
    "store/_journal": "store/test_file.py",
    "store/_locks": "store/test_file.py",
    "store/_net": "store/test_tcp.py",
    "store/_peer": "store/test_tcp.py",
    "store/_shared_file": "store/test_file.py",
    "torch": "torch/test_bridge.py",
}
#: Modules that no file of tests is about, and why.
UNTESTED = {
    "errors": "definitions only; the test of what raises an error is the test of the error",
}
MODULES = [
    path.relative_to(ROOT / "hpcdist").with_suffix("").as_posix()
    for path in sorted((ROOT / "hpcdist").rglob("*.py"))
    if not path.name.startswith("__") and path.name != "_build_info.py"
]


def own_file(module: str) -> str:
    """Return the file that a module's name leads to: ``codec/_reader`` to codec/test_reader.py."""
    folder, _, name = module.rpartition("/")
    return f"{folder}/test_{name.lstrip('_')}.py".lstrip("/")


def row_of(module: str) -> str | None:
    """Return the longest row of SHARED that fits a module."""
    fitting = [row for row in SHARED if module == row or module.startswith(f"{row}/")]
    return max(fitting, key=len, default=None)


@pytest.mark.parametrize("module", MODULES)
def test_its_name_leads_to_its_tests(module):
    assert (TESTS / own_file(module)).exists() or row_of(module) or module in UNTESTED, (
        f"hpcdist/{module}.py has no tests in tests/{own_file(module)}: write them there, or name "
        "the file that has them in SHARED of tests/tree/test_rooms.py"
    )


def test_the_table_is_true():
    shared = {module for module in MODULES if not (TESTS / own_file(module)).exists()}
    used = {row_of(module) for module in shared}
    for row, file in SHARED.items():
        assert row in used, f"{row}: no module needs this row"
        assert (TESTS / file).exists(), f"{row}: there is no tests/{file}"
    assert set(UNTESTED) <= shared - {module for module in MODULES if row_of(module)}


@pytest.mark.parametrize("path", kinds.find(), ids=lambda path: str(path.relative_to(TESTS)))
def test_each_file_has_one_kind(path):
    kind, marks = kinds.kind(path), kinds.marks(path)
    by_hand = kind == "by_hand"
    assert not by_hand or path.parent.name in ("browser", "gpu"), "what no machine of CI has"
    assert "any_mpi" not in marks or kind in ("local", "jobs"), "ranks always test their MPI"


def test_a_file_without_a_kind_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "TESTS", tmp_path)
    file = tmp_path / "test_it.py"
    for text, found in [("", 0), ("pytestmark = [pytest.mark.local, pytest.mark.jobs]\n", 2)]:
        file.write_text(text)
        with pytest.raises(ValueError, match=f"test_it.py: its pytestmark names {found} kinds"):
            kinds.kind(file)


@pytest.mark.parametrize("program", ["run.py", "reliability.py", "chaos.py", "matrix.py"])
def test_a_program_of_the_tests_starts(program):
    command = [sys.executable, str(TESTS / program), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
