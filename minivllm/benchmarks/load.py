"""Send requests when they are due, whatever the server does, and note what comes back.

    requests --arrival_s--> sender.send(request) --pieces--> results

Invariant: the clock of the arrivals waits for nobody: a slow server does not slow them.
Every request that was due ends in one result, also if it failed or was interrupted.
Called by `minivllm bench serve`, and by experiments with an engine in the same process.

In vLLM: vllm/benchmarks/serve.py (benchmark, get_request).
Source: appendix A31, "Load".
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from minivllm.errors import MinivllmError

# A text, token ids, or messages for a chat.
Prompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A request that will be sent.

    Attributes:
        prompt: What to send.
        max_tokens: Tokens of the answer, at most.
        arrival_s: When it is due, in seconds since the start.
    """

    prompt: Prompt
    max_tokens: int
    arrival_s: float = 0.0


class Usage(NamedTuple):
    """Tokens of a prompt, and of its answer so far."""

    num_prompt_tokens: int
    num_output_tokens: int


class Piece(NamedTuple):
    """A part of an answer: does it show the user anything, and does it count?"""

    is_shown: bool
    usage: Usage | None = None


class Sender(Protocol):
    """Whatever answers requests: a server at some address, or an engine right here."""

    def send(self, request: LoadRequest) -> AsyncIterator[Piece]:
        """Send a request now; yield its pieces when they come.

        Raises:
            MinivllmError: It failed.
        """
        ...


class RequestFailed(MinivllmError):
    """A request of a load test failed.

    Attributes:
        kind: A few words; failures of the same kind are counted together.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """What became of a request. All times are in seconds since the start.

    Attributes:
        arrival_s: When it was due.
        sent_s: When it was sent; None if it never was.
        shown_s: When each piece came that shows something.
        end_s: When it ended, or failed.
        usage: Tokens as the server counts them; None if it does not say.
        error_kind: A few words if it failed, else None.
        error: The whole message.
    """

    arrival_s: float
    sent_s: float | None
    shown_s: list[float]
    end_s: float
    usage: Usage | None = None
    error_kind: str | None = None
    error: str | None = None

    @property
    def late_s(self) -> float:
        """How long the client kept it back."""
        return self.sent_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """TTFT: to the first token that shows; to the end, if none does."""
        return (self.shown_s or [self.end_s])[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """TPOT: the mean time of the other tokens; None if there are none."""
        count = self.usage.num_output_tokens if self.usage else len(self.shown_s)
        if count < 2 or not self.shown_s:
            return None
        return (self.end_s - self.shown_s[0]) / (count - 1)

    @property
    def itl_s(self) -> list[float]:
        """ITL: between pieces, of which each may hold several tokens."""
        return [later - sooner for sooner, later in pairwise(self.shown_s)]

    @property
    def e2el_s(self) -> float:
        """E2EL: from sending to the end."""
        return self.end_s - self.sent_s


async def run_load(
    sender: Sender,
    requests: Sequence[LoadRequest],
    *,
    max_concurrency: int | None = None,
    note: Callable[[RequestResult], None] = lambda result: None,
) -> list[RequestResult]:
    """Send every request when it is due, and wait until all have ended.

    Args:
        sender: Where to.
        requests: In any order.
        max_concurrency: Requests on the way at the same time, at most; others are kept
            back, and their results say for how long.
        note: Is given each result at once; those of unfinished requests, too, if this
            is cancelled.

    Returns:
        The results, in the order of their ends.
    """
    time_s = asyncio.get_running_loop().time
    start_s = time_s()
    room = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    results = []

    async def attend(request: LoadRequest) -> None:
        sent_s = usage = kind = message = None
        shown_s = []
        try:
            async with room:
                sent_s = time_s() - start_s
                async with aclosing(sender.send(request)) as pieces:
                    async for piece in pieces:
                        if piece.is_shown:
                            shown_s.append(time_s() - start_s)
                        usage = piece.usage or usage
        except MinivllmError as error:
            kind = getattr(error, "kind", type(error).__name__)
            message = str(error)
        except asyncio.CancelledError:
            kind = message = "interrupted"
            raise
        finally:
            result = RequestResult(
                arrival_s=request.arrival_s,
                sent_s=sent_s,
                shown_s=shown_s,
                end_s=time_s() - start_s,
                usage=usage,
                error_kind=kind,
                error=message,
            )
            results.append(result)
            note(result)

    async with asyncio.TaskGroup() as group:
        for request in sorted(requests, key=lambda request: request.arrival_s):
            await asyncio.sleep(start_s + request.arrival_s - time_s())
            group.create_task(attend(request))
    return results


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Draw when requests come that know nothing of one another.

    Args:
        rate: Requests per second; infinity for all at once.
        count: How many.
        seed: The same one gives the same pattern, at any rate.

    Returns:
        Seconds. The last one is `count / rate`, so that the rate is what was asked for.
    """
    draw = random.Random(seed)
    total, sums = 0.0, []
    for _ in range(count):
        total += draw.expovariate(1.0)
        sums.append(total)
    # The times at which a Poisson process fires, given the last of them, may be
    # stretched: relative to that one they are as random as before.
    return [when / total * count / rate for when in sums]
