"""Looking into a running job: debug levels, a debugger on one rank, a page that shows all ranks."""

from hpcdist.debug_level import (
    DebugLevel,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)

from .breakpoints import breakpoint
from .server.start import start_debug_server, stop_debug_server

__all__ = [
    "DebugLevel",
    "breakpoint",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
    "start_debug_server",
    "stop_debug_server",
]
