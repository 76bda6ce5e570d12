"""What the tests of HPCDIST_NAN_CHECK share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hpcdist as dist

NAN = float("nan")


def error_of(call: Callable[[], Any]) -> Exception | None:
    """What a call raises, at once or when it is waited for."""
    try:
        work = call()
        for one in work if isinstance(work, list) else [work]:
            if isinstance(one, dist.Work):
                one.wait()
    except Exception as error:
        return error
    return None
