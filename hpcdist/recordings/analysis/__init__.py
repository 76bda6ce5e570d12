"""What the recorders of a job tell together: divergence, lateness, bandwidth, a timeline."""

from .bars import timeline
from .match import Collective, Divergence, collectives, divergences
from .page import page
from .report import analysis
from .text import lines

__all__ = [
    "Collective",
    "Divergence",
    "analysis",
    "collectives",
    "divergences",
    "lines",
    "page",
    "timeline",
]
