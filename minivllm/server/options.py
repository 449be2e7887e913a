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
        body_timeout_s: Seconds in which the body of a request must come.
        cors_origins: Web pages of these origins may ask, "*" for all.
        keep_alive_timeout_s: Seconds that an idle connection is kept for its client's
            next request.
        page: Whether there is a page at `/`, and at `/trace` what it shows.
        shutdown_timeout_s: Seconds that running requests have when the server is told
            to end.
        log_prompts: Whether the log shows what users write and what they are answered.

    Raises:
        ConfigError: A value is impossible.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 60.0
    cors_origins: tuple[str, ...] = ()
    keep_alive_timeout_s: float = 5.0
    page: bool = False
    shutdown_timeout_s: float = 30.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if type(self.max_body_bytes) is not int or self.max_body_bytes < 1:
            raise ConfigError(
                f"max_body_bytes is {self.max_body_bytes!r}, but must be an integer of "
                "at least 1"
            )
        for name in ("body_timeout_s", "keep_alive_timeout_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(
                    f"{name} is {value!r}, but must be a number of seconds from 0"
                )
        if any(not key or not key.isascii() or " " in key for key in self.api_keys):
            raise ConfigError(
                "an API key is empty, or has a space or a letter that is not ASCII: "
                "headers cannot carry it; choose another one"
            )
