"""Whether this process may use pickle for objects: never, unless the user allows it."""

from __future__ import annotations

from types import TracebackType

from hpcdist import config

HOW_TO_ALLOW = (
    "If every rank of the job trusts every other, pickle can be allowed: pass pickle=True to the "
    "call on all ranks, or call hpcdist.allow_pickle() (also `with hpcdist.allow_pickle():`), or "
    "set HPCDIST_ALLOW_PICKLE=1."
)

config.register(
    config.Option(
        "allow_pickle",
        "bool",
        False,
        "Whether object collectives may pickle what the typed codec does not carry, and load "
        "pickles that other ranks send. A pickle can execute any code: leave it off unless every "
        "rank is trusted. hpcdist.allow_pickle() and pickle= go before it.",
    )
)

# None: nothing was chosen in the program, so the configuration decides.
_chosen: bool | None = None


class allow_pickle:
    """Allow or forbid pickle for object collectives in this process.

    By default objects travel in hpcdist's typed codec, which executes nothing, and an object of
    another type is a ``TypeError``. With pickle allowed, an object that the codec does not know is
    pickled as a whole, and pickles that other ranks send are loaded. Loading a pickle runs
    whatever code it asks for: allow it only when every rank is trusted.

    The choice is process-wide and takes effect at once; used in a ``with`` statement, the earlier
    choice is restored at its end. It is local: call it on every rank that sends or receives.

    Parameters
    ----------
    allowed : bool
        ``True`` allows, ``False`` forbids, whatever ``HPCDIST_ALLOW_PICKLE`` says.

    Examples
    --------
    >>> with hpcdist.allow_pickle():
    ...     hpcdist.broadcast_object_list(objects, src=0)

    Notes
    -----
    Not collective. Source: hpcdist; torch pickles always.
    """

    def __init__(self, allowed: bool = True) -> None:
        global _chosen
        self._before = _chosen
        _chosen = bool(allowed)

    def __enter__(self) -> allow_pickle:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _chosen
        _chosen = self._before


def pickle_allowed(argument: bool | None = None) -> bool:
    """Return whether pickle may be used: the call's argument, the program's choice, the setting.

    Parameters
    ----------
    argument : bool or None
        The call's own ``pickle=`` argument; ``None`` leaves it to :class:`allow_pickle` and then to
        ``HPCDIST_ALLOW_PICKLE``.
    """
    if argument is not None:
        return bool(argument)
    if _chosen is not None:
        return _chosen
    return bool(config.get("allow_pickle"))
