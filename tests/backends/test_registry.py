"""Backends and schemes of third parties, and what may be asked about backends."""

from __future__ import annotations

import inspect
import os
import sys
import warnings

import pytest
import torch
from worlds import SHORT, outcome, true_place, works

import hpcdist as dist
from hpcdist.backends import registry
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_queries():
    parallel_assert(dist.is_mpi_available() and dist.is_backend_available("MPI"))
    parallel_assert(dist.is_backend_available("cpu:mpi"))
    nothing = [dist.is_gloo_available(), dist.is_ucc_available(), dist.is_xccl_available()]
    parallel_assert(nothing == [False] * 3 and not dist.is_backend_available("gloo"))
    parallel_assert(not dist.is_backend_available("cpu:mpi,cuda:nccl") or dist.is_nccl_available())
    parallel_assert(dist.get_default_backend_for_device("cpu") == "mpi")
    parallel_assert(dist.get_default_backend_for_device(torch.device("cuda", 1)) == "nccl")
    with parallel_raises(ValueError, match="no default backend for device 'tpu'"):
        dist.get_default_backend_for_device("tpu")
    parallel_assert(dist.is_torchelastic_launched() == ("TORCHELASTIC_RUN_ID" in os.environ))
    defined = {op: dist.supports_complex(getattr(dist.ReduceOp, op)) for op in ("SUM", "MAX")}
    parallel_assert(defined == {"SUM": True, "MAX": False})
    parallel_assert(dist.supports_complex(dist.ReduceOp.PREMUL_SUM(2.0)))


def test_backend_is_an_enum_of_strings():
    parallel_assert(dist.Backend("MPI") == "mpi" == dist.Backend.MPI)
    parallel_assert(dist.Backend.UNDEFINED == "undefined")
    parallel_assert(dist.Backend("Other") == "other")
    parallel_assert(repr(dist.BackendConfig("cpu:mpi,cuda:nccl")) == "cpu:mpi,cuda:nccl")
    with parallel_raises(ValueError, match="must be a str"):
        dist.Backend(3)


def test_mpi_serves_gloo(no_world, caplog, monkeypatch):
    """Most scripts for torch on CPUs name it. One notice per job says what serves."""
    monkeypatch.setattr(registry, "_logged", False)
    with caplog.at_level("WARNING", logger="hpcdist"):
        dist.init_process_group("gloo", timeout=SHORT)
        sub = dist.new_group(backend="gloo")
        both = dist.new_group(backend="cpu:gloo")
    texts = [record.getMessage() for record in caplog.records if "gloo" in record.getMessage()]
    first = dist.get_rank() == 0
    parallel_assert(len(texts) == first, f"{texts}")
    parallel_assert(not first or "uses 'mpi'. Pass backend='mpi'" in texts[0], f"{texts}")
    names = [dist.get_backend(), dist.get_backend(sub), dist.get_backend(both)]
    parallel_assert(names == ["mpi", "mpi", "cpu:mpi"], f"{names}")
    for group in (None, sub, both):
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        parallel_assert(bool((x == dist.get_world_size()).all()), f"{x}")


def test_a_registered_gloo_is_used():
    parallel_assert(registry.substitute("cpu:gloo,cuda:nccl") == "cpu:mpi,cuda:nccl")
    parallel_assert(registry.substitute("cpu:mpi, cuda:gloo") == "cpu:mpi, cuda:mpi")
    parallel_assert(registry.substitute("gloo2") == "gloo2")
    dist.Backend._plugins["gloo"] = dist.Backend._plugins["mpi"]
    try:
        parallel_assert(registry.substitute("gloo") == "gloo")
    finally:
        del dist.Backend._plugins["gloo"]


def test_the_deprecated_alias_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = dist.reduce_op.SUM is dist.ReduceOp.SUM
    parallel_assert(same and [each.category for each in caught] == [FutureWarning])


