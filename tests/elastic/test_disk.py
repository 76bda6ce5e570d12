"""Commits on disk: written by all ranks, readable with torch alone, read by any number of ranks."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

import hpcdist as dist
from hpcdist.elastic import State, disk, elastic
from hpcdist.elastic.disk import Disk, _claimed, _load, _save
from hpcdist.elastic.exchange import gathered
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to load in a single process"),
]


@pytest.fixture
def folder(tmp_path_factory):
    names = [str(tmp_path_factory.mktemp("commits"))]
    dist.broadcast_object_list(names, 0)
    yield names[0]
    dist.barrier()


def agreed(flag: bool) -> bool:
    return all(gathered(flag))


def trained(folder, steps: int, stop: int = -1):
    """Train as a new start does, and stop without an end after some steps."""
    _claimed.clear()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.5)
    state = State(model=model, zero=zero, plain=plain, folder=folder, folder_every=2)
    state.values.seen = []
    for step in elastic(state, steps):
        if step.index == stop:
            return state, None
        with step:
            state.values.seen.append(step.index)
            zero.zero_grad()
            (model(torch.rand(4, 5)).sum() * (1 + step.index)).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            zero.step()
            plain.param_groups[0]["params"][0].grad = torch.full((2,), 1.0 + step.index)
            plain.step()
    ended = zero.shard_state(), plain.state_dict(), [p.detach() for p in model.parameters()]
    return state, (ended, torch.rand(3))


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_it_goes_on_bit_for_bit(folder, tmp_path):
    _, wanted = trained(None, 9)
    trained(folder, 9, stop=7)
    parallel_assert(sorted(os.listdir(folder)) == ["step-4", "step-6"], os.listdir(folder))
    state, found = trained(folder, 9)
    parallel_assert(state.began == 6 and state.values.seen == list(range(9)))
    parallel_assert(same(found, wanted))
    # by torch alone
    rank = f"{folder}/step-6/rank-0"
    weight = {"own/parts/model/parameters/0": torch.zeros(7, 5)}
    checkpoint.load(weight, checkpoint_id=rank, no_dist=True)
    parallel_assert(bool(weight["own/parts/model/parameters/0"].any()))


def test_types_of_dictionaries(folder):
    """MultiStepLR's milestones are a Counter, of which 3 and 5 became 1 and 1."""
    there = {
        "a": Counter({3: 1, 5: 1}),
        "b": OrderedDict(x=torch.ones(2)),
        3: defaultdict(list, y=[1]),
    }
    path = Path(folder) / f"types-{dist.get_rank()}"
    _save(there, path)
    back = _load(path)
    same = back["a"] == there["a"] and type(back["a"]) is Counter and back[3] == there[3]
    parallel_assert(same and back["b"]["x"].tolist() == [1, 1], f"{back}")
    lrs: list[float] = []
    for stop in (3, -1):
        _claimed.clear()
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        steps = torch.optim.lr_scheduler.MultiStepLR(sgd, [2, 4])
        state = State(sgd=sgd, steps=steps, folder=folder, folder_every=1)
        for step in elastic(state, 6):
            if step.index == stop:
                break
            with step:
                lrs[step.index :] = [sgd.param_groups[0]["lr"]]
                sgd.step()
                steps.step()
    parallel_assert(state.began > 0, f"{state.began}")
    parallel_assert(lrs == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01, 0.01]), f"{lrs}")


def norm_after(folder, steps: int, width: int = 1):
    _claimed.clear()
    norm = torch.nn.BatchNorm1d(width)
    state = State(folder=folder, folder_every=1, norm=norm)
    for step in elastic(state, steps):
        with step:
            norm(torch.full((4, width), 10.0 * (dist.get_rank() + 1)))
    return state, norm.running_mean.clone()


def test_buffers_are_each_ranks_own(folder):
    """As they were before the restart; all ranks had rank 0's."""
    _, before = norm_after(folder, 4)
    state, after = norm_after(folder, 4)
    parallel_assert(state.began > 0 and torch.equal(before, after), f"{before} {after}")


def test_a_model_of_other_shapes_is_refused(folder):
    """One row was copied to all."""
    norm_after(folder, 3)
    with parallel_raises(ValueError, match="norm is .* a start that changes a model"):
        norm_after(folder, 4, width=10)


