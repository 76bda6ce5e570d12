"""The stages of CI: a change makes due what depends on it; environments share their packages."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci"))
sys.path.insert(0, str(ROOT / "tests" / "support"))

import kinds  # noqa: E402
import stages  # noqa: E402
from patience import wait_for  # noqa: E402

pytestmark = pytest.mark.local


def files(*folders: str) -> list[str]:
    """All source files of some folders, from the root."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    left_out = {"__pycache__", "build", ".mypy_cache", ".ruff_cache"}
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in found
        if not left_out & set(path.parts) and path.suffix not in (".so", ".pyc")
    )


def due_after(name: str) -> set[str]:
    """The stages that a change of a file makes due."""
    return {stage.name for stage in stages.STAGES if stages.depends(stage, [name])}


def in_short(name: str) -> bool:
    """Whether `.ci/run` runs this file of tests each time, or none does: it is run by hand."""
    return stages.is_test(name) and "rare" not in stages.marks(name)


def test_every_file_is_in_a_stage():
    every = files("hpcdist", "pyx", "tests")
    lost = [name for name in every if not due_after(name) and not in_short(name)]
    assert not lost, lost
    assert any(in_short(name) and not due_after(name) for name in every)


def test_every_pattern_matches_and_every_named_file_exists():
    every = files("hpcdist", "pyx", "tests", "examples", "jobscripts", "_build", ".ci") + [
        name.name for name in ROOT.iterdir() if name.is_file()
    ]
    for stage in stages.STAGES:
        for pattern in stage.files:
            inside = (ROOT / pattern).is_dir()
            matched = stages.matching([pattern.lstrip("!")], every)
            assert inside or matched, f"{stage.name}: {pattern}"
        for word in stage.command.split():
            if word.startswith(("tests/", ".ci/")):
                assert (ROOT / word).exists(), f"{stage.name}: {word}"


