"""Which torch this is, which hpcdist was tested with, and what an error of another one says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hpcdist.errors import DistError

#: The oldest torch that is taken, and the newest that hpcdist was run with.
OLDEST = (2, 10)
NEWEST = (2, 15)


def version(text: str | None = None) -> tuple[int, int]:
    """Major and minor number of torch.

    Local to this process.

    Parameters
    ----------
    text : str, optional
        For example ``"2.13.0+cpu"``; by default that of the torch which is imported.
    """
    if text is None:
        import torch

        text = str(torch.__version__)
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def untested() -> str:
    """Return a warning if torch is newer than what hpcdist was tested with.

    Local to this process.

    Returns
    -------
    str
        A sentence; empty if it is not.
    """
    found = version()
    if found <= NEWEST:
        return ""
    return (
        f"hpcdist was tested with torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, "
        f"and this is {found[0]}.{found[1]}: install one of those (pip install "
        f'"torch<{NEWEST[0]}.{NEWEST[1] + 1}"), or look for a newer hpcdist'
    )


@contextlib.contextmanager
def explain() -> Iterator[None]:
    """Context manager: an error of a torch that is too new names that version.

    Local to this process. Errors of hpcdist's own, and of wrong arguments, pass as they are.

    Raises
    ------
    ImportError
        In place of torch's, which is its cause.
    RuntimeError
        In place of what else torch raised.
    """
    try:
        yield
    except (DistError, ValueError):
        raise
    except Exception as error:
        text = untested()
        if not text:
            raise
        kind = ImportError if isinstance(error, ImportError) else RuntimeError
        raise kind(f"{text}. What failed: {type(error).__name__}: {error}") from error
