"""Read the small JSON files in the folder of a model.

Invariant: what comes back is a JSON object; whatever else a file holds is an error
that names the file. Called by the loading and text modules.

Source: appendix A1, "Files".
"""

import json
from pathlib import Path
from typing import Any

from minivllm.errors import CorruptFile, ModelNotFound


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises:
        ModelNotFound: There is no such file.
        CorruptFile: It holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFound(
            f"there is no {path.name} in {path.parent}: give the folder of a model "
            "in the Hugging Face layout"
        ) from None
    except (ValueError, RecursionError) as error:  # no JSON, or not even UTF-8
        raise CorruptFile(
            f"{path} is damaged: it is no JSON file ({error}); fetch it again"
        ) from None
    if not isinstance(content, dict):
        raise CorruptFile(f"{path} is damaged: it holds no JSON object; fetch it again")
    return content
