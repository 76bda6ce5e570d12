"""URLs by which processes meet."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
from jobs import plain_environment
from ports import free_port

import hpcdist
from hpcdist import DistNetworkError, register_rendezvous_handler, rendezvous
from hpcdist.startup import steps
from hpcdist.store import HashStore

pytestmark = pytest.mark.local

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
    seen = []

    def meet(url, **kwargs):
        seen.append((url, kwargs))
        yield "a store", 1, 4

    register_rendezvous_handler("test", meet)
    yield seen
    del sys.modules["hpcdist.startup.rendezvous.registry"]._handlers["test"]


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


def test_an_unknown_scheme_says_what_there_is():
    with pytest.raises(
        DistNetworkError,
        match=r"No rendezvous handler for nonsense://; there are: env://, file://, mpi://, tcp://",
    ):
        rendezvous("nonsense://")


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
    with pytest.raises(DistNetworkError, match="No rendezvous handler for nonsense://"):
        hpcdist.init_process_group(init_method="nonsense://localhost:1234", rank=0, world_size=1)
    with pytest.raises(ValueError, match="either init_method or store"):
        hpcdist.init_process_group(init_method="mpi://", store=HashStore())
    with pytest.raises(ValueError, match="a store needs rank and world_size too"):
        hpcdist.init_process_group(store=HashStore())
    with pytest.raises(TypeError, match=r"store must be an hpcdist\.Store .* not dict"):
        hpcdist.init_process_group(store={}, rank=0, world_size=1)
    assert not hpcdist.is_initialized()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("tcp://localhost?rank=0&world_size=1", "port number missing"),
        ("tcp://:29500?rank=0&world_size=1", "host missing"),
        ("tcp://localhost:70000?rank=0&world_size=1", "from 0 to 65535"),
        ("tcp://localhost:x?rank=0&world_size=1", "from 0 to 65535"),
        ("tcp://localhost:0?rank=1&world_size=2", "port 0"),
        ("tcp://localhost:29500?world_size=1", "rank parameter missing"),
        ("tcp://localhost:29500?rank=0", "world size parameter missing"),
        ("tcp://localhost:29500?rank=0&world_size=two", "whole numbers"),
        ("file://?rank=0&world_size=1", "path missing"),
        ("file:///?rank=0&world_size=1", "path missing"),
        ("file://tmp/x?rank=0&world_size=1", "file:///tmp/x"),
        ("file:///tmp/x?world_size=1", "rank parameter missing"),
        ("file:///tmp/x?rank=0", "world size parameter missing"),
    ],
)
def test_a_url_that_says_too_little(no_launcher, url, says):
    """The same are errors in torch, by the same words; it goes on with the one of file://tmp/x."""
    with pytest.raises(ValueError, match=f"{url[:3]}.*:// rendezvous: .*{says}|{says}"):
        next(rendezvous(url))


VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "says"),
    [(({name: None}), f"environment variable {name} expected, but not set") for name in VARIABLES]
    + [
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"MASTER_PORT": "65536"}, "port must have value from 0 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"WORLD_SIZE": " "}, "environment variable WORLD_SIZE expected"),
    ],
)
def test_env_says_which_variable(no_launcher, change, says):
    for name, value in {**VARIABLES, **change}.items():
        if value is None:
            no_launcher.delenv(name, raising=False)
        else:
            no_launcher.setenv(name, value)
    with pytest.raises(ValueError, match=f"env:// rendezvous: .*{says}"):
        next(rendezvous("env://"))


def test_env_under_an_mpi_launcher_needs_no_variables(no_launcher):
    """As torch's MPI backend: it looks at none."""
    no_launcher.delenv("MASTER_ADDR", raising=False)
    no_launcher.setenv("OMPI_COMM_WORLD_RANK", "2")
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert next(rendezvous("env://")) == (None, 2, 3)
    assert next(rendezvous("env://?rank=1")) == (None, 1, 3)


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_a_store_comes_with_rank_and_size(no_launcher, scheme, tmp_path):
    port = free_port()
    no_launcher.setenv("HPCDIST_STORE_KEY", "ab" * 32)
    no_launcher.setenv("MASTER_ADDR", "127.0.0.1")
    no_launcher.setenv("MASTER_PORT", str(port))
    url = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/store", "env": "env://"}
    limit = timedelta(seconds=20)
    first, rank, size = next(rendezvous(url[scheme], 0, 2, timeout=limit))
    assert (rank, size) == (0, 2)
    second, rank, size = next(rendezvous(url[scheme], 1, 2, timeout=limit))
    assert (rank, size) == (1, 2)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert first.timeout == second.timeout == limit
    again, _, _ = next(rendezvous(url[scheme], 0, 2, timeout=limit))
    assert again.get("key") == b"value"  # of the same server


#: Says whether another one has left a word, leaves one and ends.
MEETS = """
import sys
from hpcdist import rendezvous
url = sys.stdin.readline().strip()
store = next(rendezvous(url))[0]
print(store.check(["word"]), flush=True)
store.set("word", "x")
"""


def test_a_file_of_a_start_that_failed_is_begun_anew(no_launcher, tmp_path):
    """Some ranks had not come, and those that had have left; the next start is told nothing."""
    no_launcher.delenv("HPCDIST_STORE_KEY", raising=False)

    def begin():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", MEETS], env=plain_environment(), **pipes)

    def said(process, rank):
        answer, _ = process.communicate(f"file://{tmp_path}/meeting?rank={rank}&world_size=3\n")
        return answer.strip()

    started = [begin(), begin()]
    assert [said(process, rank) for rank, process in enumerate(started)] == ["False", "True"]
    time.sleep(0.2)
    assert said(begin(), 2) == "False"


@pytest.mark.parametrize(
    ("variables", "needs_mpi", "method"),
    [
        ({}, True, "mpi://"),
        ({}, False, "mpi://"),
        (VARIABLES, True, "env://"),
        ({**VARIABLES, "WORLD_SIZE": "1"}, True, "mpi://"),
        ({**VARIABLES, "WORLD_SIZE": "1"}, False, "env://"),
        ({**VARIABLES, "TORCHELASTIC_RUN_ID": "x"}, True, "env://"),
        ({**VARIABLES, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True, "mpi://"),
        ({**VARIABLES, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True, "env://"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True, "mpi://"),
    ],
)
def test_the_default_method(no_launcher, variables, needs_mpi, method):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        no_launcher.delenv(name, raising=False)
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    assert steps.default_method(needs_mpi) == method


@pytest.mark.parametrize(
    ("variables", "place", "method"),
    [
        ({"MASTER_ADDR": "localhost"}, (0, 2), "env://"),
        ({"MASTER_ADDR": "localhost"}, (0, 1), "mpi://"),
        ({"MASTER_ADDR": "localhost"}, (0, -1), "mpi://"),
        ({}, (0, 2), "mpi://"),
        ({"MASTER_ADDR": "localhost", "PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2), "mpi://"),
    ],
)
def test_rank_and_world_size_with_an_address_mean_env(no_launcher, variables, place, method):
    """As in torch's tutorials, where the script starts the processes itself."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        no_launcher.delenv(name, raising=False)
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    assert steps.default_method(True, *place) == method


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_second_meeting_at_a_place_has_its_own_timeout(scheme, tmp_path):
    place = f"127.0.0.1:{free_port()}" if scheme == "tcp" else tmp_path / "store"
    url = f"{scheme}://{place}?rank=0&world_size=1"
    stores = [next(rendezvous(url, timeout=timedelta(seconds=n)))[0] for n in (90, 0.5)]
    assert [store.timeout.total_seconds() for store in stores] == [90.0, 0.5]
