"""Numbers on the command line: what is said of a text that is none."""

from __future__ import annotations

import pytest

from hpcdist import cli
from hpcdist.cli import numbers

pytestmark = pytest.mark.local


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch", "-n", "x", "p"), "'x' is no whole number of at least 1"),
        (("launch", "-n", "0", "p"), "'0' is no whole number of at least 1"),
        (("launch", "-n", "1", "--standby", "-1", "p"), "'-1' is no whole number of at least 0"),
        (("diagnose", "--timeout", "nan"), "'nan' is no number of seconds above 0"),
        (("diagnose", "--timeout", "soon"), "'soon' is no number of seconds above 0"),
        (("top", "--interval", "soon"), "soon is not a number of seconds from 0"),
    ],
)
def test_numbers_that_are_none(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_very_long_time():
    """More seconds than a timedelta takes, or a wait of threading's."""
    assert numbers.seconds("1e300") == 1e9
