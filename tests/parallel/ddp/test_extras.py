"""What else it offers: delayed parameters, hooks for buffers, copies, figures."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ddp_cases import DDP, TorchDDP, distance, grads, mine, sgd
from gloo import gloo_world
from torch import nn

import hpcdist as dist
from hpcdist import debug_level, log
from hpcdist.parallel import BufferCommHookLocation, comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += dist.get_rank() + 1
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def data(steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(12, 4, generator=generator) for _ in range(steps)]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# --- delayed parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("last.weight", "middle.bias"), None], ids=["some", "all"])
def test_delayed_parameters(names: tuple[str, ...] | None) -> None:
    net, alone = Net(), Net()
    with torch.no_grad():
        net.middle.bias.add_(dist.get_rank())  # rank 0's is copied to all
    trigger = net.first.weight
    delayed = [(n, p) for n, p in net.named_parameters() if names is None or n in names]
    if names is None:
        delayed = [(n, p) for n, p in delayed if p is not trigger] + [("first.weight", trigger)]
        # Its own gradient is accumulated after the hook that starts the others.
        delayed = delayed[:-1]
        net.first.weight.requires_grad_(True)
    model = DDP(net, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=trigger)
    optimizers = [sgd(m.parameters()) for m in (model, alone)]
    for x in data():
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, mine(x)).backward()
        loss(alone, x).backward()
        for optimizer in optimizers:
            optimizer.step()
        parallel_assert(distance(model, alone) <= 1e-6)
    with model.no_sync():
        model.zero_grad()
        loss(model, mine(data(1)[0])).backward()
    local = [g.clone() for g in grads(model)]
    for g in local:
        dist.all_reduce(g, dist.ReduceOp.AVG)
    parallel_assert(
        dist.get_world_size() == 1
        or not all(torch.equal(a, b) for a, b in zip(grads(model), local, strict=True))
    )


def test_every_parameter_delayed() -> None:
    class Root(nn.Module):
        """The input's own parameter, whose gradient comes last, is not trained by DDP."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.root = Net(), nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x + self.root)

    module, alone = Root(), Root()
    names = [(n, p) for n, p in module.named_parameters() if n != "root"]
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["root"])
    model = DDP(module, delay_all_reduce_named_params=names, param_to_hook_all_reduce=module.root)
    parallel_assert(model.reducer is None)
    for x in data(2):
        model.zero_grad()
        alone.zero_grad()
        loss(model, mine(x)).backward()
        loss(alone, x).backward()
        pairs = zip(grads(module.net), grads(alone.net), strict=True)
        parallel_assert(all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))
    with parallel_raises(RuntimeError, match="the all-reduce of all parameters is delayed"):
        model.register_comm_hook(None, lambda state, bucket: None)


def test_a_delayed_gradient_that_comes_too_late() -> None:
    net = Net()
    model = DDP(
        net,
        delay_all_reduce_named_params=[("first.weight", net.first.weight)],
        param_to_hook_all_reduce=net.last.weight,
    )
    with parallel_raises(dist.DistError, match=r"gradient of first\.weight.* came after"):
        loss(model, data(1)[0]).backward()


# --- buffers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_hook_for_buffers(where: str) -> None:
    calls = []

    def total(state: str, buffers: dict[str, torch.Tensor]) -> list[Any]:
        calls.append((state, list(buffers)))
        work = dist.all_reduce(buffers["count"], async_op=True)
        return [work.get_future()]

    model = DDP(Net())
    model._register_buffer_comm_hook("state", total, BufferCommHookLocation[where])
    size = dist.get_world_size()
    loss(model, data(1)[0]).backward()
    everyone = size * (size + 1) // 2
    once = everyone if where == "POST_FORWARD" else dist.get_rank() + 1
    parallel_assert(model.module.count[0].item() == once, str(model.module.count))
    loss(model, data(1)[0]).backward()
    own = dist.get_rank() + 1
    twice = size * everyone + everyone if where == "POST_FORWARD" else everyone + own
    parallel_assert(calls == [("state", ["count"])] * 2)
    parallel_assert(model.module.count[0].item() == twice, str(model.module.count))


def test_ignored_parameters_and_buffers_stay_local() -> None:
    net = Net()
    with torch.no_grad():
        net.middle.weight.fill_(dist.get_rank())
        net.count.fill_(10 * dist.get_rank())
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["middle.weight", "count"])
    model = DDP(net)
    parallel_assert(bool((net.middle.weight == dist.get_rank()).all()))
    for _ in range(2):
        loss(model, data(1)[0] + dist.get_rank()).backward()
    parallel_assert(net.count[0].item() == 12 * dist.get_rank() + 2)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyone, [g.sum().item() for g in (net.middle.weight.grad, net.last.bias.grad)]
    )
    parallel_assert(len({last for _, last in everyone}) == 1)
    parallel_assert(len({middle for middle, _ in everyone}) == len(everyone))


