"""Reads rank and world size from a URL's query."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit


def stated(url: str) -> tuple[int, int]:
    """Return rank and world size from a URL's query; -1 for what it omits."""
    query = dict(parse_qsl(urlsplit(url).query))
    try:
        return int(query.get("rank", "-1")), int(query.get("world_size", "-1"))
    except ValueError:
        raise ValueError(f"rank and world_size in {url} must be whole numbers") from None


def complete(url: str) -> tuple[int, int]:
    """Return rank and world size for a scheme that requires them.

    Raises
    ------
    ValueError
        If one is missing, or is not a whole number.
    """
    query = dict(parse_qsl(urlsplit(url).query))
    for name, words in (("rank", "rank"), ("world_size", "world size")):
        if name not in query:
            raise error(
                url,
                f"{words} parameter missing: pass {name}= to init_process_group, or add it to the "
                "URL, as in ?rank=0&world_size=2",
            )
    return stated(url)


def error(url: str, text: str) -> ValueError:
    """Return the error for a URL that is incomplete or wrong."""
    return ValueError(f"{urlsplit(url).scheme}:// rendezvous: {text} (the URL was {url})")
