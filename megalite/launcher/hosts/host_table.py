"""The table of a preflight: hosts as columns, facts as rows, plain text of at most 110 columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megalite.launcher.hosts.host_report import HostFinding, HostReport, clock_ahead, size

WIDTH = 110
_MARKS = {"note": "  ", "warning": "? ", "error": "! "}  # the gravest last
_LABEL = 14
_LONGEST_CELL = 28


def table(reports: Sequence[HostReport], findings: Sequence[HostFinding]) -> Iterator[str]:
    """Yield the lines: the cells with an error begin with "!", those with a warning with "?"."""
    ranked = sorted(findings, key=lambda finding: list(_MARKS).index(finding.level))
    marks = {(each.host, each.row): _MARKS[each.level] for each in ranked}
    columns = [_column(report, reports[0], marks) for report in _shown(reports, findings)]
    rows = [row for row in columns[0] if any(column[row].strip() not in ("", "-") for column in columns)]
    if left := len(reports) - len(columns):
        yield f"{left} more hosts passed and are not shown"
    for some in _fitting(columns):
        widths = [max(len(column[row]) for row in rows) for column in some]
        for row in rows:
            cells = (f"{column[row]:<{width}}" for column, width in zip(some, widths, strict=True))
            yield f"{row:<{_LABEL}}{'  '.join(cells)}".rstrip()
        yield ""


def _shown(reports: Sequence[HostReport], findings: Sequence[HostFinding]) -> list[HostReport]:
    """Leave out hosts that passed, if there are too many for one screen; the first host stays."""
    if len(reports) <= 8:
        return list(reports)
    named = {each.host for each in findings if each.level != "note"}
    kept = [report for report in reports[1:] if report.host in named]
    passed = [report for report in reports[1:] if report.host not in named]
    shown = {reports[0].host, *(report.host for report in kept)}
    shown.update(report.host for report in passed[: max(0, 7 - len(kept))])
    return [report for report in reports if report.host in shown]


def _fitting(columns: Sequence[Mapping[str, str]]) -> Iterator[list[Mapping[str, str]]]:
    """Yield the columns in groups that fit the width."""
    group: list[Mapping[str, str]] = []
    used = _LABEL
    for column in columns:
        width = max(map(len, column.values())) + 2
        if group and used + width > WIDTH + 2:
            yield group
            group, used = [], _LABEL
        group.append(column)
        used += width
    yield group


def _column(report: HostReport, first: HostReport, marks: Mapping[tuple[str, str], str]) -> dict[str, str]:
    cells = {"": report.host, **_cells(report, first)}
    return {row: _cell(text, marks.get((report.host, row), "  ")) for row, text in cells.items()}


def _cell(text: str, mark: str) -> str:
    text = text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 3] + "..."
    return mark + (text or "-")


def _cells(report: HostReport, first: HostReport) -> dict[str, str]:
    """Return row -> text of one host, all rows for every host."""
    facts = report.facts
    reason = {"unreachable": "no", "silent": "no answer"}.get(report.failure, "yes")
    cells = {
        "reachable": reason,
        "folder": "missing" if report.failure == "folder" else "there" if facts else "",
        "python": {"interpreter": "missing", "crash": "no facts"}.get(
            report.failure, facts.get("python", "")
        ),
    }
    for name in ("megalite", "torch", "deepspeed", "transformers", "library"):
        cells[name] = (facts[name] or "missing") if facts else ""
    return cells | _files(facts, report.shared) | _network(report, first) | _machine(facts, report.slots)


def _files(facts: Mapping[str, Any], shared: bool | None) -> dict[str, str]:
    if not facts:
        return {"run file": "", "run folder": ""}
    run_file = facts["run_file"]
    folder = {True: "shared", False: "not shared", None: ""}[shared]
    return {"run file": run_file["error"] or run_file["digest"], "run folder": facts["disk_error"] or folder}


def _network(report: HostReport, first: HostReport) -> dict[str, str]:
    ways = {"to first": report.to_first, "from first": report.from_first, "to launcher": report.to_launcher}
    cells = {"address": ""}
    for way in (report.to_first, report.to_launcher):
        if way and way["own"]:
            cells["address"] = f"{way['own']} {way['interface']}".rstrip()
            break
    for row, way in ways.items():
        cells[row] = "" if way is None else "no" if way["error"] else "yes"
    ahead = clock_ahead(report, first)
    return cells | {"clock": "" if ahead is None else f"{ahead:+.1f} s".replace("-0.0", "+0.0")}


def _machine(facts: Mapping[str, Any], slots: int) -> dict[str, str]:
    names = {"memory": "memory_bytes", "/dev/shm": "shared_memory_bytes", "disk": "disk_bytes"}
    cells = {row: size(facts[key]) if facts.get(key) is not None else "" for row, key in names.items()}
    return {
        "slots": str(slots),
        "cores": str(facts.get("cores", "")),
        "GPUs": str(facts.get("gpus", "")),
        **cells,
    }
