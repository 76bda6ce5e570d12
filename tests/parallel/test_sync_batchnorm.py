"""SyncBatchNorm: against an ordinary batch normalisation that sees all ranks' batches.

Torch's own refuses CPU tensors, so there is no run over gloo to compare with.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hpcdist as dist
from hpcdist.nn import functional
from hpcdist.parallel import SyncBatchNorm
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def close(left, right, tolerance):
    return (left - right).abs().max().item() <= tolerance if left.numel() else True


def ours_and_reference(channels, dtype=torch.float64, **options):
    torch.manual_seed(2)
    mine = SyncBatchNorm(channels, dtype=dtype, **options)
    reference = nn.BatchNorm2d(channels, dtype=dtype, **options)
    if mine.affine:
        with torch.no_grad():
            mine.weight.copy_(torch.rand(channels) + 0.5)
            mine.bias.copy_(torch.randn(channels))
    reference.load_state_dict(mine.state_dict())
    return mine, reference


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False, "track_running_stats": False}], ids=str
)
def test_same_as_the_whole_batch(rng, options, uneven):
    size, me = dist.get_world_size(), dist.get_rank()
    counts = [3 + 2 * (r % 3) if uneven else 3 for r in range(size)]
    if uneven and size > 1:
        counts[-1] = 0  # a rank may have nothing at all
    mine, reference = ours_and_reference(4, **options)
    for _ in range(3):
        whole = torch.from_numpy(rng.standard_normal((sum(counts), 4, 5, 2)) * 3 + 7)
        weight = torch.from_numpy(rng.standard_normal(whole.shape))
        x, own_weight = whole.split(counts)[me].clone().requires_grad_(), weight.split(counts)[me]
        full = whole.clone().requires_grad_()
        for module in (mine, reference):
            module.zero_grad()
        out, wanted = mine(x), reference(full)
        (out.square() * own_weight).sum().backward()
        (wanted.square() * weight).sum().backward()
        parallel_assert(close(out, wanted.split(counts)[me], 1e-10))
        parallel_assert(close(x.grad, full.grad.split(counts)[me], 1e-9))
        if mine.affine:
            for name in ("weight", "bias"):
                summed = getattr(mine, name).grad.clone()
                dist.all_reduce(summed)  # what DDP does to the parts
                parallel_assert(close(summed, getattr(reference, name).grad, 1e-9))
    for name, buffer in mine.named_buffers():
        parallel_assert(close(buffer, getattr(reference, name), 1e-10), name)
    mine.eval(), reference.eval()
    parallel_assert(close(mine(whole), reference(whole), 1e-10), "evaluation")


def test_without_a_bias(rng):
    """As torch 2.13 has it, also converted; older ones know no such argument."""
    torch.manual_seed(2)
    plain = nn.BatchNorm1d(4, dtype=torch.float64)
    plain.register_parameter("bias", None)
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
    made = SyncBatchNorm(4, dtype=torch.float64, bias=False)
    made.load_state_dict(plain.state_dict())
    size, me = dist.get_world_size(), dist.get_rank()
    whole = torch.from_numpy(rng.standard_normal((3 * size, 4)))
    full = whole.clone().requires_grad_()
    wanted = plain(full)
    wanted.pow(3).sum().backward()
    reference = plain.weight.grad.clone()
    for module in (made, SyncBatchNorm.convert_sync_batchnorm(plain)):
        module.zero_grad()
        x = whole.chunk(size)[me].clone().requires_grad_()
        out = module(x)
        out.pow(3).sum().backward()
        summed = module.weight.grad.clone()
        dist.all_reduce(summed)
        parallel_assert(module.bias is None and set(dict(module.named_parameters())) == {"weight"})
        parallel_assert(close(out, wanted.chunk(size)[me], 1e-10))
        parallel_assert(close(x.grad, full.grad.chunk(size)[me], 1e-9))
        parallel_assert(close(summed, reference, 1e-9))


@pytest.mark.parametrize("power", [1, 3], ids=["linear", "cubic"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_gradients_of_gradients(rng, affine, power):
    """A gradient penalty counted as a constant, without an error if the loss was linear."""
    size, me = dist.get_world_size(), dist.get_rank()
    counts = [3 + 2 * (r % 2) for r in range(size)]
    if size > 1:
        counts[-1] = 0  # a rank may have nothing at all
    mine, plain = ours_and_reference(4, affine=affine)

    def reference(batch):  # torch's layer takes the statistics as constant in third derivatives
        var, mean = torch.var_mean(batch, (0, 2, 3), correction=0, keepdim=True)
        normal = (batch - mean) / (var + plain.eps).sqrt()
        return normal * plain.weight.view(4, 1, 1) + plain.bias.view(4, 1, 1) if affine else normal

    whole, weight = torch.from_numpy(rng.standard_normal((2, sum(counts), 4, 3, 2)))
    full = whole.clone().requires_grad_()
    x = whole.split(counts)[me].clone().requires_grad_()
    found = []
    for forward, layer, batch, part in (
        (mine, mine, x, weight.split(counts)[me]),
        (reference, plain, full, weight),
    ):
        wanted = [batch, *layer.parameters()]
        loss = (forward(batch).pow(power) * part).sum()
        orders = []
        for _ in range(3 if size > 1 else 2):  # alone it is torch's layer
            gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            orders.append([None if g is None else g.detach() for g in gradients])
            loss = (gradients[0].pow(2) * part).sum()
        found.append(orders)
    for order, (ours, theirs) in enumerate(zip(*found, strict=True), 1):
        scale = max(1.0, theirs[0].abs().max().item())
        own = theirs[0].split(counts)[me]
        parallel_assert(close(ours[0] / scale, own / scale, 1e-8), f"the input, order {order}")
        if affine:
            summed = ours[1].clone()
            dist.all_reduce(summed)
            parallel_assert(close(summed / scale, theirs[1] / scale, 1e-8), f"order {order}")


def test_strides_and_halves(rng):
    x = torch.from_numpy(rng.standard_normal((4, 3, 5, 5))).float()
    plain = nn.BatchNorm2d(3)
    for made in (
        x.to(memory_format=torch.channels_last),
        x.transpose(2, 3),
        x.bfloat16(),
        x[:, :, 0, 0],
    ):
        module = SyncBatchNorm(3)
        made = made.clone(memory_format=torch.preserve_format).requires_grad_()
        out = module(made)
        out.float().square().sum().backward()
        wanted = plain(made.detach().float().reshape(made.shape[0], 3, -1, 1)).reshape(made.shape)
        limit = 0.05 if made.dtype == torch.bfloat16 else 1e-5
        parallel_assert(out.dtype == made.dtype and close(out.float(), wanted, limit))
        parallel_assert(made.grad.dtype == made.dtype and made.grad.isfinite().all())


def test_in_ddp_it_trains_what_one_process_trains(rng):
    size, me = dist.get_world_size(), dist.get_rank()

    def network():
        torch.manual_seed(5)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(),
                             nn.Linear(64, 1)).double()  # fmt: skip

    alone = network()
    model = dist.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(network()))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for _ in range(4):
        x = torch.from_numpy(rng.standard_normal((4 * size, 1, 6, 6)))
        for module, optimizer, part in zip(
            (alone, model), optimizers, (x, x.chunk(size)[me]), strict=True
        ):
            optimizer.zero_grad()
            module(part).square().mean().backward()
            optimizer.step()
    off = max(
        (a - b).abs().max().item()
        for a, b in zip(
            alone.state_dict().values(), model.module.state_dict().values(), strict=True
        )
    )
    parallel_assert(off < 1e-10, lambda: f"off by {off}")


def test_convert():
    model = nn.ModuleDict(
        {
            "a": nn.BatchNorm1d(2, affine=False),
            "b": nn.Sequential(nn.BatchNorm3d(3)),
            "c": nn.ReLU(),
        }
    ).eval()
    inner = model["b"][0]
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    parallel_assert(converted is model and type(model["a"]) is type(model["b"][0]) is SyncBatchNorm)
    parallel_assert(model["b"][0].weight is inner.weight and not model["b"][0].training)
    parallel_assert(model["b"][0].running_var is inner.running_var and model["a"].weight is None)
    parallel_assert(isinstance(SyncBatchNorm.convert_sync_batchnorm(inner), nn.SyncBatchNorm))


def test_convert_a_lazy_layer():
    """Its parameters were taken over before they were there, and forward failed."""
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.LazyBatchNorm1d()))
    with parallel_raises(ValueError, match=r"1\.0 is a LazyBatchNorm1d that has seen no batch"):
        SyncBatchNorm.convert_sync_batchnorm(module)
    parallel_assert(not isinstance(module[0], SyncBatchNorm), "the first layer was converted")
    with parallel_raises(ValueError, match="the module is a LazyBatchNorm2d"):
        SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm2d())
    module(torch.ones(2, 3))
    converted = SyncBatchNorm.convert_sync_batchnorm(module)
    parallel_assert(isinstance(converted[1][0], SyncBatchNorm))
    converted(torch.ones(2, 3)).sum().backward()


def test_a_bias_without_a_weight_is_trained(rng):
    """DDP called it unused, and without DDP nothing was said."""
    size, me = dist.get_world_size(), dist.get_rank()
    whole = torch.from_numpy(rng.standard_normal((2 * size, 3, 2, 2)))
    mine, reference = ours_and_reference(3)
    if size > 1:  # alone it is torch's layer, which takes no other dtype than the input's
        mine.bias.data = mine.bias.data.float()
    mine.weight = reference.weight = None
    converted = SyncBatchNorm.convert_sync_batchnorm(ours_and_reference(3)[1])
    converted.weight = None
    reference(whole).square().sum().backward()
    for layer in (mine, converted):
        layer(whole.split(2)[me]).square().sum().backward()
        summed = layer.bias.grad.clone()
        dist.all_reduce(summed)
        parallel_assert(layer.bias.grad.dtype == layer.bias.dtype)
        parallel_assert(close(summed, reference.bias.grad, 1e-4), lambda s=summed: f"{s}")
        layer.bias.requires_grad_(False)
        layer(whole.split(2)[me].requires_grad_()).sum().backward()


def test_convert_a_layer_that_has_several_names():
    """A second name kept the plain layer, which normalises each rank by itself."""
    norm, twice = nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3))
    model = nn.Sequential(norm, nn.ReLU(), norm, twice, nn.ModuleDict({"a": twice, "b": norm}))
    model.other = model[3]
    model.nothing = None
    model.register_module("none", None)
    SyncBatchNorm.convert_sync_batchnorm(model)
    layers = [model[0], model[2], model[3][0], model[4]["a"][0], model[4]["b"], model.other[0]]
    parallel_assert(all(type(layer) is SyncBatchNorm for layer in layers), lambda: f"{model}")
    parallel_assert(layers[0] is layers[1] is layers[4] and layers[2] is layers[3] is layers[5])
    x = torch.arange(6.0).view(2, 3) * (1 + dist.get_rank())
    model[:3](x).sum().backward()
    parallel_assert(model[0].num_batches_tracked.item() == 2)


def test_wrong_use():
    with parallel_raises(ValueError, match="at least one channel"):
        SyncBatchNorm(0)(torch.ones(2, 0, 3))
    with parallel_raises(ValueError, match="at least 2D"):
        SyncBatchNorm(2)(torch.ones(2))
    for wrong in (torch.complex64, torch.int64):
        with parallel_raises(TypeError, match=f"its input is of {wrong}"):
            SyncBatchNorm(3)(torch.ones(2, 3, 4).to(wrong))
    with parallel_raises(TypeError, match=r"its weight is of torch\.complex64"):
        SyncBatchNorm(3, dtype=torch.complex64)(torch.ones(2, 3, 4))


@pytest.mark.mpi(min_size=2)
def test_a_penalty_where_some_inputs_need_no_gradient(rng):
    size, me = dist.get_world_size(), dist.get_rank()
    mine, plain = ours_and_reference(4)
    whole, weight = torch.from_numpy(rng.standard_normal((2, 3 * size, 4, 2, 2)))
    parts, weights = whole.split(3), weight.split(3)
    x = parts[me].clone().requires_grad_(me == 0)
    found = []
    for layer, batch, part in ((mine, x, weights[me]), (plain, whole, weight)):
        loss = (layer(batch).pow(3) * part).sum()
        (gradient,) = torch.autograd.grad(loss, [layer.weight], create_graph=True)
        if layer is mine:
            gradient = functional.all_reduce(gradient)
        gradient.pow(2).sum().backward()
        found.append(layer.weight.grad)
    if found[0] is not None:
        dist.all_reduce(found[0], op=dist.ReduceOp.AVG)
    parallel_assert(close(found[0], found[1], 1e-8), str(found))


@pytest.mark.mpi(min_size=2)
def test_a_graph_of_gradients_on_some_ranks_only():
    layer, last = SyncBatchNorm(2), dist.get_rank() == dist.get_world_size() - 1
    loss = layer(torch.ones(2, 2, 3, requires_grad=True)).sum()
    both = r"backward of SyncBatchNorm\([\s\S]*backward of SyncBatchNorm with create_graph\("
    with parallel_raises(dist.DistMismatchError, match=both):
        loss.backward(create_graph=last)


@pytest.mark.mpi(min_size=2)
def test_disagreement_is_an_error():
    with parallel_raises(dist.DistMismatchError, match="SyncBatchNorm"):
        SyncBatchNorm(2 + dist.get_rank())(torch.ones(2, 2 + dist.get_rank(), 3))
    last = dist.get_rank() == dist.get_world_size() - 1
    for name, other in (("eps", 1e-3), ("momentum", None)):
        layer = SyncBatchNorm(2, **({name: other} if last else {}))
        with parallel_raises(dist.DistMismatchError, match=f"{name}={getattr(layer, name)}"):
            layer(torch.ones(2, 2, 3))
    with parallel_raises(ValueError, match="empty batch on every rank"):
        SyncBatchNorm(2)(torch.ones(0, 2, 3))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after wrapping"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["the module", "within"])
@pytest.mark.parametrize("elsewhere", ["nowhere", "alone"])
def test_torchs_own_in_a_module_for_ddp(monkeypatch, elsewhere, wrapped, after):
    """It asks torch.distributed for the ranks, which is not initialised, or for one process."""
    # others' gloo
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: elsewhere == "alone")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    me, size = dist.get_rank(), dist.get_world_size()
    if size == 1 and elsewhere == "alone":
        return  # then torch's layer is right
    plain = nn.BatchNorm1d(2, momentum=1.0)
    net = nn.Sequential(nn.Linear(2, 2), plain) if wrapped else plain
    if wrapped:
        with torch.no_grad():
            net[0].weight.copy_(torch.eye(2))
            net[0].bias.zero_()
    x = torch.full((3, 2), float(me))
    x[0] += 1
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    if after:
        model = dist.DistributedDataParallel(net)
        model(x).sum().backward()
        model = convert(model)
    else:
        net = convert(net)
        model = dist.DistributedDataParallel(net)
    held = model.module[1] if wrapped else model.module
    assert held is not plain
    model(x).sum().backward()
    assert held is (model.module[1] if wrapped else model.module)
    wanted = sum(r + 1 / 3 for r in range(size)) / size
    parallel_assert(
        close(held.running_mean, torch.full((2,), wanted), 1e-5), f"{held.running_mean}"
    )


def test_a_class_derived_from_torchs_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)

    class Mine(nn.SyncBatchNorm):
        pass

    why = r"1 is a Mine, .* derive it from hpcdist.parallel.SyncBatchNorm"
    with parallel_raises(ValueError, match=why):
        dist.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), Mine(2)))
    model = dist.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model.module[1] = Mine(2)
    with parallel_raises(ValueError, match=why):
        model(torch.zeros(3, 2))
