"""Settings: where they come from, what they accept, and that all of them are in the table."""

from __future__ import annotations

import logging
import re

import pytest
from places import ROOT

from hpcdist import config, log
from hpcdist.config import Option

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def test_default_when_unset_or_empty():
    assert config.get("check", {}) == "on"
    assert config.get("check", {"HPCDIST_CHECK": " "}) == "on"
    assert config.get("timeout", {}) == 1800.0


def test_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("HPCDIST_CHECK", "FULL")
    monkeypatch.setenv("HPCDIST_TIMEOUT", "2.5")
    assert config.get("check") == "full"
    assert config.get("timeout") == 2.5


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("seconds", "90", 90.0),
        ("seconds", "0.5", 0.5),
        ("bytes", "4096", 4096),
        ("bytes", "4k", 4096),
        ("bytes", "2M", 2 << 20),
        ("bytes", "1G", 1 << 30),
        ("int", "7", 7),
        ("bool", "Yes", True),
        ("bool", "0", False),
        ("str", " text ", "text"),
    ],
)
def test_kinds(kind, text, value):
    parsed = Option("some", kind, None, "doc").parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("option", "text", "hint"),
    [
        (Option("a", "choice", "x", "", choices=("x", "y")), "z", "one of x, y"),
        (Option("a", "seconds", 1.0, "", minimum=0.001), "0", "at least 0.001"),
        (Option("a", "seconds", 1.0, ""), "nan", "number of seconds"),
        (Option("a", "seconds", 1.0, ""), "soon", "number of seconds"),
        (Option("a", "bytes", 1, ""), "-1", "at least 0"),
        (Option("a", "bytes", 1, ""), "4T", "k, M, G"),
        (Option("a", "int", 1, ""), "1.5", "whole number"),
        (Option("a", "bool", True, ""), "maybe", "0 or 1"),
    ],
)
def test_refusals_name_variable_value_and_what_is_accepted(option, text, hint):
    with pytest.raises(ValueError) as caught:
        option.parse(text)
    message = str(caught.value)
    assert "HPCDIST_A" in message and repr(text) in message and hint in message


def test_numbers_that_no_c_integer_holds_are_refused_by_name():
    numbers = [each for each in config.options() if each.kind in ("int", "bytes")]
    assert len(numbers) > 4
    for each in numbers:
        with pytest.raises(ValueError, match=f"{each.variable}=.*at most"):
            each.parse("9" * 20)


def test_what_is_wrong_and_what_nothing_reads():
    env = {
        "HPCDIST_TIMEOUT": "soon",
        "HPCDIST_CHECK_TRANSPORT": "tcp",
        "HPCDIST_CHECK": "full",
        "HPCDIST_TIMOUT": "60",
        "HPCDIST_MPICC": "mpicc",
        "HPCDIST_TEST_SEED": "1",
        "HPCDIST_QZX": "",
        "OMPI_CHECK": "1",
    }
    faults = config.faults(env)
    assert sorted(faults) == ["HPCDIST_CHECK_TRANSPORT", "HPCDIST_TIMEOUT"]
    assert "'tcp'" in faults["HPCDIST_CHECK_TRANSPORT"] and "'soon'" in faults["HPCDIST_TIMEOUT"]
    assert config.unread(env) == {"HPCDIST_QZX": "", "HPCDIST_TIMOUT": "HPCDIST_TIMEOUT"}
    assert config.faults({}) == config.unread({}) == {}


def test_unknown_setting():
    with pytest.raises(KeyError, match="no setting 'speed'.*check"):
        config.get("speed")


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="exists already"):
        config.register(Option("check", "bool", True, "again"))


def test_describe_lists_all_and_survives_a_wrong_value():
    env = {"HPCDIST_TIMEOUT": "never", "HPCDIST_CHECK": "off"}
    rows = {row["variable"]: row for row in config.describe(env)}
    assert set(rows) == {option.variable for option in config.options()}
    assert rows["HPCDIST_CHECK"]["value"] == "off" and rows["HPCDIST_CHECK"]["is_set"]
    assert "not valid" in rows["HPCDIST_TIMEOUT"]["value"]
    assert not rows["HPCDIST_LOG"]["is_set"]


def test_every_setting_has_a_default_it_would_accept_and_a_doc():
    for option in config.options():
        assert option.doc.endswith("."), option.name
        if option.default not in ("", None):
            assert option.parse(str(option.default)) == option.default


def test_every_variable_that_is_read_is_in_the_table():
    known = {option.variable for option in config.options()}
    # those of the build and of the tests themselves are read before there is a package
    known |= {"HPCDIST_MPI", "HPCDIST_MPICC", "HPCDIST_MPICC_ALL"}
    native = [each for kind in ("c", "h", "px?", "pyx") for each in ROOT.glob(f"pyx/**/*.{kind}")]
    assert {each.suffix for each in native} == {".c", ".h", ".pxd", ".pxi", ".pyx"}
    sources = [*ROOT.glob("hpcdist/**/*.py"), *native]
    for source in sources:
        for name in re.findall(r"HPCDIST_[A-Z]\w+", source.read_text()):
            assert name in known, f"{source.name} speaks of {name}, which config.py does not list"


@pytest.fixture
def quiet_logger():
    logger = logging.getLogger("hpcdist")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield logger
    logger.level, logger.propagate, logger.handlers[:] = before
    log.set_rank(None)


def test_log_carries_the_rank(quiet_logger, capsys):
    log.set_rank(3, 8)
    log.configure("info")
    log.configure("info")
    log.get_logger("test").info("hello %d", 7)
    log.get_logger("test").debug("too fine")
    text = capsys.readouterr().err
    assert text.count("hello 7") == 1
    assert "[rank 3/8] hello 7" in text and "hpcdist.test INFO" in text
    assert "too fine" not in text


def test_log_is_left_to_the_program_by_default(quiet_logger, caplog):
    log.configure("")
    assert quiet_logger.handlers == []
    with caplog.at_level(logging.INFO, "hpcdist"):
        log.get_logger().info("seen by the program")
    assert "seen by the program" in caplog.text


def test_other_programs_variables_count_where_the_own_one_is_unset():
    assert config.get("nccl_blocking_wait", {"TORCH_NCCL_BLOCKING_WAIT": "1"}) is True
    both = {"TORCH_NCCL_BLOCKING_WAIT": "1", "HPCDIST_NCCL_BLOCKING_WAIT": "0"}
    assert config.get("nccl_blocking_wait", both) is False
    with pytest.raises(ValueError, match=r"^TORCH_NCCL_RANKS_PER_ROOT='x' is not valid"):
        config.get("nccl_ranks_per_root", {"TORCH_NCCL_RANKS_PER_ROOT": "x"})
    rows = config.describe({"TORCH_NCCL_HIGH_PRIORITY": "0"})
    (row,) = [each for each in rows if each["variable"] == "HPCDIST_NCCL_HIGH_PRIORITY"]
    assert row["is_set"] and row["value"] is False


@pytest.mark.parametrize("name", ["recorder", "node_memory"])
def test_numbers_that_no_machine_has_are_refused_by_name(name):
    variable = f"HPCDIST_{name.upper()}"
    with pytest.raises(ValueError, match=f"^{variable}='9{{20}}' is not valid: .* at most "):
        config.get(name, {variable: "9" * 20})
