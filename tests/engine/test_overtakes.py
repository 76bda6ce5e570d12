"""A receive whose message is under way is not refused for a later one of another type."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).with_name("overtakes.py"))


def test_a_short_message_overtakes_a_long_one() -> None:
    # Over TCP a long message needs its sender; in memory the receiver may read it alone.
    ended = run_job(2, PROGRAM, env={"OMPI_MCA_btl": "tcp,self"}, limit=40)
    assert "received 1 to 1, and 7" in ended.text, ended.text
    assert ended.code == 0, ended.text