# --- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_train_on_their_own(how: str) -> None:
    model = DDP(Net(), gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=1e-4)
    loss(model, mine(data(1)[0])).backward()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    parallel_assert(distance(model, other) == 0)
    parallel_assert(other.reducer is not model.reducer and other.static_graph)
    for m in (model, other):
        for x in data(2):
            m.zero_grad()
            loss(m, mine(x)).backward()
    pairs = zip(grads(model), grads(other), strict=True)
    parallel_assert(all(torch.equal(a, b) for a, b in pairs))
    parallel_assert(other.module.first.weight is not model.module.first.weight)


def test_a_module_of_another_group_is_not_copied() -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    model = DDP(Net(), process_group=group)
    with parallel_raises(RuntimeError, match="Pickling/Unpickling are only supported"):
        copy.deepcopy(model)
    dist.destroy_process_group(group)


# --- figures -----------------------------------------------------------------------------------


def test_logging_data_has_the_keys_of_torch() -> None:
    gloo_world()
    models = [DDP(Net()), TorchDDP(Net())]
    for model in models:
        for x in data(3):
            loss(model, mine(x)).backward()
    ours, theirs = (model._get_ddp_logging_data() for model in models)
    # Of gloo itself, and of counters that torch sets where something went wrong.
    missing = {key for key in theirs if key not in ours and not key.startswith(("gloo_", "nccl_"))}
    parallel_assert(not missing, str(missing))
    for key in (
        "bucket_cap_bytes",
        "dtypes",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "has_rebuilt_buckets",
        "is_multi_device_module",
        "module_name",
        "num_parameter_tensors",
        "output_device",
        "rank",
        "rebuilt_bucket_sizes",
        "total_parameter_size_bytes",
        "unused_parameter_size",
        "world_size",
    ):
        parallel_assert(str(ours[key]) == str(theirs[key]), f"{key}: {ours[key]}, {theirs[key]}")
    parallel_assert(ours["backend_name"] == "mpi" and ours["has_error"] == 0)
    parts = ("forward_compute", "backward_compute", "backward_comm")
    parallel_assert(all(0 < ours[f"{part}_time"] < 10e9 for part in parts))
    parallel_assert(all(ours[f"avg_{part}_time"] > 0 for part in parts))
    parallel_assert(ours["backward_comm_time_end"] >= ours["backward_comm_time_start"] > 0)


