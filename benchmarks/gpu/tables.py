"""The tables of the GPU suite, in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.monitor.cards import find_card

NOT_MEASURED = "not measured"
_MARKS = {"failed": "FAILED: ", "left_out": "left out: ", "said": ""}


def markdown(report: Mapping[str, Any]) -> str:
    """All tables; what the report lacks is not measured."""
    lines = ["# The operators on a GPU", ""]
    if report:
        facts = f"torch {report.get('torch', 'unknown')}, commit {report.get('commit', 'unknown')[:12]}"
        lines += [f"{report['date']}, {report['chip']}, {facts}."]
        lines += [
            "",
            f"{report.get('built', 'Nothing is known of the library')}. {report['seconds']} s in all.",
        ]
    else:
        lines += [f"On a GPU: {NOT_MEASURED} yet."]
    lines += [
        "",
        "Written by `python -m benchmarks.gpu_suite`, whose help says what is measured; not edited by hand.",
    ]
    for name, reason in report.get("failed", {}).items():
        lines += ["", f"**{name} failed**: {reason}"]
    for title, table in (
        ("Parts", _parts_table(report)),
        (
            "Smoke: training, checkpoints, export and generation by the commands",
            _steps_table(report, "smoke"),
        ),
        ("Ranks: layouts of several cards beside one rank, float32", _steps_table(report, "ranks")),
        ("Self-test", [f"    {row['said']}" for row in report.get("selftest", [])] or [NOT_MEASURED]),
        (
            "Training with the operators that the self-test chose, beside plain torch",
            _steps_table(report, "fused"),
        ),
        ("Correctness: the error's share of what is allowed", _checks_table(report)),
        ("Parity: one rank on the card beside the CPU in float64", _parity_table(report)),
        ("Hardware queues: whether a stream computes while others wait", _queues_table(report)),
        ("Ceilings", _ceilings_table(report)),
        ("Times, as shares of the ceiling", _times_table(report)),
        ("Training a Llama of 1.1 billion parameters, bf16, 2048 tokens a sequence", _training_table(report)),
        ("The kernels of a training step that take longest", _profile_table(report)),
        ("Planner: peak memory and step time, measured and predicted", _prediction_table(report)),
        ("Generation of that model, bf16", _decoding_table(report)),
        ("The 3D job over CPU ranks", _scaling_table(report)),
    ):
        lines += ["", f"## {title}", "", *table]
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    words = [headings, ["---"] * len(headings), *rows]
    return [
        "| " + " | ".join(" ".join(str(word).replace("|", "/").split()) for word in row) + " |"
        for row in words
    ]


def _parts_table(report: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in report.get("parts", []):
        left_out = row.get("left_out", "")
        result = "FAILED" if row["failed"] else "left out" if left_out else "done"
        commit = row.get("commit", report.get("commit", "unknown"))[:12]
        rows.append([row["part"], result, row["seconds"], commit, row["failed"] or left_out])
    return _table(["part", "result", "seconds", "commit", "reason"], rows or [[NOT_MEASURED] * 5])


def _steps_table(report: Mapping[str, Any], part: str) -> list[str]:
    rows = []
    for row in report.get(part, []):
        said = next(f"{mark}{row[key]}" for key, mark in _MARKS.items() if key in row)
        rows.append([row["step"], row.get("seconds", ""), said])
    return _table(["step", "seconds", "shown"], rows or [[NOT_MEASURED] * 3])


def _checks_table(report: Mapping[str, Any]) -> list[str]:
    from benchmarks.gpu.operators import OPERATORS

    found = {(row["operator"], row["dtype"]): row for row in report.get("checks", [])}
    rows = []
    for operator in OPERATORS:
        for dtype in (str(each).removeprefix("torch.") for each in operator.dtypes):
            row = found.get((operator.name, dtype))
            if row is None:
                said = [NOT_MEASURED, NOT_MEASURED, NOT_MEASURED]
            elif "failed" in row:
                said = [row["failed"], "", "no"]
            else:
                equal = "yes" if row["equal_repeats"] else "NO"
                said = [f"{row['error_share']:.2f}", equal, "yes" if row["right"] else "NO"]
            rows.append([operator.name, dtype, *said])
    return _table(["operator", "type", "error / allowed", "repeats are equal", "right"], rows)


def _ceilings_table(report: Mapping[str, Any]) -> list[str]:
    card = find_card(report.get("chip", ""))
    units = {
        "copy": ("TB/s, read and written", card and card.memory / 1e3),
        "product": ("TFLOP/s, bf16", card and card.bf16),
    }
    found = {row["ceiling"]: f"{row['per_second'] / 1e12:.2f}" for row in report.get("ceilings", [])}
    rows = [
        [f"{name}, {unit}", found.get(name, NOT_MEASURED), sheet or "unknown"]
        for name, (unit, sheet) in units.items()
    ]
    return _table(["ceiling", "reached", "data sheet"], rows)


def _times_table(report: Mapping[str, Any]) -> list[str]:
    from benchmarks.gpu.operators import OPERATORS

    found = {(row["operator"], row.get("direction")): row for row in report.get("times", [])}
    rows = []
    for operator in OPERATORS:
        for index, direction in enumerate(operator.directions):
            target = f"{operator.targets[index]:.0%}"
            row = found.get((operator.name, direction))
            if row is None:
                said = found.get((operator.name, None), {}).get("failed", NOT_MEASURED)
                rows.append([operator.name, direction, said, NOT_MEASURED, target, NOT_MEASURED])
                continue
            peers = "; ".join(f"{name}: {ms}" for name, ms in row["peers_ms"].items())
            rate = f"{row['ms']} ({row['per_second'] / 1e12:.2f} T{row['unit']})"
            rows.append(
                [f"{operator.name}, {row['shape']}", direction, rate, f"{row['share']:.0%}", target, peers]
            )
    return _table(["operator", "direction", "ms", "share of the ceiling", "target", "peers, ms"], rows)


def _training_table(report: Mapping[str, Any]) -> list[str]:
    keys = {
        "kernels": "kernels",
        "step_seconds": "step, s",
        "tokens_per_second": "tokens/s",
        "mfu": "MFU (data sheet)",
        "share_of_product": "of measured products",
        "peak_memory_gib": "peak GiB",
        "last_loss": "last loss",
    }
    rows = report.get("training") or [{"kernels": each} for each in ("reference", "auto", "torch.compile")]
    return _table(
        [*keys.values()], [[row.get(key, row.get("failed", NOT_MEASURED)) for key in keys] for row in rows]
    )


def _profile_table(report: Mapping[str, Any]) -> list[str]:
    rows = [
        [row["kernels"], each["kernel"], each["ms"], each["launches"]]
        for row in report.get("training", [])
        for each in row.get("profile", [])
    ]
    return _table(["kernels", "kernel", "ms a step", "launches"], rows or [[NOT_MEASURED] * 4])


def _decoding_table(report: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in report.get("decoding", []):
        whole = row.get("profile", [{}])[0]
        figures = [row["ms"], row["tokens_per_second"], whole.get("ms", ""), whole.get("launches", "")]
        rows.append([row["way"], row["requests"], row["sampling"], *figures])
    headings = ["way", "requests", "sampling", "ms a step", "tokens/s", "device ms", "launches"]
    return _table(headings, rows or [[NOT_MEASURED] * len(headings)])


def _prediction_table(report: Mapping[str, Any]) -> list[str]:
    found = report.get("prediction", [])
    calibrated: dict[str, float] = next((row["calibrated"] for row in found if "calibrated" in row), {})
    rows = []
    for row in found:
        if "peak_bytes" not in row:
            said = row.get("failed", row.get("left_out", f"{len(calibrated)} step times predicted from it"))
            said += f"; {row['note']}" if "note" in row else ""
            rows.append([row["case"], said, *[""] * 9])
            continue
        sizes = [
            f"{row[key] / 2**30:.2f}" if key in row else ""
            for key in ("peak_bytes", "predicted_bytes", "reserved_bytes", "beside_bytes")
        ]
        step, seconds = row["step_seconds"], calibrated.get(row["case"])
        times = [step, row.get("predicted_seconds", ""), _error(row.get("time_error"))]
        times += ["" if seconds is None else seconds, _error(seconds and seconds / step - 1)]
        rows.append([row["case"], *sizes[:2], _error(row["memory_error"]), *sizes[2:], *times])
    headings = ["configuration", "peak GiB", "predicted", "error", "reserved GiB", "beside the allocator GiB"]
    headings += ["step, s", "predicted", "error", "calibrated", "error"]
    return _table(headings, rows or [[NOT_MEASURED] * len(headings)])


def _error(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


BEGINNING, END = "<!-- gpu_suite: begin -->", "<!-- gpu_suite: end -->"


def with_summary(page: str, report: Mapping[str, Any]) -> str:
    """Return the page with the report's training and generation between BEGINNING and END."""
    before, _, rest = page.partition(BEGINNING)
    facts = f"{report['date']}, {report['chip']}, torch {report.get('torch', 'unknown')}, one card, bf16:"
    lines = [BEGINNING, facts, "", *_training_table(report), "", *_decoding_table(report), END]
    return before + "\n".join(lines) + rest.partition(END)[2]


def _parity_table(report: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            row["job"],
            row["dtype"],
            row.get("failed", f"{row.get('apart', 0):.1e}"),
            "yes" if row["right"] else "NO",
        ]
        for row in report.get("parity", [])
    ]
    return _table(["job", "type", "relative difference", "right"], rows or [[NOT_MEASURED] * 4])


def _queues_table(report: Mapping[str, Any]) -> list[str]:
    found = report.get("queues", [])
    cases = [*found[0]["computes"]] if found else []
    rows = [[case, *("yes" if row["computes"][case] else "no" for row in found)] for case in cases]
    headings = ["CUDA_DEVICE_MAX_CONNECTIONS", *(row["connections"] for row in found)]
    return _table(headings, rows or [[NOT_MEASURED]])


def _scaling_table(report: Mapping[str, Any]) -> list[str]:
    keys = {"ranks": "ranks", "layout": "layout", "tokens_per_second": "tokens/s", "speedup": "speedup"}
    rows = report.get("scaling") or [{"ranks": ranks} for ranks in (1, 2, 4, 8, 16)]
    return _table(
        [*keys.values()],
        [[row.get(key, row.get("left_out", NOT_MEASURED)) for key in keys] for row in rows],
    )