def test_a_registered_backend(no_world):
    from hpcdist.backends.base import GroupBackend

    calls = []

    class Echo(GroupBackend):
        def all_reduce(self, tensor, op, async_op=False, **about):
            calls.append((op.name, async_op))

    def make(store, rank, world_size, timeout):
        calls.append((store, rank, world_size, timeout))
        return Echo(rank, world_size, timeout=timeout.total_seconds())

    if not dist.is_backend_available("echo"):
        dist.Backend.register_backend("echo", make, devices="cpu")
    else:
        dist.Backend._plugins["echo"] = dist.Backend._plugins["echo"]._replace(creator_fn=make)
    rank, size = true_place()
    dist.init_process_group("echo", timeout=SHORT)
    dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX)
    seen = (dist.get_backend(), dist.get_backend_config(), dist.get_rank(), dist.get_world_size())
    try:
        dist.broadcast(torch.ones(1), 0)
        text = ""
    except dist.DistBackendError as error:
        text = str(error)
    dist.destroy_process_group()
    dist.init_process_group(timeout=SHORT)
    parallel_assert(calls == [(None, rank, size, SHORT), ("MAX", False)], f"{calls}")
    parallel_assert(seen == ("echo", "cpu:echo", rank, size), f"{seen}")
    parallel_assert("does not offer broadcast" in text, text)
    parallel_assert(dist.Backend.ECHO == "echo" and dist.is_backend_available("echo"))
    with parallel_raises(ValueError, match="registered already"):
        dist.Backend.register_backend("Echo", make, devices="cpu")


def refusal_of(backend):
    """The TypeError of a start with a backend, after which the world is one over MPI."""
    try:
        dist.init_process_group(backend, timeout=SHORT)
        text = ""
    except TypeError as error:
        text = str(error)
    dist.init_process_group(timeout=SHORT)
    return text


def test_a_backend_that_does_not_take_what_the_interface_passes(no_world):
    from hpcdist.backends.base import GroupBackend

    class Narrow(GroupBackend):
        def all_gather(self, tensor_list, tensor, async_op=False):
            pass

    if not dist.is_backend_available("narrow"):

        def make(store, rank, world_size, timeout):
            return Narrow(rank, world_size)

        dist.Backend.register_backend("narrow", make, devices="cpu")
    text = refusal_of("narrow")
    parallel_assert("Narrow.all_gather must accept **about" in text, text)


def test_a_backend_that_is_of_another_class(no_world):
    class Stranger:
        def all_reduce(self, tensor, op, async_op=False, **about):
            pass

    if not dist.is_backend_available("stranger"):
        dist.Backend.register_backend("stranger", lambda *about: Stranger(), devices="cpu")
    text = refusal_of("stranger")
    parallel_assert("Stranger must be a hpcdist.backends.base.GroupBackend" in text, text)


def test_a_backends_class_is_checked_once(monkeypatch):
    """That takes longer than all else that makes a group."""
    dist.destroy_process_group(dist.new_group())
    looked, signature = [], inspect.signature
    with monkeypatch.context() as patch:
        patch.setattr(
            inspect, "signature", lambda method: (looked.append(method), signature(method))[1]
        )
        dist.destroy_process_group(dist.new_group())
    parallel_assert(not looked, f"{looked}")


def test_a_registered_scheme_and_the_mpi_backend(no_world, mpi_tmp_path):
    rank, size = true_place()
    schemes = sys.modules["hpcdist.startup.rendezvous.registry"]._handlers
    store = dist.FileStore(str(mpi_tmp_path / "store"), size)
    other = dist.FileStore(str(mpi_tmp_path / "other"), size)

    def meet(url, **kwargs):
        yield store, rank, size

    schemes["meet"] = meet
    try:
        text = outcome(init_method="meet://here")
        kept = dist.group.world.store._underlying_non_prefix_store is store
        fine = not text and works()
        dist.destroy_process_group()
        schemes["meet"] = lambda url, **kwargs: iter([(other, (rank + 1) % size, size)])
        wrong = outcome(init_method="meet://here") if size > 1 else f"this is rank {rank} of {size}"
    finally:
        del schemes["meet"]
    dist.init_process_group(timeout=SHORT)
    parallel_assert(fine and kept, text)
    parallel_assert(f"rank {rank} of {size}" in wrong, wrong)
