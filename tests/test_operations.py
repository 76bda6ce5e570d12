"""The table of operations: its places and names are those of the methods that it describes."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as td

from hpcdist.backends.base import GroupBackend
from hpcdist.backends.carrier import Carrier
from hpcdist.operations import OPERATIONS, TRACED_AS, Operation
from hpcdist.torch.process_group import BridgeGroup

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

#: Names of parameters, by the field that has their place.
NAMES = {
    "op": {"op"},
    "root": {"root", "dst", "src"},
    "asynchronous": {"async_op"},
}


@pytest.mark.parametrize("kind", [GroupBackend, Carrier])
@pytest.mark.parametrize("about", OPERATIONS.values(), ids=lambda about: about.name)
def test_places_are_those_of_the_interface(about: Operation, kind: type) -> None:
    found = list(inspect.signature(getattr(kind, about.name)).parameters)[1:]
    for field, names in NAMES.items():
        wanted = next((place for place, name in enumerate(found) if name in names), None)
        assert getattr(about, field) == wanted, f"{about.name}: {field}, of {found}"
    tensors = {about.inputs, about.outputs, about.serves} - {None}
    others = {found.index(name) for names in NAMES.values() for name in names if name in found}
    assert not tensors & others and max(tensors, default=0) <= 1
    assert (about.serves is None) is (not tensors)


def test_every_operation_of_the_interface_has_a_row() -> None:
    other = {"create_group", "free", "share", "place", "refuse"}
    theirs = {name for name, member in vars(GroupBackend).items() if inspect.isfunction(member)}
    assert {name for name in theirs if not name.startswith("_")} - other == set(OPERATIONS)


@pytest.mark.parametrize("about", OPERATIONS.values(), ids=lambda about: about.name)
def test_torch_knows_the_names(about: Operation) -> None:
    assert callable(getattr(BridgeGroup, about.c10d))
    assert {about.c10d, about.c10d_before} & set(vars(td.ProcessGroup))
    assert about.title in OPERATIONS or about.title in ("send", "recv")
    assert TRACED_AS.get(about.name, about.name) == (about.traced or about.title)
