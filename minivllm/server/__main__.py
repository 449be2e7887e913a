"""`python -m minivllm.server` does what `minivllm serve` does.

In vLLM: vllm/entrypoints/openai/api_server.py, the same way.
Source: appendix A32, "A server that stays up".
"""

import sys

from minivllm.cli.main import main

if __name__ == "__main__" and __package__ == "minivllm.server":
    sys.exit(main(["serve", *sys.argv[1:]]))
