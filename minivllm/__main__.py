"""Run the command line as `python -m minivllm`.

Source: appendix A4, "The command line".
"""

import sys

from minivllm.cli.main import main

# The package is asked for, too: a notebook that holds this code is "__main__" as well.
if __name__ == "__main__" and __package__ == "minivllm":
    sys.exit(main())
