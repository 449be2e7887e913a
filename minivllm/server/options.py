"""How a server behaves; its engine has options of its own.

Called by the command line and by whoever makes an application.

In vLLM: vllm/entrypoints/launchers/cli_args.py (FrontendArgs).
Source: appendix A32, "A server that stays up".
"""

from dataclasses import dataclass

from minivllm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the application and of its process.

    Attributes:
        api_keys: Whoever has one of them is let in; everybody, if there are none.
        max_body_bytes: Bytes of a request at most.
        cors_origins: Web pages of these origins may ask, "*" for all.
        shutdown_timeout_s: Seconds that running requests have when the server is told
            to end.

    Raises:
        ConfigError: A value is impossible.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    cors_origins: tuple[str, ...] = ()
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if type(self.max_body_bytes) is not int or self.max_body_bytes < 1:
            raise ConfigError(
                f"max_body_bytes is {self.max_body_bytes!r}, but must be an integer of "
                "at least 1"
            )
        if not self.shutdown_timeout_s >= 0:
            raise ConfigError(
                f"shutdown_timeout_s is {self.shutdown_timeout_s!r}, but must be a "
                "number of seconds from 0"
            )
        if any(not key or not key.isascii() or " " in key for key in self.api_keys):
            raise ConfigError(
                "an API key is empty, or has a space or a letter that is not ASCII: "
                "headers cannot carry it; choose another one"
            )
