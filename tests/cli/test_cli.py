"""python -m hpcdist itself: the list of commands, the version, what it refuses."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

import hpcdist
from hpcdist import cli

pytestmark = pytest.mark.local


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcdist", *arguments],
        cwd="/", capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_commands_are_listed_with_a_line_each(arguments, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    if arguments:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
    else:
        assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    listed = dict(re.findall(r"^  (\S+) +(.+)$", printed.out, re.M))
    assert cli.COMMANDS.items() <= listed.items() and not printed.err


def test_without_arguments_it_starts_nothing():
    done = run()
    assert done.returncode == 0 and "merge-traces" in done.stdout and not done.stderr


def test_the_version():
    version = importlib.metadata.version("hpcdist")
    done = run("--version")
    assert done.returncode == 0 and done.stdout == f"hpcdist {version}\n"
    assert hpcdist.__version__ == version and "__version__" in dir(hpcdist)


def test_a_command_that_does_not_exist():
    done = run("benchmark")
    assert done.returncode == 2 and "invalid choice: 'benchmark'" in done.stderr
    assert all(name in done.stderr for name in cli.COMMANDS)


#: Without a buffer argparse itself would hide that its help is lost.
BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}


@pytest.mark.parametrize("words", [(), ("--version",), ("diagnose",)])
def test_an_output_that_takes_no_more(words):
    command = [sys.executable, "-m", "hpcdist", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            cwd="/",
            env=BUFFERED,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1, done.stderr
    assert "hpcdist: the output is lost: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_who_has_gone():
    command = [sys.executable, "-m", "hpcdist"]
    pipe = subprocess.PIPE
    job = subprocess.Popen(command, cwd="/", env=BUFFERED, stdout=pipe, stderr=pipe)
    job.stdout.close()
    assert job.stderr.read() == b"" and job.wait(60) == 1


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_answers_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m hpcdist {name}" in capsys.readouterr().out


def test_a_socket_whose_name_is_too_long(capsys):
    assert cli.main(["attach", "/tmp/" + 200 * "x"]) == 1
    assert "path too long" in capsys.readouterr().err
