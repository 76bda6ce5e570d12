"""Python imports this before the program: see the package. It loads nothing of hpcdist."""

import os
import sys


def _restore() -> None:
    """Undo what ``ask_for`` did to this process, and to those that it will start."""
    here, environ = os.path.dirname(os.path.abspath(__file__)), os.environ
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    sys.path_importer_cache.pop(here, None)
    first, _, rest = environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == here:
        environ.pop("PYTHONPATH")
        if rest:
            environ["PYTHONPATH"] = rest
    kept = environ.pop("_PYTHONUNBUFFERED_OF_RANK", None)
    if kept is not None:
        environ["PYTHONUNBUFFERED"] = kept


def _write_lines() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # no stream is there if it was closed
        if reconfigure is not None:
            reconfigure(line_buffering=True)


_restore()
_write_lines()
# The environment's own, which this one hides. Without one this import fails, and so does Python's
# of this module, which Python expects of an environment that has none.
del sys.modules[__name__]
__import__("sitecustomize")