def test_a_commit_that_cannot_be_named_is_a_warning(folder, caplog):
    if dist.get_rank() == 0:
        (Path(folder) / "step-2").touch()
    dist.barrier()
    norm_after(folder, 4)
    told = sum("step 2 is not kept" in record.message for record in caplog.records)
    parallel_assert(told == (dist.get_rank() == 0), f"{caplog.records}")


def test_a_damaged_commit_is_not_used(folder, caplog):
    trained(folder, 7, stop=5)
    if dist.get_rank() == 0:
        (file,) = [name for name in os.listdir(f"{folder}/step-4/rank-0") if "distcp" in name]
        os.truncate(f"{folder}/step-4/rank-0/{file}", 100)
    state, _ = trained(folder, 7)
    parallel_assert(state.began == 2)
    parallel_assert("step-4 is not used" in caplog.text or dist.get_rank() > 0)


def test_two_states_cannot_have_one_folder(folder):
    """The second one would take over what the first has committed."""
    state, _ = trained(folder, 5)
    other = State(values=torch.zeros(3), folder=f"{folder}/../{os.path.basename(folder)}")
    with parallel_raises(ValueError, match="give each a folder of its own"):
        other.resume()
    parallel_assert(state.resume() and state.step == 4)
    _claimed.clear()
    with parallel_raises(ValueError, match="the parts model, plain, zero, and this one has values"):
        other.resume()


def test_a_folder_that_cannot_be_written_is_a_warning(folder, caplog):
    blocked = f"{folder}/file"
    if dist.get_rank() == 0:
        open(blocked, "w").close()
    dist.barrier()
    one = Disk(blocked, agreed)
    parallel_assert(one.find() is None)
    parallel_assert(not one.keep(2, {"parts": {}}, {}))
    parallel_assert("is not kept in" in caplog.text)


def test_a_commit_that_a_dead_rank_has_not_written_gets_no_name(folder, monkeypatch):
    """The living agree without it."""
    one = Disk(folder, agreed)
    parallel_assert(one.keep(2, {"parts": {}}, {}))

    def died(thing):
        raise dist.DistError("a rank has died")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "is_death", lambda error: True)
        patch.setattr(disk, "gathered", died)
        parallel_assert(not one.keep(4, {"parts": {}}, {}))
    parallel_assert(one.find().step == 2)


def test_what_a_dead_job_has_half_written_goes(folder):
    parallel_assert(Disk(folder, agreed).keep(2, {"parts": {}}, {}))
    if dist.get_rank() == 0:
        (Path(folder) / "step-3.part" / "rank-0").mkdir(parents=True)
    dist.barrier()
    parallel_assert(Disk(folder, agreed).keep(4, {"parts": {}}, {}))
    parallel_assert(sorted(os.listdir(folder)) == ["step-2", "step-4"], os.listdir(folder))


def test_what_comes_back(tmp_path):
    thing = {
        "a": torch.arange(3.0).to(torch.bfloat16), 1: torch.tensor(True), "1": torch.zeros(0, 2),
        "hpcdist": torch.ones(1), "list": [None, 1.5, (torch.ones(2, 3).t(), "x")],
    }  # fmt: skip
    _save(thing, tmp_path / "one")
    parallel_assert(same(_load(tmp_path / "one"), thing))


def test_one_element_with_a_stride_is_kept(folder):
    _claimed.clear()
    state = State(one=torch.full((3, 2), 5.0)[:1, 0], folder=folder, folder_every=1)
    for step in elastic(state, 2):
        with step:
            pass
    parallel_assert(Disk(folder, agreed).find() is not None)


def test_a_failed_step_is_not_committed_where_ranks_cannot_return(folder):
    """It was counted, and written as the newest commit."""
    _claimed.clear()
    value = torch.zeros(2)
    state = State(value=value, folder=folder, folder_every=1)
    state.resume()
    state.commit(1)
    state.commit(1)
    value.fill_(torch.nan)
    with parallel_raises(RuntimeError, match="there is no commit to return to: this job ends"):
        state.commit(1, yes=False)
    with parallel_raises(RuntimeError, match="there is no commit to return to: this job ends"):
        state.rollback()
    parallel_assert(state.step == 2)
    _claimed.clear()
    again = State(value=value, folder=folder, folder_every=1)
    parallel_assert(again.resume() and again.step == 2 and not value.any())
