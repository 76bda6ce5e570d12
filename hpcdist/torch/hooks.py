"""Hooks of groups of stock torch.distributed: hpcdist's, with what torch passes to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch._C import _distributed_c10d as c10d

from hpcdist.groups.hooks import PostHookArgs, PreHookArgs
from hpcdist.operations import OPERATIONS
from hpcdist.torch.work import BridgeWork


def before(hook: Callable[[PreHookArgs], None]) -> Callable[[PreHookArgs], None]:
    """Return a function for hpcdist's groups that calls a hook before an operation."""
    return _with(hook, lambda seen: replace(seen, name=_name(seen.name)))


def after(hook: Callable[[PostHookArgs], None]) -> Callable[[PostHookArgs], None]:
    """Return a function for hpcdist's groups that calls a hook after an operation has begun."""

    def seen_by_torch(seen: PostHookArgs) -> PostHookArgs:
        work = None if seen.work is None else BridgeWork(seen.work, [])
        return replace(seen, name=_name(seen.name), work=work)

    return _with(hook, seen_by_torch)


def _with(hook: Callable[[Any], None], change: Callable[[Any], Any]) -> Callable[[Any], None]:
    if not callable(hook):
        raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
    return lambda seen: hook(change(seen))


def _name(operation: str) -> Any:
    """Return torch's HookOpName of an operation; its text where torch has none (up to 2.13)."""
    about = OPERATIONS.get(operation)
    text = "UNKNOWN" if about is None else (about.c10d_before or about.c10d).strip("_").upper()
    kinds = getattr(c10d, "HookOpName", None)
    return text if kinds is None else kinds.__members__.get(text, kinds.UNKNOWN)
