"""Answer over OpenAI's interface: translate bodies, run requests, send answers.

`handlers` translates and knows no HTTP; `local` answers bodies by an `LLM`. All of it
needs the package pydantic.

Source: appendix A30, "Speaking OpenAI".
"""

from importlib.util import find_spec

from minivllm.errors import BackendUnavailable

if find_spec("pydantic") is None:
    raise BackendUnavailable(
        "OpenAI's interface needs the package pydantic, which is not installed: "
        'pip install "minivllm[server]"'
    )
