"""The state in Prometheus's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

#: Name, field of a row, meaning; each by rank and host.
_GAUGES = (
    ("alive", "alive", "Whether the rank's process lives."),
    ("in_operation", "inside", "Whether the rank is in an operation."),
    ("operation_seconds", "seconds", "For how long the rank is in its operation, or outside."),
    ("silent_seconds", "silent", "Since when the rank's watchdog has not run."),
    ("calls_per_second", "call_rate", "Operations begun per second since the last sample."),
    ("bytes_per_second", "byte_rate", "Bytes of the operations begun per second."),
    ("resident_memory_bytes", "resident", "Resident memory of the rank's process."),
    ("resident_memory_most_bytes", "resident_most", "The most resident memory it had."),
)


def exposition(state: dict[str, Any]) -> bytes:
    """Return the state as text in Prometheus's form.

    Parameters
    ----------
    state : dict
        Of :meth:`hpcdist.debug.server.state.State.sample`.

    Returns
    -------
    bytes
        UTF-8.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_State(state))
    return bytes(generate_latest(registry))


def _survival(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    """What has become of a job that goes on when a rank dies; each rank knows it."""

    def most(field: str) -> float:
        return max((float(row[field]) for row in rows), default=0.0)

    yield GaugeMetricFamily("hpcdist_spares", "Spares that wait.", value=most("spares"))
    deaths, times = most("deaths"), most("recoveries")
    yield CounterMetricFamily("hpcdist_deaths", "Processes that have died.", value=deaths)
    yield CounterMetricFamily("hpcdist_recoveries", "How often the others went on.", value=times)
    # No counter: a former spare does not know it of those before it.
    yield GaugeMetricFamily(
        "hpcdist_recovery_seconds", "Seconds that recoveries took.", value=most("recovering")
    )


class _State:
    """What generate_latest asks."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        state, labels = self._state, ["rank", "host"]
        for name, field, meaning in _GAUGES:
            gauge = GaugeMetricFamily(f"hpcdist_{name}", meaning, labels=labels)
            for row in state["rows"]:
                gauge.add_metric([str(row["rank"]), row["host"]], float(row[field]))
            yield gauge
        calls = CounterMetricFamily("hpcdist_calls", "Operations begun.", labels=labels)
        for row in state["rows"]:
            calls.add_metric([str(row["rank"]), row["host"]], float(row["operations"]))
        yield calls
        late = GaugeMetricFamily(
            "hpcdist_others_waited_share",
            "Share of the time of recent collectives that the others waited for this rank.",
            labels=["rank"],
        )
        for one in state["slowest"]:
            late.add_metric([str(one["rank"])], one["share"])
        yield late
        yield GaugeMetricFamily(
            "hpcdist_ranks_missing",
            "Ranks that others have waited for in a collective for more than a second.",
            value=len({rank for one in state["hangs"] for rank in one["missing"]}),
        )
        yield GaugeMetricFamily("hpcdist_ranks", "Ranks of the job.", value=state["size"])
        yield from _survival(state["rows"])
        silent = GaugeMetricFamily(
            "hpcdist_node_report_age_seconds", "Age of the node's last report.", labels=["node"]
        )
        for node in state["nodes"]:
            silent.add_metric([node["node"]], node["age"])
        yield silent
