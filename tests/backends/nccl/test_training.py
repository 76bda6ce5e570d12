"""Training over NCCL, on the stand-in: what the same training gives over MPI.

The stand-in's runtime is in lockstep with the host, because autograd's own operations run there.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import standin
import torch
from standin import to_gpu
from torch import nn

import hpcdist as dist
import hpcdist.nn.functional as F
from hpcdist.backends import cuda
from hpcdist.backends.nccl import group, movements, reductions, tensors
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import SyncBatchNorm, comm_hooks
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.standin

BOTH = "cpu:mpi,cuda:nccl"
DDP = dist.DistributedDataParallel


@pytest.fixture(scope="module", autouse=True)
def _lockstep(runtime):
    cuda.use(standin.Runtime(lockstep=True))
    with standin.training():
        yield


def start(backend: str) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, timeout=timedelta(seconds=20))


class Net(nn.Module):
    """Some of everything: normalisation with buffers, a layer that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh())
        self.spare = nn.Linear(40, 40)
        self.head = nn.Linear(40, 3)

    def forward(self, x, spare=False):
        x = self.body(x)
        return self.head(self.spare(x) if spare else x)


def draw(rng, steps=3):
    size = (steps, dist.get_world_size(), 8, 6)
    return torch.from_numpy(rng.standard_normal(size)).float()[:, dist.get_rank()]


def train(net, optimizer, data, spare):
    for step, x in enumerate(data):
        optimizer.zero_grad()
        net(x, spare(step)).square().mean().backward()
        optimizer.step()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def apart(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


@pytest.fixture
def _gradients(monkeypatch):
    """Take autograd's ordinary tensors for tensors of the GPU, where a test's gradients move."""

    def taken(tensor):
        return tensor.as_subclass(standin.FakeCuda) if isinstance(tensor, torch.Tensor) else tensor

    region = tensors.region
    for module in (movements, reductions):
        monkeypatch.setattr(module, "region", lambda tensor, *rest: region(taken(tensor), *rest))

    class Taking(group.SingleCalls):
        """Of the groups that the test makes."""

    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
        call = getattr(group.SingleCalls, name)

        def taking(self, *args, call=call, **about):
            return call(self, *map(taken, args), **about)

        setattr(Taking, name, taking)
    monkeypatch.setattr(group, "SingleCalls", Taking)


WAYS = {
    "plain": ({}, None),
    "views": ({"gradient_as_bucket_view": True}, None),
    "unused": ({"find_unused_parameters": True, "bucket_cap_mb": 0.001}, None),
    "static": ({"static_graph": True, "bucket_cap_mb": 0.001}, None),
    "bf16": ({}, comm_hooks.bf16_compress_hook),
    "int8": ({}, comm_hooks.quantization_pertensor_hook),
    "powersgd": ({}, comm_hooks.powerSGD_hook),
}


def spare(way: str, step: int) -> bool:
    """Whether this rank uses the layer that is not always used."""
    if way == "unused":
        return step % 2 == dist.get_rank() % 2
    return way != "static"


def wrapped(net, way, **more):
    arguments, hook = WAYS[way]
    made = DDP(net, **arguments, **more)
    if hook is comm_hooks.powerSGD_hook:
        state = comm_hooks.PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=2)
        made.register_comm_hook(state, hook)
    elif hook is not None:
        made.register_comm_hook(None, hook)
    return made


@pytest.mark.parametrize("backend", [BOTH, "nccl"])
def test_ddp_gives_what_it_gives_over_mpi(backend, rng):
    data = {way: draw(rng) for way in WAYS}

    def trained(way, place, **more):
        net = place(Net())
        made = wrapped(net, way, **more)
        with made.no_sync():
            made(data[way][0], spare(way, 0)).mean().backward()
        train(made, sgd(net.parameters()), data[way], lambda step: spare(way, step))
        return net

    start("mpi")
    wanted = {way: trained(way, lambda net: net) for way in WAYS}
    start(backend)
    off = {way: apart(wanted[way], trained(way, to_gpu, device_ids=[0])) for way in WAYS}
    # halves are added up in another order; everything else is the same to float32's rounding
    bound = {"bf16": 1e-3}
    parallel_assert(all(off[way] <= bound.get(way, 1e-6) for way in off), lambda: str(off))


