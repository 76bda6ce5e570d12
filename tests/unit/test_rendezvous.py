"""URLs by which processes meet."""

from __future__ import annotations

from datetime import timedelta

import pytest

import hpcdist
from hpcdist import DistNetworkError, register_rendezvous_handler, rendezvous

_LAUNCHERS = (
    "TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK MV2_COMM_WORLD_RANK PALS_RANKID "
    "JSM_NAMESPACE_RANK FLUX_TASK_RANK SLURM_PROCID RANK"
).split()


@pytest.fixture
def no_launcher(monkeypatch):
    for name in _LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def handler():
    """A scheme of this test's own, taken away afterwards."""
    import sys

    seen = []

    def meet(url, **kwargs):
        seen.append((url, kwargs))
        yield "a store", 1, 4

    register_rendezvous_handler("test", meet)
    yield seen
    del sys.modules["hpcdist.rendezvous"]._handlers["test"]


def test_mpi_knows_what_nobody_says(no_launcher):
    assert next(rendezvous("mpi://")) == (None, -1, -1)


def test_mpi_passes_on_what_the_launcher_says(no_launcher):
    no_launcher.setenv("OMPI_COMM_WORLD_RANK", "2")
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert next(rendezvous("mpi://")) == (None, 2, 3)


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        ("mpi://?rank=1&world_size=4", ()),
        ("mpi://", (1, 4)),
        ("mpi://?rank=1", (-1, 4)),
        ("mpi:///?world_size=4", (1,)),
    ],
)
def test_rank_and_size_in_the_url_or_as_arguments(no_launcher, url, arguments):
    assert next(rendezvous(url, *arguments)) == (None, 1, 4)


def test_a_registered_handler_gets_the_url_and_the_timeout(handler):
    limit = timedelta(seconds=3)
    assert next(rendezvous("test://host:80/path?x=1", 2, 5, timeout=limit)) == ("a store", 1, 4)
    assert handler == [("test://host:80/path?x=1&rank=2&world_size=5", {"timeout": limit})]


def test_a_url_without_host_keeps_its_slashes(handler):
    next(rendezvous("test://", 2, 5))
    assert handler[0][0] == "test://?rank=2&world_size=5"


def test_a_url_is_left_alone_when_nothing_is_added(handler):
    next(rendezvous("test:///tmp/a%20b?rank=0"))
    assert handler[0][0] == "test:///tmp/a%20b?rank=0"


def test_a_scheme_is_registered_once(handler):
    with pytest.raises(RuntimeError, match="test://"):
        register_rendezvous_handler("test", lambda url: iter(()))
    with pytest.raises(RuntimeError, match="mpi://"):
        register_rendezvous_handler("mpi", lambda url: iter(()))


@pytest.mark.parametrize("url", ["env://", "tcp://host:1234", "file:///tmp/x", "nonsense://"])
def test_an_unknown_scheme_says_what_there_is(url):
    scheme = url.partition(":")[0]
    with pytest.raises(DistNetworkError, match=rf"no init method {scheme}://; it has: mpi://"):
        rendezvous(url)


def test_a_url_without_scheme():
    with pytest.raises(DistNetworkError, match="no scheme"):
        rendezvous("localhost:1234")


def test_given_twice():
    with pytest.raises(ValueError, match="rank is given twice"):
        rendezvous("mpi://?rank=1", 1)
    with pytest.raises(ValueError, match="world_size is given twice"):
        rendezvous("mpi://?world_size=1", -1, 1)


def test_wrong_types():
    with pytest.raises(TypeError, match="url must be a str"):
        rendezvous(5)
    with pytest.raises(TypeError, match="rank must be a whole number"):
        rendezvous("mpi://", 1.5)
    with pytest.raises(TypeError, match="world_size must be a whole number"):
        rendezvous("mpi://", 1, "2")
    with pytest.raises(ValueError, match="whole numbers"):
        next(rendezvous("mpi://?rank=one"))


def test_init_refuses_what_it_cannot_meet_by_before_it_starts_anything():
    with pytest.raises(DistNetworkError, match="no init method tcp://"):
        hpcdist.init_process_group(init_method="tcp://localhost:1234", rank=0, world_size=1)
    assert not hpcdist.is_initialized()
