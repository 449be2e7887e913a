"""Run all engines, one after another, and append their lines to one file.

python -m benchmarks.peers.run_side_by_side --out benchmarks/results/cpu.jsonl

Numbers of different engines are comparable only within one such run. The environments
and model files are those of the README, below one folder. `--only` runs some of them.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers.common import num_cores

RUNNER = "-m benchmarks.peers."
# Name: environment, and what follows its python; {root} is the folder of the peers.
JOBS = {
    "machine": ("hf", "machine"),
    "minivllm-bf16": ("minivllm", "run_minivllm {root}/smollm2"),
    "vllm-bf16": ("vllm", "run_vllm {root}/smollm2"),
    "vllm-eager-bf16": ("vllm", "run_vllm {root}/smollm2 --eager"),
    "llamacpp-bf16": ("llamacpp", "run_llamacpp {root}/smollm2-bf16.gguf"),
    "hf-static-bf16": ("hf", "run_hf {root}/smollm2"),
    "hf-continuous-bf16": ("hf", "run_hf {root}/smollm2 --continuous"),
    "minivllm-f32": ("minivllm", "run_minivllm {root}/smollm2 --dtype float32"),
    "vllm-f32": ("vllm", "run_vllm {root}/smollm2 --dtype float32"),
    "llamacpp-f32": (
        "llamacpp",
        "run_llamacpp {root}/smollm2-f32.gguf --dtype float32",
    ),
    "hf-static-f32": ("hf", "run_hf {root}/smollm2 --dtype float32"),
    "hf-continuous-f32": ("hf", "run_hf {root}/smollm2 --continuous --dtype float32"),
    "minivllm-numpy": (
        "minivllm",
        "run_minivllm {root}/smollm2 --backend numpy --dtype float32",
    ),
}


def environment(root: Path, name: str) -> dict[str, str]:
    """Return the environment variables for an engine."""
    variables = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    if name == "vllm":
        libraries = [root / "venv-vllm/lib/libiomp5.so"]
        libraries += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
        variables["LD_PRELOAD"] = " ".join(map(str, libraries))
    return variables


def python_of(root: Path, name: str) -> str:
    """Return the interpreter of an engine; this one for minivllm."""
    return (
        sys.executable if name == "minivllm" else str(root / f"venv-{name}/bin/python")
    )


def run_job(name: str, root: Path, options: list[str]) -> list[str]:
    """Run one engine and return the JSON lines it printed."""
    place, command = JOBS[name]
    words = shlex.split(RUNNER + command)
    words += options[:4] if name == "machine" else options  # it does no workloads
    result = subprocess.run(
        [python_of(root, place), *(word.format(root=root) for word in words)],
        env=environment(root, place),
        capture_output=True,
        text=True,
    )
    if result.returncode:
        print(result.stderr[-3000:], file=sys.stderr)
    about = {
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(words).replace("{root}", "$PEERS"),
    }
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"engine')]
    return [json.dumps(json.loads(line) | about) for line in lines]


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="Run all engines side by side.")
    add = parser.add_argument
    add("--root", type=Path, default=Path.home() / "peers", help="default: ~/peers")
    add("--out", type=Path, required=True, help="a .jsonl file to append to")
    add("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="NAME")
    add("--workloads", nargs="+", default=["W1", "W2", "W3"])
    add("--reps", type=int, default=3)
    add("--threads", type=int, default=num_cores())
    add("--wait", type=float, default=60.0, help="seconds to wait for a quiet machine")
    arguments = parser.parse_args()
    options = ["--threads", str(arguments.threads), "--wait", str(arguments.wait)]
    options += ["--reps", str(arguments.reps), "--workloads", *arguments.workloads]
    for name in arguments.only:
        start = time.perf_counter()
        lines = run_job(name, arguments.root.absolute(), options)
        with open(arguments.out, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        seconds = time.perf_counter() - start
        print(f"{name}: {len(lines)} lines in {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
