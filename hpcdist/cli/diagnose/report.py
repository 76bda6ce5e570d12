"""Merges the sections of all ranks into one report, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from . import advice
from .binding import short
from .section import FAULT, NOTE, WARNING

#: Version of the JSON form. New keys leave it; a change of meaning raises it.
SCHEMA = 1
_ORDER = (FAULT, WARNING, NOTE)
#: Facts without which nothing works if ranks differ in them.
_VITAL = ("hpcdist", "run time: version", "built with: MPI", "MPI's size")


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Bring the ranks' sections together.

    Parameters
    ----------
    parts : list of dict
        One per rank: ``rank``, ``host``, ``sections`` as :meth:`Section.plain` gives them.

    Returns
    -------
    dict
        ``schema``, ``ranks``, ``hosts``, ``sections``, ``findings``, ``all_reduce``.
    """
    hosts: dict[str, list[int]] = {}
    for part in parts:
        hosts.setdefault(part["host"], []).append(part["rank"])
    sections: dict[str, dict[str, Any]] = {}
    findings: dict[tuple[str, ...], dict[str, Any]] = {}
    for part in parts:
        for each in part["sections"]:
            section = sections.setdefault(
                each["name"], {"name": each["name"], "title": each["title"], "facts": {}}
            )
            for fact in each["facts"]:
                values = section["facts"].setdefault(fact["name"], {"same": fact["same"], "is": {}})
                ranks = values["is"].setdefault(json.dumps(fact["value"]), [])
                ranks.append((part["rank"], part["host"]))
            for found in each["findings"]:
                key = (each["name"], found["severity"], found["what"], found["fix"])
                merged = findings.setdefault(key, {"section": each["name"], **found, "ranks": []})
                merged["ranks"].append(part["rank"])
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "ranks": len(parts),
        "hosts": hosts,
        "sections": [],
        "findings": list(findings.values()),
        "all_reduce": None,
    }
    for section in sections.values():
        facts = []
        for name, values in section["facts"].items():
            rows = [
                {"value": json.loads(text), "ranks": [rank for rank, _ in ranks]}
                for text, ranks in values["is"].items()
            ]
            facts.append({"name": name, "values": rows})
            report["findings"] += _differences(section["name"], name, values, len(parts))
        report["sections"].append({**section, "facts": facts})
    return report


def _differences(
    section: str, name: str, values: dict[str, Any], ranks: int
) -> list[dict[str, Any]]:
    """Return findings where ranks differ that should not, or only some have the fact at all."""
    groups = list(values["is"].values())
    if values["same"] == "rank":
        return []
    if values["same"] == "host":
        groups = [
            [(rank, host) for rank, host in group if host == one]
            for one in {host for group in groups for _, host in group}
            for group in groups
            if sum(any(host == one for _, host in each) for each in groups) > 1
        ]
        groups = [group for group in groups if group]
    there = sum(map(len, groups))
    if len(groups) < 2 and (values["same"] == "host" or there == ranks):
        return []
    said = "; ".join(
        f"{json.loads(text)} on ranks {short(rank for rank, _ in group)}"
        for text, group in list(values["is"].items())[:4]
    )
    missing = "" if there == ranks or values["same"] == "host" else "; not set on the others"
    fix = (
        f"give all ranks the same environment: {advice.give('environment')}, srun --export=ALL; "
        "the same module loads and virtual environment on all hosts"
    )
    return [
        {
            "section": section,
            "severity": FAULT if name in _VITAL else WARNING,
            "what": f"ranks differ in {name}: {said}{missing}",
            "fix": fix,
            "ranks": sorted(rank for group in groups for rank, _ in group),
        }
    ]


def status(report: dict[str, Any]) -> int:
    """The exit status: 1 if there is a fault, else 0."""
    return int(any(each["severity"] == FAULT for each in report["findings"]))


def as_json(report: dict[str, Any]) -> str:
    """The report with ``ok`` and ``exit_status``, as JSON."""
    code = status(report)
    return json.dumps({**report, "ok": not code, "exit_status": code}, indent=2, sort_keys=True)


def as_text(report: dict[str, Any]) -> str:
    """The report for people: facts by subject, then what is wrong, faults first."""
    hosts = ", ".join(f"{host} (ranks {short(ranks)})" for host, ranks in report["hosts"].items())
    lines = [f"hpcdist diagnose: {report['ranks']} rank(s) on {hosts}"]
    for section in report["sections"]:
        lines += ["", section["title"]]
        for fact in section["facts"]:
            for place, row in enumerate(fact["values"]):
                name = fact["name"] if place == 0 else ""
                alone = len(row["ranks"]) == report["ranks"]
                who = "" if alone else f"   [rank {short(row['ranks'])}]"
                lines.append(f"  {name:<26} {row['value']}{who}")
    if report["all_reduce"]:
        lines += ["", "all_reduce", *textwrap.wrap(
            report["all_reduce"]["explained"], 98, initial_indent="  ", subsequent_indent="  "
        )]  # fmt: skip
    lines += ["", "Findings"]
    found = sorted(report["findings"], key=lambda each: _ORDER.index(each["severity"]))
    for each in found:
        who = "" if len(each["ranks"]) == report["ranks"] else f" [rank {short(each['ranks'])}]"
        head = f"  {each['severity'].upper()}{who}: "
        lines += textwrap.wrap(head + each["what"], 98, subsequent_indent="    ")
        lines += textwrap.wrap("    fix: " + each["fix"], 98, subsequent_indent="    ")
    if not found:
        lines.append("  none")
    count = sum(each["severity"] == FAULT for each in found)
    lines += ["", f"{count} fault(s), exit status {status(report)}"]
    return "\n".join(lines)
