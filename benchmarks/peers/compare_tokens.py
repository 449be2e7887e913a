"""Say how far the greedy answers of two engines agree.

python -m benchmarks.peers.compare_tokens A.json B.json, files that --dump wrote. Only
float32 answers can be expected to be the same; bfloat16 rounds where scores are close.
"""

import argparse
import json
from pathlib import Path


def num_equal(ours: list[int], theirs: list[int]) -> int:
    """Return how many tokens two answers begin with in common."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))


def main() -> None:
    """Compare request by request."""
    parser = argparse.ArgumentParser(description="Compare the answers of two engines.")
    parser.add_argument("files", nargs=2, type=Path)
    ours, theirs = (json.loads(path.read_text()) for path in parser.parse_args().files)
    for workload in ours.keys() & theirs.keys():
        pairs = list(zip(ours[workload], theirs[workload], strict=True))
        print(
            f"{workload}: {sum(a == b for a, b in pairs)} of {len(pairs)} answers are "
            f"the same, {sum(num_equal(a, b) for a, b in pairs)} of "
            f"{sum(len(a) for a, _ in pairs)} tokens come before the first difference"
        )


if __name__ == "__main__":
    main()
