"""Settings that the whole package shares; imports nothing heavy.

Invariant: the environment is read when a function is called, never on import.
Called by the loading modules and the command line.

In vLLM: vllm/envs.py (VLLM_CACHE_ROOT) and vllm/config/.
Source: appendix A1, "Files".
"""

import os
import sys
from pathlib import Path

from minivllm.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"


def cache_dir() -> Path:
    """Return the folder for models, which may not exist yet.

    `MINIVLLM_CACHE` decides; without it, it is `minivllm` in the place that the
    system keeps for caches.
    """
    chosen = os.environ.get("MINIVLLM_CACHE")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        return _user_cache_dir() / "minivllm"
    except RuntimeError as error:  # pathlib found no home folder
        raise ConfigError(
            "this user has no home folder to keep models in: "
            "set MINIVLLM_CACHE to a folder that may be written"
        ) from error


def _user_cache_dir() -> Path:
    if sys.platform == "win32":
        variable, default = "LOCALAPPDATA", "AppData/Local"
    elif sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    else:
        variable, default = "XDG_CACHE_HOME", ".cache"
    place = os.environ.get(variable, "")
    # The XDG specification says to ignore a relative path.
    return Path(place) if os.path.isabs(place) else Path.home() / default