@pytest.fixture
def runner():
    """tests/run.py as a module."""
    spec = importlib.util.spec_from_file_location("tests_run", ROOT / "tests" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tests_take_the_arguments_of_the_stages(runner, monkeypatch):
    monkeypatch.chdir(ROOT)
    calls = [stage.command for stage in stages.STAGES if "tests/run.py" in stage.command]
    assert len(calls) == 6
    for call in calls:
        monkeypatch.setattr(sys, "argv", shlex.split(call.partition("python ")[2]))
        assert runner.parse().rare


@pytest.mark.parametrize(("numbers", "one"), [([1, 2, 4], 2), ([1], 1), ([4, 1, 3], 3)])
def test_one_number_of_ranks_runs_what_runs_once(runner, monkeypatch, numbers, one):
    monkeypatch.setattr(sys, "argv", ["run.py", "--np", *map(str, numbers)])
    found = runner.stages(runner.parse())
    ran = {stage.name for stage in found if "not once" not in stage.command}
    assert [n for n in numbers if f"ranks, {n} rank{'s' * (n > 1)}" in ran] == [one]
    processes = [stage.processes for stage in found]
    assert processes == sorted(processes, reverse=True)


@pytest.mark.parametrize(
    ("name", "due"),
    [
        (
            "pyx/hpcdist/engine/agreement/hd_check.c",
            {"models", "stress", "scale", "sanitized", "aarch64"},
        ),
        ("pyx/hpcdist/store/hd_requests.c", {"stress", "sanitized"}),
        (
            "hpcdist/parallel/reducer/reducer.py",
            {"rare", "suites", "mpich", "nodes", "parallel", "impi", "newest"},
        ),
        ("hpcdist/codec/_reader.py", {"rare", "mpich", "impi", "newest"}),
        ("tests/stress/node.c", {"stress"}),
        ("tests/model/run.py", {"models"}),
        ("tests/torch/test_scripts.py", {"suites"}),
        ("tests/parallel/ddp/test_ddp.py", {"parallel"}),
        ("tests/conformance/api.txt", {"suites", "mpich", "newest"}),
        ("tests/support/bridge_training.py", {"suites", "mpich", "newest"}),
        ("tests/torch/bridge.py", {"suites", "mpich", "newest"}),
        ("tests/groups/reconfigurations.py", {"rare", "sanitized"}),
        ("pyx/hpcdist/kernels/hd_types.c", {"stress", "scale", "sanitized", "aarch64"}),
        ("examples/train_digits.py", {"rare", "impi"}),
        (".ci/environments", {"sanitized", "rare", "newest"}),
        (".ci/packages", {"sanitized", "rare", "newest"}),
    ],
)
def test_a_change_makes_due_what_depends_on_it(name, due):
    assert (ROOT / name).is_file()
    assert due <= due_after(name)


@pytest.mark.parametrize("room", ["model", "scale", "stress"])
def test_programs_that_no_test_starts_make_due_their_own_stage_alone(room):
    names = [name for name in files("tests") if name.startswith(f"tests/{room}/")]
    due = {"model": "models"}.get(room, room)
    assert names
    assert all(due_after(name) - {"aarch64"} <= {due} for name in names), names
    assert not any(stages.is_test(name) for name in names)


@pytest.mark.parametrize(
    "name",
    [
        "docs/index.md",
        "README.md",
        "CHANGELOG.md",
        ".ci/passed.json",
        ".ci/common",
        ".ci/stages.py",
    ],
)
def test_what_decides_no_result_makes_nothing_due(name):
    assert due_after(name) == set()


def test_a_rare_test_is_in_a_file_of_rare_tests():
    """The stage `rare` runs whole files; tests/run.py leaves every rare test out."""
    for path in kinds.find():
        if "mark.rare" in path.read_text() and path != Path(__file__).resolve():
            assert "rare" in kinds.marks(path), f"{path.relative_to(ROOT)}: mark the whole file"
    assert any("--only-rare" in stage.command for stage in stages.STAGES)


def test_what_has_passed_is_due_again_after_a_change(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(stages, "PASSED", tmp_path / "passed.json")
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "file.c"
    file.write_text("1")
    (tmp_path / "other").write_text("1")
    stage = stages.Stage("one", "tools", "true {seed}", 1, ("a/*",))
    monkeypatch.setattr(stages, "STAGES", (stage,))

    def due() -> bool:
        return not stages.has_passed(stage, stages.tracked())

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["stages.py", *arguments])
        return stages.main()

    assert due()
    assert call("passed", "one", "--seconds", "7", "--seed", "5") == 0
    assert not due()
    assert stages.read()["one"]["seconds"] == 7 and stages.read()["one"]["seed"] == 5
    (tmp_path / "other").write_text("2")
    assert not due()
    file.write_text("2")
    assert due()
    file.write_text("1")
    assert not due()
    (tmp_path / "a" / "more.c").write_text("")
    assert due()


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Three stages that are due: one passed today, one is overdue, one has never passed."""
    each = [stages.Stage(name, "tools", "true", 100, ("*",)) for name in ("fresh", "old", "new")]
    days = stages.datetime.timedelta(days=stages.WAITS + 1)
    dates = {"fresh": stages.today(), "old": stages.today() - days}
    monkeypatch.setattr(stages, "STAGES", tuple(each))
    monkeypatch.setattr(stages, "PASSED", tmp_path / "passed.json")
    stages.write({name: {"files": "", "date": f"{dates[name]}", "seconds": 80} for name in dates})
    return {stage.name: stage for stage in each}


def test_what_waits_longest_runs_first(noted):
    assert [stage.name for stage in stages.due([])] == ["new", "old", "fresh"]


def test_a_stage_waits_that_does_not_fit_unless_it_is_overdue(noted):
    needs = 80 * stages.SLOWER + 60
    assert stages.waits(noted["fresh"], needs) == ""
    assert "fresh is due and was not run" in stages.waits(noted["fresh"], needs - 1)
    assert stages.waits(noted["fresh"], -5).count(" 0 s were left")
    assert stages.waits(noted["old"], 0) == stages.waits(noted["new"], 0) == ""


def test_a_stage_may_wait_for_some_days_and_no_longer(noted, monkeypatch):
    today = stages.today()
    for days in range(stages.WAITS + 3):
        monkeypatch.setattr(stages, "today", lambda d=days: today + stages.datetime.timedelta(d))
        assert bool(stages.waits(noted["fresh"], 0)) is (days <= stages.WAITS)


def test_an_environment_gets_the_packages_of_another_one(tmp_path):
    here, there = tmp_path / "first", tmp_path / "second"

    def install(environment: Path, name: str, files: dict[str, str]) -> None:
        site = environment / "lib" / "python3" / "site-packages"
        info = f"{name}-1.dist-info"
        files = files | {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"}
        files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
        for file, text in files.items():
            path = Path(os.path.normpath(site / file))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    script = "../../../bin/torchrun"
    install(here, "torch", {"torch/a.py": "a", script: f"#!{here}/bin/python\nrun\n"})
    install(here, "NumPy", {"numpy/a.py": "new"})
    install(here, "hpcdist", {"hpcdist/a.py": "a"})
    install(there, "numpy", {"numpy/a.py": "old"})
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "packages", here, there], capture_output=True, text=True
    )
    assert done.stdout == "1 packages: torch\n", done.stdout + done.stderr
    site = there / "lib" / "python3" / "site-packages"
    assert (site / "torch" / "a.py").samefile(here / "lib/python3/site-packages/torch/a.py")
    assert (there / "bin" / "torchrun").read_text() == f"#!{there}/bin/python\nrun\n"
    assert os.access(there / "bin" / "torchrun", os.X_OK)
    assert (site / "numpy" / "a.py").read_text() == "old" and not (site / "hpcdist").exists()
    subprocess.run([sys.executable, ROOT / ".ci" / "packages", "--all", here, there], check=True)
    assert (site / "hpcdist" / "a.py").read_text() == "a"


def shell(folder: Path, script: str, **more) -> subprocess.CompletedProcess:
    """Run a script as one of CI that has sourced `.ci/common`; what it makes is in a folder."""
    text = f"set -euo pipefail; . .ci/common; left_in_shm() {{ :; }}\n{script}"
    return subprocess.run(
        ["bash", "-c", text],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        **more,
    )


def test_a_failure_makes_ci_fail_and_a_success_does_not(tmp_path):
    done = shell(tmp_path, "check 20 one true; check 20 two echo 3 passed")
    assert done.returncode == 0, done.stdout + done.stderr
    done = shell(tmp_path, "check 20 one false || true; check 20 two true")
    assert done.returncode == 1 and done.stdout.endswith(" passed, 1 failed\n"), done.stdout
    assert "FAILED  one: exit status 1" in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_the_caller_has_set_decides_nothing(tmp_path, monkeypatch):
    names = "HPCDIST_CHECK", "HPCDIST_NODES", "PYTHONOPTIMIZE", "PYTEST_ADDOPTS"
    for name in names:
        monkeypatch.setenv(name, "1")
    done = shell(tmp_path, "env")
    assert done.returncode == 0 and "HPCDIST_TEST_CI=" in done.stdout, done.stdout + done.stderr
    assert not [name for name in names if f"\n{name}=" in done.stdout], done.stdout


def test_a_failure_that_cannot_be_noted_ends_ci(tmp_path):
    """As on a full disk: none is lost."""
    script = "rm $work/failures; mkdir $work/failures; check 20 one false || true; echo went on"
    done = shell(tmp_path, script)
    assert done.returncode != 0 and "went on" not in done.stdout, done.stdout
    assert "FAILED  cannot write to " in done.stdout, done.stdout


def test_a_stage_that_is_not_known_fails(tmp_path):
    done = shell(tmp_path, "long nothing 1 || true")
    assert done.returncode == 1 and "FAILED  nothing: no such stage" in done.stdout, done.stdout


@pytest.mark.parametrize(("says", "outcome"), [("no time", "waits"), ("", "runs")])
def test_ci_says_in_its_last_lines_what_waits(tmp_path, says, outcome):
    script = f"""
        cd $work
        mkdir .ci
        printf '#!/bin/sh\necho "{says}"' >.ci/stages.py
        chmod +x .ci/stages.py
        if waits one; then echo waits; else echo runs; fi"""
    done = shell(tmp_path, script)
    first, *_, last = done.stdout.splitlines()
    assert done.returncode == 0 and first == outcome and last == "0 passed, 0 failed", done
    assert ("\nNOTE  no time\n" in done.stdout) is bool(says)


def test_the_clock_decides_nothing(tmp_path):
    """Somebody sets it: bash's SECONDS jump by as much."""
    done = shell(tmp_path, "SECONDS=9999; check 20 one sleep 1.5; SECONDS=-9999")
    assert done.returncode == 0 and "\n0 min " in done.stdout, done.stdout


def test_folders_of_killed_runs_are_removed_and_others_are_not(tmp_path):
    for name in ("dead", "living", "strange"):
        (tmp_path / f"hpcdist-ci.{name}").mkdir()
    (tmp_path / "hpcdist-ci.dead" / "alive").touch()
    lock = tmp_path / "hpcdist-ci.living" / "alive"
    with subprocess.Popen(["flock", lock, "cat"], stdin=subprocess.PIPE) as holder:
        wait_for(lambda: subprocess.call(["flock", "--nonblock", lock, "true"]) != 0)
        done = shell(tmp_path, "beside_another && echo another")
        holder.stdin.close()
    assert done.returncode == 0 and "another" in done.stdout, done.stdout + done.stderr
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"hpcdist-ci.living", "hpcdist-ci.strange"}
    done = shell(tmp_path, "beside_another || echo alone")
    assert done.returncode == 0 and "alone" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["run", "long"])
def test_what_is_due_is_known_or_ci_fails(tmp_path, script):
    """A list of what has passed that cannot be read is not one of stages that all have passed."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / ".ci", tree / ".ci")
    (tree / "tests" / "support").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "support" / "kinds.py", tree / "tests" / "support")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    (tree / ".ci" / "passed.json").write_text("<<<<<<< HEAD\n{\n")
    done = subprocess.run(
        ["timeout", "20", tree / ".ci" / script],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHON": "false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "JSONDecodeError" in done.stderr, done.stdout + done.stderr
    assert "none" not in done.stdout and "passed" not in done.stdout.replace("0 passed", "")
