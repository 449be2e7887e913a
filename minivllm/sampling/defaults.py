"""What the makers of a model recommend for its sampling: `generation_config.json`.

Invariant: what is returned is legal. Called by `LLM`.

In vLLM: vllm/config/model.py (ModelConfig.get_diff_sampling_param).
Source: appendix A11, "Sampling parameters".
"""

from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, RequestError
from minivllm.json_files import read_json
from minivllm.sampling.params import DEFAULTS, SamplingParams

# Its name there -> our name. As in vLLM, `do_sample` has no say.
NAMES = {**{name: name for name in DEFAULTS}, "max_new_tokens": "max_tokens"}


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the values that a folder recommends, by the names of `SamplingParams`.

    Raises:
        ConfigError: A value is out of range, with the file's name.
        CorruptFile: The file is no JSON.
    """
    path = Path(folder) / "generation_config.json"
    content = read_json(path) if path.is_file() else {}
    defaults = {}
    for name, ours in NAMES.items():
        if content.get(name) is None:
            continue
        try:
            SamplingParams(**{ours: content[name]})
        except RequestError as error:
            message = name + str(error).removeprefix(ours)
            raise ConfigError(f"{path}: {message}; correct the file") from None
        defaults[ours] = content[name]
    return defaults
