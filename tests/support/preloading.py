"""Libraries that a job loads before all others, to stand between hpcdist and what it calls."""

from __future__ import annotations

import subprocess
from pathlib import Path


def preload(source: str, file: Path, compiler: str = "gcc") -> dict[str, str]:
    """Compile C code, beside a file that gets it; return the variable that lets a job load it."""
    library = file.with_suffix(".so")
    file.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, file, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}
