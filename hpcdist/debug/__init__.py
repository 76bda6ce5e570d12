"""Looking into a running job: debug levels, and a debugger on one rank while the others wait."""

from hpcdist.debug_level import (
    DebugLevel,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)

from .breakpoints import breakpoint

__all__ = [
    "DebugLevel",
    "breakpoint",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
]
