"""Measure the machine's limits with torch: python -m benchmarks.peers.machine.

Prints one JSON object, the first line of a comparison.
"""

import argparse
import json

from benchmarks.peers.common import set_threads
from minivllm.benchmarks.machine import describe_machine, measure_limits, num_cores
from minivllm.benchmarks.measure import Bystanders, wait_until_quiet


def main() -> None:
    """Measure how fast memory is read and matrices are multiplied."""
    parser = argparse.ArgumentParser(description="Measure the machine's limits.")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--wait", type=float, default=60.0)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    wait_until_quiet(arguments.wait)
    record = {"engine": "machine", "workload": "limits", "threads": arguments.threads}
    with Bystanders() as bystanders:
        for dtype in ("bfloat16", "float32"):
            limits = measure_limits("torch", dtype)
            record["read_gb_s"] = round(limits.read_bytes_per_s / 1e9, 1)
            record[f"gemm_{dtype}_gflop_s"] = round(limits.flops_per_s / 1e9)
    if bystanders.other_cores is not None:
        record["other_cores"] = round(bystanders.other_cores, 2)
    record |= describe_machine()
    print(json.dumps(record))


if __name__ == "__main__":
    main()
