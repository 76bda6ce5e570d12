"""The example programs as one process, without mpirun: nothing here depends on which MPI it is."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from example_runs import EXAMPLES, alone
from terminals import Terminal

import hpcdist as dist

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi]

TRAIN = str(EXAMPLES / "train_digits.py")

#: Without those of client libraries, which know nothing of hpcdist.
OWN = [path for path in EXAMPLES.rglob("*.py") if path.parent.name != "clients"]
#: All but the modules that they share.
PROGRAMS = sorted(str(path.relative_to(EXAMPLES)) for path in OWN if "__main__" in path.read_text())

Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Start all programs, two at a time: each is one process on one core. Give one's end."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "empty.pt").write_bytes(b"")
    (folder / "text.pt").write_bytes(b"not a checkpoint")
    commands = {}
    for command in ("02_point_to_point.py", *SAYS):
        program, *arguments = command.split()
        commands[command] = [str(EXAMPLES / program), *arguments]
    for name in ("empty.pt", "text.pt"):
        commands[name] = [TRAIN, "--resume", str(folder / name)]
    commands["no scikit-learn"] = without("sklearn.datasets")
    with ThreadPoolExecutor(2) as threads:
        running = {name: threads.submit(alone, *words) for name, words in commands.items()}
        yield lambda name: running[name].result()


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples import each other, as they do when one of them is started."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


#: What a world of one says, by the example's command.
SAYS = {
    "01_hello.py": r"the sum of all ranks is 0",
    "03_collectives.py": r"is alone, so there is nobody to disagree with",
    "04_ring_all_reduce.py --largest 40000 --rounds 2 --chunk 100": r"(?m)^ +32768 +128",
    "05_groups_and_mesh.py": r"a mesh of 1 x 1",
    "07_ddp_features.py": r"keeps the state of 6 of 6",
}


def test_point_to_point_needs_two(ended: Run) -> None:
    done = ended("02_point_to_point.py")
    assert done.returncode != 0
    assert "needs at least two ranks: mpirun -n 2" in done.stderr


@pytest.mark.parametrize("command", SAYS)
def test_a_world_of_one(command: str, ended: Run) -> None:
    done = ended(command)
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[command], done.stdout)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    save = runpy.run_path(TRAIN)["save"]
    path = tmp_path / "state.pt"
    save(path, {"epoch": 1})

    class Unwritable:
        def __reduce__(self):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(path, {"epoch": 2, "model": torch.ones(1000), "bad": Unwritable()})
    assert torch.load(path, weights_only=True) == {"epoch": 1}


@pytest.mark.parametrize("name", ["empty.pt", "text.pt"])
def test_a_checkpoint_that_is_none(name: str, ended: Run) -> None:
    done = ended(name)
    assert done.returncode == 2
    assert re.search(r"^  rank 0: \w+Error", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


def without(module: str, *arguments: str) -> list[str]:
    """The command that runs train_digits.py where a package is not installed."""
    program = (
        f"import runpy, sys; sys.modules[{module!r}] = None; "
        f"sys.argv = ['train_digits.py', *{arguments!r}]; sys.path.insert(0, {str(EXAMPLES)!r}); "
        f"runpy.run_path({TRAIN!r}, run_name='__main__')"
    )
    return ["-c", program]


def test_without_scikit_learn_the_pip_command_is_named(ended: Run) -> None:
    done = ended("no scikit-learn")
    assert done.returncode == 1
    assert "pip install scikit-learn" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_tqdm_there_is_just_no_bar() -> None:
    """On a terminal; elsewhere there is none anyway."""
    with Terminal(sys.executable, *without("tqdm", "--epochs", "1")) as terminal:
        assert "pip install tqdm" in terminal.until(r"(?s).*parameters equal")[0]
        assert terminal.end() == 0


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(TRAIN)["parse"]()
    assert ended.value.code == (0 if arguments == ("--help",) else 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--epochs", "0"], "must be positive"),
        (["--lr", "nan"], "must be positive"),
        (["--batch-size", "-3"], "must be positive"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parse(monkeypatch, *arguments)
    assert says in capsys.readouterr().err


def test_help_names_every_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(monkeypatch, "--help")
    text = capsys.readouterr().out
    for option in ("--epochs", "--batch-size", "--lr", "--save", "--resume", "--seed", "--threads"):
        assert option in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_example_answers_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    text = capsys.readouterr().out
    assert ended.value.code == 0 and not dist.is_initialized()
    assert text.startswith("usage: ") and re.search(r"\n\n[A-Z].*\n", text), "no description"


# --- GPUs ----------------------------------------------------------------------------------------

#: All that move tensors.
MOVING = sorted(
    str(path.relative_to(EXAMPLES))
    for path in OWN
    if "--device" in path.read_text() or "from where import" in path.read_text()
)


def test_every_example_that_moves_tensors_can_do_it_on_gpus() -> None:
    every = {str(path.relative_to(EXAMPLES)) for path in OWN}
    assert every - set(MOVING) == {"01_hello.py", "say.py"}


@pytest.mark.parametrize("name", [each for each in MOVING if each != "where.py"])
def test_without_a_gpu_the_error_is_clear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--device", "cuda"])
    with pytest.raises(SystemExit, match="--device cuda: torch cannot use a GPU here"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert not dist.is_initialized()


def test_ranks_take_turns_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import where

    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "set_default_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", chosen.append)
    monkeypatch.setattr(dist, "get_node_local_rank", lambda fallback_rank: 4)
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cuda", "--backend", "mpi"])
    device = where.start(where.options("An example.\n\nMore."))
    assert device == torch.device("cuda", 1) and chosen == [device, device, "mpi"]
    chosen.clear()
    monkeypatch.setattr(sys, "argv", ["x.py"])
    assert where.start(where.options("An example.")) == torch.device("cpu") and chosen == [None]