def test_uneven_inputs_and_sparse_gradients(rng, _gradients):
    counts = [2 + rank % 2 for rank in range(dist.get_world_size())]
    rows = torch.from_numpy(rng.integers(0, 30, (3, 4)))

    def trained(place):
        torch.manual_seed(1)
        embedding = place(nn.Embedding(30, 5, sparse=True))
        made = DDP(embedding)
        made((rows + dist.get_rank()) % 30).square().sum().backward()
        gradient = embedding.weight.grad.coalesce().to_dense()
        torch.manual_seed(2)
        net = place(nn.Linear(4, 2))
        made = DDP(net)
        optimizer = sgd(net.parameters())
        with made.join():
            for step in range(counts[dist.get_rank()]):
                optimizer.zero_grad()
                made(torch.full((2, 4), 1.0 + step)).square().sum().backward()
                optimizer.step()
        return [gradient, *(p.detach() for p in net.parameters())]

    start("mpi")
    wanted = trained(lambda net: net)
    for backend in (BOTH, "nccl"):
        start(backend)
        found = trained(to_gpu)
        off = [(a - b).abs().max().item() for a, b in zip(wanted, found, strict=True)]
        parallel_assert(max(off) <= 1e-6, lambda off=off: str(off))


def test_sharded_optimizer_normalisation_and_functional(rng, _gradients):
    data = draw(rng)
    size, rank = dist.get_world_size(), dist.get_rank()

    def trained(place, kind):
        net = place(SyncBatchNorm.convert_sync_batchnorm(Net()))
        made = DDP(net)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.05)
        train(made, optimizer, data, lambda step: True)
        # a layer that is sharded as FSDP does: gathered in forward, reduced and cut in backward
        torch.manual_seed(7)
        shard = place(nn.ParameterList([torch.randn(6 * size, 4)[6 * rank : 6 * rank + 6]]))[0]
        mesh = dist.init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
        place(nn.Identity())
        whole = torch.zeros(6 * size, 4, device=shard.device)
        whole = F.all_gather_single(whole, shard, group=mesh.get_group("shard"))
        loss = (data[0] @ whole[:6]).square().mean()
        F.all_reduce(loss, group=mesh.get_group("shard")).backward()
        return [*(p.detach() for p in net.parameters()), *net.buffers(), shard.grad]

    start("mpi")
    wanted = trained(lambda net: net, "cpu")
    start("nccl")
    found = trained(to_gpu, "cuda")
    # the two backends add in orders of their own: a few roundings of the largest value
    off = [
        ((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item()
        for a, b in zip(wanted, found, strict=True)
    ]
    parallel_assert(max(off) <= 1e-6, lambda: str(off))


def test_gradients_reduce_while_backward_runs(rng):
    start("nccl")
    net = to_gpu(nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 3)))
    made = DDP(net, bucket_cap_mb=0)
    seen = []

    def before_the_last_gradient(gradient):
        work = made.reducer.buckets[0].work
        end = time.monotonic() + 10.0
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.001)
        seen.append(work.is_success())

    net[0].weight.register_hook(before_the_last_gradient)
    made(draw(rng)[0]).sum().backward()
    parallel_assert(seen == [True], lambda: "the first bucket waited for the end of backward")


def test_a_gradient_from_another_stream_is_waited_for():
    start("nccl")
    size = dist.get_world_size()
    side = standin.Stream()
    torch.manual_seed(0)
    net = to_gpu(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)))
    late = torch.full((1, 2), dist.get_rank() + 1.0)

    def on_the_side(parameter):
        # as if its forward had run there: the gradient is written only after a while
        place = parameter.grad
        side.kernel(0.1, place.data_ptr(), late.data_ptr(), late.nbytes)
        standin.Runtime._local.stream = side

    def back(parameter):
        standin.Runtime._local.stream = None

    net[1].weight.register_post_accumulate_grad_hook(on_the_side)
    net[0].weight.register_post_accumulate_grad_hook(back)
    made = DDP(net)
    made(torch.ones(1, 2)).sum().backward()
    found = net[1].weight.grad
    parallel_assert(bool((found == (size + 1) / 2).all()), lambda: str(found))
