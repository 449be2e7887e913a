"""Answer bodies by an `LLM`, without a server.

    handlers = LocalHandlers(llm)
    answer = handlers.handle_chat({"messages": [{"role": "user", "content": "Hi"}]})

Any number of threads may call the methods at the same time. Called by users, and by
examples.

In vLLM: none; a body needs its server, or vllm/entrypoints/openai/run_batch.py.
Source: appendix A30, "Speaking OpenAI".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.llm import LLM
from minivllm.outputs import RequestOutput
from minivllm.server.errors import error_of
from minivllm.server.handlers import EngineView, Handlers
from minivllm.server.jobs import Job
from minivllm.server.reading import Body


class LocalHandlers(Handlers):
    """OpenAI's interface as methods: a body in, an answer or its chunks out."""

    def __init__(self, llm: LLM, *, model: str | None = None, **options: Any) -> None:
        """Prepare to answer.

        Args:
            llm: What answers.
            model: What to call it; by default what it was loaded by, of a path only
                the last part.
            options: As for `Handlers`.
        """
        is_path = Path(llm.model).exists()
        name = model or (Path(llm.model).resolve().name if is_path else llm.model)
        Handlers.__init__(self, EngineView.of(llm.engine), model=name, **options)
        self.llm = llm

    def handle_chat(self, body: Body) -> dict[str, Any]:
        """Answer the body of a chat, as /v1/chat/completions would.

        Raises:
            ApiError: The body is wrong, or the engine has failed.
        """
        return self._answer(self.parse_chat(body))

    def stream_chat(self, body: Body) -> Iterator[dict[str, Any]]:
        """Answer the body of a chat in chunks, whether it has `stream` or not.

        Raises:
            ApiError: At the call, if the body is wrong; later, if the engine fails.
        """
        return self._stream(self.parse_chat(body))

    def handle_completion(self, body: Body) -> dict[str, Any]:
        """Continue a text, as /v1/completions would; errors as in `handle_chat`."""
        return self._answer(self.parse_completion(body))

    def stream_completion(self, body: Body) -> Iterator[dict[str, Any]]:
        """Continue a text in chunks; errors as in `stream_chat`."""
        return self._stream(self.parse_completion(body))

    def _outputs(
        self, job: Job, only_final: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        try:
            outputs = self.llm.outputs(
                job.prompts,
                job.sampling_params,
                default_max_tokens=job.default_max_tokens,
                only_final=only_final,
                priority=job.priority,
                cache_salt=job.cache_salt,
            )
        except MinivllmError as error:
            raise error_of(error, job.names) from error
        return self._checked(outputs, job)

    def _checked(
        self, outputs: Iterator[tuple[int, RequestOutput]], job: Job
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the outputs; what goes wrong on the way is an ApiError, too."""
        try:
            yield from outputs
        except MinivllmError as error:
            raise error_of(error, job.names) from error

    def _answer(self, job: Job) -> dict[str, Any]:
        outputs = dict(self._outputs(job, only_final=True))
        return job.response([outputs[number] for number in range(len(job.prompts))])

    def _stream(self, job: Job) -> Iterator[dict[str, Any]]:
        return self._chunks(job, self._outputs(job, only_final=False))

    def _chunks(
        self, job: Job, outputs: Iterator[tuple[int, RequestOutput]]
    ) -> Iterator[dict[str, Any]]:
        writer = job.writer()
        yield from writer.start()
        last: dict[int, RequestOutput] = {}
        for number, output in outputs:
            last[number] = output
            yield from writer.add(number, output)
        yield from writer.finish([last[number] for number in range(len(job.prompts))])
