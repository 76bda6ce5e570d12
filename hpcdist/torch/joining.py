"""What torch's DistributedDataParallel calls while it is made on a former spare.

The other ranks have made theirs, and wait for the State of this process. So what the constructor
asks is answered here: the parameters come with the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcdist.groups import joining
from hpcdist.groups.world import world
from hpcdist.torch.modules import being_made


def register() -> None:
    """Answer such calls from now on; once is enough."""
    if answer not in joining.answers:
        joining.answers.append(answer)


def answer(operation: str) -> Callable[..., Any] | None:
    """Return what stands for an operation that is about to be called; None if nothing does.

    Parameters
    ----------
    operation : str
        Its name in hpcdist's communicators.
    """
    stands, module = _ANSWERS.get(operation), being_made()
    if stands is None or module is None:
        return None
    world.joining.deferred.add(module)  # the commit must contain it
    return stands


def _broadcast(tensor: Any, *_rest: Any) -> Any:
    return world.pg.carrier.finished([tensor])


def _all_gather(gathered: list[Any], own: Any, *_rest: Any) -> Any:
    for each in gathered:
        each.copy_(own)
    return world.pg.carrier.finished(gathered)


#: The parameters are compared by these, and copied from rank 0.
_ANSWERS: dict[str, Callable[..., Any]] = {"broadcast": _broadcast, "all_gather": _all_gather}
