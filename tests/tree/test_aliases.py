"""The module paths of torch.distributed, and those of older releases, lead to the same objects."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hpcdist

pytestmark = pytest.mark.local

#: Torch's modules whose public names are below hpcdist at the same path.
PATHS = (
    "algorithms.ddp_comm_hooks",
    "algorithms.ddp_comm_hooks.ddp_zero_hook",
    "algorithms.ddp_comm_hooks.debugging_hooks",
    "algorithms.ddp_comm_hooks.default_hooks",
    "algorithms.ddp_comm_hooks.optimizer_overlap_hooks",
    "algorithms.ddp_comm_hooks.post_localSGD_hook",
    "algorithms.ddp_comm_hooks.powerSGD_hook",
    "algorithms.ddp_comm_hooks.quantization_hooks",
    "algorithms.join",
    "algorithms.model_averaging.averagers",
    "algorithms.model_averaging.hierarchical_model_averager",
    "algorithms.model_averaging.utils",
    "device_mesh",
    "distributed_c10d",
    "rendezvous",
)


@pytest.mark.parametrize("path", PATHS)
def test_the_names_of_torchs_module_are_hpcdists(path):
    ours = importlib.import_module(f"hpcdist.{path}")
    theirs = importlib.import_module(f"torch.distributed.{path}")
    assert ours.__all__
    for name in ours.__all__:
        mine = getattr(ours, name)
        assert getattr(mine, "__module__", "hpcdist").startswith(("hpcdist", "numpy")), name
        if path.startswith("algorithms"):
            assert hasattr(theirs, name), f"torch.distributed.{path} has no {name}"


def test_the_function_survives_the_import_of_the_module_of_its_name():
    """Python puts a module that is imported late in the place of the function."""
    program = "import hpcdist; import hpcdist.rendezvous; assert callable(hpcdist.rendezvous)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_modules_are_attributes_without_an_import_of_their_own():
    """As those of torch.distributed, which imports them itself."""
    program = """
import hpcdist as dist
dist.distributed_c10d._get_default_group, dist.device_mesh.init_device_mesh
dist.algorithms, dist.nn, dist.optim
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_group_is_the_state_of_the_groups():
    from hpcdist import distributed_c10d
    from hpcdist.groups import state

    assert importlib.import_module("hpcdist.group") is state is hpcdist.group
    assert hpcdist.group.WORLD is distributed_c10d.group.WORLD


def test_a_mesh_is_one_class_everywhere():
    from hpcdist import device_mesh, mesh

    assert device_mesh.DeviceMesh is mesh.DeviceMesh is hpcdist.DeviceMesh
