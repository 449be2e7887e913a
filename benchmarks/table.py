"""Write the results of a comparison as a Markdown table.

python -m benchmarks.table benchmarks/results/cpu.jsonl > benchmarks/results/cpu.md
"""

import argparse
import json
from pathlib import Path
from typing import Any

from minivllm.benchmarks.report import ROWS, three_digits

Record = dict[str, Any]


def engine_of(record: Record) -> tuple[str, str, bool]:
    """Return what makes a row of its own."""
    name = f"{record['engine']} {record['version']}"
    return name, record["dtype"], record["prefix_caching"]


def cell(record: Record | None, metric: str, scale: float) -> str:
    """Write a median, and the range below it."""
    if record is None or metric not in record:
        return "-"
    median, low, high = (three_digits(value * scale) for value in record[metric])
    return f"{median}<br>{low} to {high}"


def quiet_cell(records: dict[str, Record]) -> str:
    """Say how many of the counted repetitions nobody disturbed."""
    if any(record["quiet"] is None for record in records.values()):
        return "unknown"
    quiet = sum(record["quiet"] for record in records.values())
    return f"{quiet} of {sum(record['reps'] for record in records.values())}"


def machine_lines(machine: Record) -> list[str]:
    """Describe the machine and its limits."""
    versions = ", ".join(f"{key} {machine[key]}" for key in ("python", "torch"))
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['memory_gib']:.0f} GiB RAM, {machine['system']}, {versions}; "
        f"{machine['date']}.",
        "",
        f"Limits: reads {machine['read_gb_s']} GB/s; multiplies "
        f"{machine['gemm_bfloat16_gflop_s']} GFLOP/s in bfloat16 and "
        f"{machine['gemm_float32_gflop_s']} in float32.",
        "",
    ]


def table(records: list[Record]) -> str:
    """Return the whole page of one comparison."""
    lines = []
    engines: dict[tuple[str, str, bool], dict[str, Record]] = {}
    for record in records:
        if record["engine"] == "machine":
            lines += machine_lines(record)
        else:
            engines.setdefault(engine_of(record), {})[record["workload"]] = record
    header = ["engine", "weights", "prefix cache"]
    header += [f"{row.workload} {row.text}, {row.unit}" for row in ROWS]
    lines += [" | ".join(["", *header, "quiet", ""]).strip()]
    lines += ["|" + " --- |" * (len(header) + 1)]
    for (name, dtype, has_prefix_cache), by_workload in engines.items():
        cells = [name, dtype, "yes" if has_prefix_cache else "no"]
        cells += [
            cell(by_workload.get(row.workload), row.metric, row.scale) for row in ROWS
        ]
        cells.append(quiet_cell(by_workload))
        lines.append(f"| {' | '.join(cells)} |")
    commands = {record["command"] for record in records}
    lines += ["", "Commands:", "", "```text", *sorted(commands), "```"]
    return "\n".join(lines)


def main() -> None:
    """Read the lines and print the page."""
    parser = argparse.ArgumentParser(description="Write a comparison as Markdown.")
    parser.add_argument("file", type=Path)
    text = parser.parse_args().file.read_text(encoding="utf-8")
    print(table([json.loads(line) for line in text.splitlines()]))


if __name__ == "__main__":
    main()