def test_figures_of_a_failure_and_of_unused_parameters() -> None:
    class Part(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x)

    model = DDP(Part(), find_unused_parameters=True)
    for x in data(2):
        loss(model, mine(x)).backward()
    found = model._get_ddp_logging_data()
    parallel_assert(found["unused_parameter_size"] == 2 * (16 + 4) * 4, str(found))
    parallel_assert(found["can_set_static_graph"])
    model = DDP(Part())

    def fail(_state: Any, _bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future()
        future.set_result(torch.ones(3))
        return future

    model = DDP(Net())
    model.register_comm_hook(None, fail)
    with parallel_raises(
        TypeError, match=r"one tensor of as many elements .*\(60 of torch.float32\).*shape \(3,\)"
    ):
        loss(model, data(1)[0]).backward()
    found = model._get_ddp_logging_data()
    parallel_assert(found["has_error"] == 1 and "TypeError" in found["error"])
    parallel_assert("fail" in found["comm_hook"])
    with parallel_raises(dist.DistError, match="an earlier backward pass failed"):
        model(data(1)[0])
    model = DDP(Part())  # a part of it is not used
    with parallel_raises(dist.DistError, match="find_unused_parameters"):
        loss(model, data(1)[0]).backward()
    found = model._get_ddp_logging_data()
    parallel_assert(found["has_error"] == 1 and "find_unused_parameters" in found["error"])


def test_sampling() -> None:
    model = DDP(Net())
    with parallel_raises(ValueError, match="equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)
    model._set_ddp_runtime_logging_sample_rate(5)
    starts = []
    for _ in range(16):
        loss(model, data(1)[0]).backward()
        starts.append(model._get_ddp_logging_data()["backward_compute_time_start"])
    # as torch counts, from 0: the first ten, then every fifth
    sampled = [i for i, start in enumerate(starts) if i == 0 or start != starts[i - 1]]
    parallel_assert(sampled == [*range(10), 10, 15], str(sampled))


@pytest.mark.parametrize("by", ["the environment", "a call"])
@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_what_is_logged(
    level: str, by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(debug_level, "_level", None)  # and afterwards as it was
    if by == "a call":
        dist.set_debug_level(level)
    else:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    with caplog.at_level(logging.INFO, logger="hpcdist.parallel"):
        model = DDP(Net())
        loss(model, data(1)[0]).backward()
    text = caplog.text
    parallel_assert(("constructed: module_name=Net" in text) == (level != "OFF"))
    parallel_assert(("iteration 0: forward_compute_time=" in text) == (level == "DETAIL"), text)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of hpcdist as a program without logging finds it, and no debug level."""
    logger = logging.getLogger("hpcdist")
    monkeypatch.setattr(debug_level, "_level", None)
    for name, value in (("level", logging.NOTSET), ("handlers", []), ("propagate", True)):
        monkeypatch.setattr(logger, name, value)
    monkeypatch.setattr(log, "_configured", logging.NOTSET)
    logger.manager._clear_cache()
    yield logger
    monkeypatch.undo()
    logger.manager._clear_cache()


def test_a_level_that_a_call_sets_reaches_a_program_without_logging(
    ours: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after the start of the default group, which is where the environment's is applied."""
    dist.set_debug_level("INFO")
    DDP(Net())
    parallel_assert("constructed: module_name=Net" in capsys.readouterr().err)


@pytest.mark.parametrize("configured", ["", "info"])
def test_a_level_of_the_log_that_the_program_has_set_stays(
    configured: str, ours: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure(configured)
    dist.set_debug_level("INFO")
    ours.setLevel(logging.WARNING)
    before = list(ours.handlers)
    DDP(Net())
    parallel_assert(ours.level == logging.WARNING and ours.handlers == before)
    parallel_assert("constructed" not in capsys.readouterr().err)


# --- the end of backward, by hand ----------------------------------------------------------------


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' gradients."""
    pairs = zip(grads(one), grads(other), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("as_view", [False, True])
def test_finalize_backward_by_hand(as_view: bool) -> None:
    model, reference = DDP(Net(), gradient_as_bucket_view=as_view), DDP(Net())
    parallel_assert(not model.require_manual_backward_finalization)
    parallel_assert(not model.should_finalize_after_backward)
    with parallel_raises(RuntimeError, match="is off"):
        model.finalize_backward()
    model.require_manual_backward_finalization = True
    parallel_assert(model.should_finalize_after_backward)
    with parallel_raises(RuntimeError, match="no backward pass waits"):
        model.finalize_backward()
    optimizers = [sgd(each.parameters()) for each in (model, reference)]
    for step, x in enumerate(data(4)):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            if step == 2:
                with each.no_sync():
                    loss(each, mine(x)).backward()
            loss(each, mine(x)).backward()
        model.finalize_backward()
        parallel_assert(apart(model, reference) == 0)
        for optimizer in optimizers:
            optimizer.step()
    model.require_manual_backward_finalization = False
    for each in (model, reference):
        loss(each, mine(x)).backward()
    parallel_assert(apart(model, reference) == 0)


def test_a_pass_that_was_not_finalized_is_no_secret() -> None:
    model = DDP(Net())
    model.require_manual_backward_finalization = True
    x = mine(data(1)[0])
    output = loss(model, x)
    output.backward(retain_graph=True)
    with parallel_raises(RuntimeError, match="before the next forward"):
        model(x)
    with parallel_raises(RuntimeError, match="before the next backward"):
        output.backward()
    with parallel_raises(RuntimeError, match="is set"):
        model.require_manual_backward_finalization = False
    model.finalize_backward()
    with parallel_raises(RuntimeError, match="no backward pass waits"):
        model.finalize_backward()
    loss(model, x).backward()
    model.finalize_backward()


def test_a_hook_is_not_registered_before_a_pass_was_finalized() -> None:
    """Its averages would get lost."""
    model, reference = DDP(Net()), DDP(Net())
    model.require_manual_backward_finalization = True
    x = mine(data(1)[0])
    for each in (model, reference):
        loss(each, x).backward()
    with parallel_raises(RuntimeError, match="before register_comm_hook"):
        model.register_comm_hook(None, comm_hooks.allreduce_hook)
    model.finalize_backward()
    parallel_assert(apart(model, reference) == 0)
    model.register_comm_hook(None, comm_hooks.allreduce_hook)


# --- torch's classes -----------------------------------------------------------------------------


def test_builtin_hooks_and_logger() -> None:
    x = mine(data(1)[0])
    for kind in (*dist.BuiltinCommHookType, torch.distributed.BuiltinCommHookType.FP16_COMPRESS):
        model, reference = DDP(Net()), DDP(Net())
        model._register_builtin_comm_hook(kind)
        found = model._get_ddp_logging_data()["comm_hook"]
        parallel_assert(found == f"BuiltinCommHookType.{kind.name}", found)
        for each in (model, reference):
            loss(each, x).backward()
        parallel_assert(apart(model, reference) < 1e-3)
    with parallel_raises(TypeError, match="BuiltinCommHookType"):
        DDP(Net())._register_builtin_comm_hook("allreduce")
    parallel_assert(isinstance(model.reducer, dist.Reducer))
    parallel_assert(isinstance(model.logger, dist.Logger))
    logger = dist.Logger(model.reducer)
    logger._set_comm_hook_name("mine")
    logger.set_error_and_log("too bad")
    found = model._get_ddp_logging_data()
    parallel_assert(found["comm_hook"] == "mine" and "too bad" in found["error"], f"{found}")
    parallel_assert(model.logger._get_ddp_logging_data() == found)
