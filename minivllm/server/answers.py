"""Run what a request asks for, and put the answer together.

Invariant: whatever way a call ends, no request of its job stays in the engine. Called
by the routes of the server.

In vLLM: vllm/entrypoints/openai/chat_completion/serving.py (OpenAIServingChat).
Source: chapter 9, "Serving".
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from minivllm.engine.async_engine import AsyncLLM, OutputStream
from minivllm.errors import MinivllmError, RequestError
from minivllm.outputs import RequestOutput
from minivllm.server.errors import error_of
from minivllm.server.jobs import Job
from minivllm.server.stream import DONE, event


def check_size(llm: AsyncLLM, job: Job) -> None:
    """Refuse what even an idle engine has no room for: to try again would not help."""
    num_answers = sum(params.n for params in job.sampling_params)
    if num_answers > llm.num_places:
        raise RequestError(
            f"n times the number of prompts is {num_answers:,}, but no more than "
            f"{llm.num_places:,} requests may run or wait: ask for fewer at once"
        )


async def submit(llm: AsyncLLM, job: Job) -> list[OutputStream]:
    """Hand all requests of a job to the engine, or none of them."""
    check_size(llm, job)
    streams: list[OutputStream] = []
    try:
        for prompt, params in zip(job.prompts, job.sampling_params, strict=True):
            stream = await llm.add_request(
                prompt,
                params,
                only_final=not job.stream,
                default_max_tokens=job.default_max_tokens,
                priority=job.priority,
                cache_salt=job.cache_salt,
            )
            streams.append(stream)
    except BaseException as error:  # one is impossible, or the client is gone
        close_all(llm, streams)
        if isinstance(error, RequestError):  # in the words of the body
            raise error_of(error, job.names) from error
        raise
    return streams


def close_all(llm: AsyncLLM, streams: list[OutputStream]) -> None:
    """Abort what has not ended."""
    for stream in streams:
        llm.close_stream(stream)


async def last_of(stream: OutputStream) -> RequestOutput:
    """Wait for the whole answer."""
    async for output in stream:
        last = output
    return last


async def whole_answer(llm: AsyncLLM, job: Job) -> dict[str, Any]:
    """Run a job; return the body of its response."""
    streams = await submit(llm, job)
    try:
        outputs = [await last_of(stream) for stream in streams]
    finally:
        close_all(llm, streams)
    return job.response(outputs)


async def answer_events(job: Job, streams: list[OutputStream]) -> AsyncIterator[bytes]:
    """Turn the outputs of a job into events, ready to be sent; who calls closes them.

    An error that comes when the response has begun is an event, too.
    """
    writer = job.writer()
    last: dict[int, RequestOutput] = {}
    try:
        yield b"".join(map(event, writer.start()))
        async for index, output in merged(streams):
            last[index] = output
            if chunks := writer.add(index, output):
                yield b"".join(map(event, chunks))
        chunks = writer.finish([last[index] for index in range(len(streams))])
        yield b"".join([*map(event, chunks), DONE])
    except Exception as error:
        yield event(error_of(error).body()) + DONE
        if not isinstance(error, MinivllmError):  # a mistake of ours: for the log
            raise


async def merged(
    streams: list[OutputStream],
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield the outputs of several streams as they come, each with its number."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    coming = {asyncio.ensure_future(anext(s)): i for i, s in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = coming.pop(task)
                output = task.result()
                if not output.finished:
                    coming[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for task in coming:
            task.cancel()
