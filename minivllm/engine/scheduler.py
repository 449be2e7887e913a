"""Decide what each step computes: which requests, and how many tokens of each.

One rule serves prompts, chunks of prompts, answers and requests that were preempted:
`num_computed_tokens` catches up with `num_tokens`, at most `max_num_batched_tokens` per
step. A policy says who comes first, and whether prompts and answers share a step.

Invariant: between two steps every unfinished request is in `waiting` (without blocks)
or in `running`; a finished one is in neither and holds no block. Followers wait until
their leader has computed the prompt. Called by the engine.

In vLLM: vllm/v1/core/sched/scheduler.py (Scheduler).
Source: chapter 4, "Continuous batching"; appendix A14, "One prompt, many answers";
    chapter 8, "Hybrid attention".
"""

import difflib
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm.engine.block_manager import BlockKey, BlockManager
from minivllm.errors import ConfigError
from minivllm.request import ModelOutput, Request, RequestStatus, SchedulerOutput


def by_arrival(request: Request, now: float) -> Any:
    """First come, first served."""
    return request.arrival


def by_priority(request: Request, now: float) -> Any:
    """Lower numbers first; first come, first served among equals."""
    return (request.priority, request.arrival)


def by_length(request: Request, now: float) -> Any:
    """Requests with the least left to catch up first."""
    num_tokens_left = request.num_tokens - request.num_computed_tokens
    return (num_tokens_left, request.arrival)


@dataclass(frozen=True, slots=True)
class Policy:
    """Who comes first.

    Attributes:
        name: What the user calls it.
        order: (request, now) -> a sort key; the smallest goes first, and the largest
            is preempted first.
        first: None if prompts and answers share a step; else a step has one kind
            only, and this kind if there is any of it.
        is_steady: Whether requests keep their keys as long as they wait: then each is
            put in its place once, and the queue is not sorted at every step.
    """

    name: str
    order: Callable[[Request, float], Any] = by_arrival
    first: Literal["prefill", "decode"] | None = None
    is_steady: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("mixed", is_steady=True),
        Policy("prefill_first", first="prefill", is_steady=True),
        Policy("decode_first", first="decode", is_steady=True),
        Policy("priority", order=by_priority, is_steady=True),
        Policy("shortest", order=by_length, is_steady=True),
    )
}

# What a step may hold, by what its policy puts first: None means everything. The next
# kind is tried if there is nothing of the one before.
STEP_KINDS: dict[str | None, tuple[str | None, ...]] = {
    None: (None,),
    "prefill": ("prefill", "decode"),
    "decode": ("decode", "prefill"),
}


def find_policy(policy: str | Policy) -> Policy:
    """Return a policy by its name; a policy of one's own is returned as it is."""
    if isinstance(policy, Policy):
        if policy.first not in STEP_KINDS:
            raise ConfigError(
                f"first is {policy.first!r} in the policy {policy.name!r}, but must be "
                "'prefill', 'decode' or None"
            )
        return policy
    if policy not in POLICIES:
        nearest = difflib.get_close_matches(str(policy), POLICIES, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ConfigError(
            f"policy is {policy!r}{hint}, but must be one of {', '.join(POLICIES)}"
        )
    return POLICIES[policy]


@dataclass(slots=True)
class StepPlan:
    """A step while it is being made."""

    budget: int  # tokens that still fit
    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    num_prefix_hits: dict[str, int] = field(default_factory=dict)
    followers: dict[str, list[Request]] = field(default_factory=dict)
    num_followers: int = 0  # requests that will run after the step, in all

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Put a request into the step."""
        self.requests.append(request)
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.budget -= num_new_tokens


class Scheduler:
    """Keeps the queues and plans the steps."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str | Policy = "mixed",
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        for name, value in limits.items():
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name} is {value!r}, but must be an integer of at least 1"
                )
        self.block_manager = block_manager
        # With more requests than tokens per step, some would run and get none.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.policy = find_policy(policy)

    @property
    def policy(self) -> Policy:
        """Who comes first; another one sorts those who wait."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self.waiting.sort(key=self._key)

    def add_request(self, request: Request) -> None:
        """Queue a new request; its prompt fits into the cache."""
        self._start_waiting(request)

    def _key(self, request: Request, now: float = 0.0) -> Any:
        """Return what the policy sorts a request by."""
        return self.policy.order(request, now)

    def _start_waiting(self, request: Request) -> None:
        """Put a request into the queue: in its place, if it has one."""
        if self.policy.is_steady:
            insort(self.waiting, request, key=self._key)
        else:
            self.waiting.append(request)

    def _stop_waiting(self, request: Request) -> None:
        """Take a request out of the queue; harmless if it is not there."""
        start = 0
        if self.policy.is_steady:
            start = bisect_left(self.waiting, self._key(request), key=self._key)
        for place in range(start, len(self.waiting)):
            if self.waiting[place] is request:
                del self.waiting[place]
                return

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan one step: let running requests go on, admit waiting ones, write it up.

        Args:
            now: Seconds on the engine's clock.

        Returns:
            The plan. It has no request only if there is none, or if some failed.
        """
        plan = StepPlan(self.max_num_batched_tokens)
        self.running.sort(key=lambda request: self._key(request, now))
        if not self.policy.is_steady:
            self.waiting.sort(key=lambda request: self._key(request, now))
        for kind in STEP_KINDS[self.policy.first]:
            self._continue_running(plan, kind)
            if kind != "decode" and not plan.preempted:
                self._admit_waiting(plan, now)
            if plan.requests:
                break
        manager = self.block_manager
        request_ids = [request.request_id for request in plan.requests]
        return SchedulerOutput(
            requests=plan.requests,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            block_ids={r: manager.block_ids[r] for r in request_ids},
            preempted=plan.preempted,
            failed=plan.failed,
            num_prefix_hits=plan.num_prefix_hits,
            followers=plan.followers,
            block_copies=list(manager.copies.values()),
            **manager.extra_plan(request_ids),
        )

    def _chunk(self, plan: StepPlan, request: Request, start: int) -> int:
        """Return how many tokens of a request, from `start` on, the step computes."""
        end = min(request.num_tokens, start + plan.budget)
        tokens, salt = request.token_ids, request.cache_salt
        return self.block_manager.chunk_end(tokens, start, end, salt) - start

    def _continue_running(self, plan: StepPlan, kind: str | None) -> None:
        """Schedule the running requests that the step is for."""
        for request in list(self.running):
            num_left = request.num_tokens - request.num_computed_tokens
            if kind is not None and kind != ("prefill" if num_left > 1 else "decode"):
                continue
            if plan.budget == 0:
                break
            num_new = 1
            if num_left > 1:
                num_new = self._chunk(plan, request, request.num_computed_tokens)
            # The last running request makes room, which may be this one itself, now
            # or for the sake of an earlier one.
            while request.status is RequestStatus.RUNNING:
                if self._allocate(request, num_new):
                    self._add(plan, request, num_new)
                    break
                self._make_room(plan)

    def _make_room(self, plan: StepPlan) -> None:
        """Preempt the last running request; it fails if it is the only one."""
        request = self.running[-1]
        if len(self.running) == 1:
            self._fail(plan, request)
            return
        plan.preempted.append(request)
        request.num_preemptions += 1
        self._stop_running(request)

    def _admit_waiting(self, plan: StepPlan, now: float) -> None:
        """Start waiting requests in order, while budget, batch and blocks allow it."""
        place = 0
        while place < len(self.waiting) and plan.budget and self._num_places(plan) > 0:
            request = self.waiting[place]
            leader = request.leader
            if leader and not (leader.status.is_finished or leader.num_output_tokens):
                place += 1  # it starts with the last token of its leader's prompt
                continue
            prefix: list[BlockKey] = []
            if request.prompt_logprobs is None:  # these need every token computed
                prefix = self.block_manager.find_cached_prefix(
                    request.token_ids, request.cache_salt
                )
            num_hits = len(prefix) * self.block_manager.block_size
            num_new = self._chunk(plan, request, num_hits)
            if not self._allocate(request, num_new, prefix):
                if self.running:
                    return  # nobody overtakes it, so its turn comes
                self._fail(plan, request)  # preempted when longer than all blocks
                continue
            self.running.append(request)
            self.waiting.pop(place)
            request.num_computed_tokens = num_hits
            if request.status is RequestStatus.WAITING:
                request.first_scheduled_time = now
                request.num_cached_tokens = num_hits
            request.status = RequestStatus.RUNNING
            plan.num_prefix_hits[request.request_id] = num_hits
            self._add(plan, request, num_new)

    def _allocate(
        self, request: Request, num_new: int, prefix: Sequence[BlockKey] = ()
    ) -> bool:
        """Get blocks for the next tokens of a request; False changes nothing."""
        num_tokens = request.num_computed_tokens + num_new
        num_tokens += len(prefix) * self.block_manager.block_size
        if not self.block_manager.allocate_slots(
            request.request_id, num_tokens, prefix
        ):
            return False
        self.block_manager.cache_full_blocks(
            request.request_id, request.token_ids, num_tokens, request.cache_salt
        )
        return True

    def update(self, output: SchedulerOutput, model_output: ModelOutput) -> None:
        """Take in what a step has computed; end the requests that are complete.

        Args:
            output: The plan of the step.
            model_output: What became of it.
        """
        self.block_manager.commit()
        for request in output.requests:
            request_id = request.request_id
            request.num_computed_tokens += output.num_scheduled_tokens[request_id]
            self.block_manager.release(request_id, request.num_computed_tokens)
            for follower in output.followers.get(request_id, ()):
                self._start_follower(follower, request)  # before the leader may end
                self._take_tokens(follower, model_output)
            for place, entry in model_output.prompt_logprobs.get(
                request_id, {}
            ).items():
                request.prompt_logprobs[place] = entry
            self._take_tokens(request, model_output)
        # Once for all that have ended: to search the list for each would be quadratic.
        self.running = [r for r in self.running if not r.status.is_finished]

    def _fail(self, plan: StepPlan, request: Request) -> None:
        """End a request that has the cache for itself and still does not fit."""
        capacity = self.block_manager.num_blocks * self.block_manager.block_size
        self.finish(
            request,
            RequestStatus.FINISHED_ERROR,
            f"the request runs alone and has {request.num_tokens} tokens, but the "
            f"whole KV cache has {capacity} slots: ask for fewer tokens, or raise "
            "num_blocks or kv_cache_memory_bytes",
        )
        plan.failed.append(request)

    def cancel(self, output: SchedulerOutput) -> None:
        """Take back a step that was not computed; its requests start over.

        They may share blocks that the step was to fill, so none can be trusted.
        """
        self.block_manager.rollback()
        for request in output.requests:
            self._stop_running(request)

    def restart(self) -> None:
        """Let all requests start over, after an interrupt while a step is computed."""
        self.block_manager.rollback()
        queued = dict.fromkeys([*self.waiting, *self.running])
        self.waiting = [r for r in queued if not r.status.is_finished]
        self.running = []
        for request in self.waiting:
            self.block_manager.free(request.request_id)
            request.num_computed_tokens = 0
            if request.status is RequestStatus.RUNNING:
                request.status = RequestStatus.PREEMPTED
        self.waiting.sort(key=self._key)  # as it has to be, if the policy is steady

    def finish(
        self, request: Request, status: RequestStatus, error: str | None = None
    ) -> None:
        """End a request, wherever it is, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        else:
            self._stop_waiting(request)
        self._end(request, status, error)

    def _end(
        self, request: Request, status: RequestStatus, error: str | None = None
    ) -> None:
        """Free the blocks of a request, and say how it ended."""
        self.block_manager.free(request.request_id)
        request.status = status
        request.error = error

    def _stop_running(self, request: Request) -> None:
        """Take a request's blocks; it will compute its tokens again (recompute)."""
        self.running.remove(request)
        self.block_manager.free(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self._start_waiting(request)

    def _num_places(self, plan: StepPlan) -> int:
        """Count the requests that may still start in this step."""
        return self.max_num_seqs - len(self.running) - plan.num_followers

    def _add(self, plan: StepPlan, request: Request, num_new: int) -> None:
        """Put a request into the step, and its followers if they can start from it."""
        plan.add(request, num_new)
        num_computed = request.num_computed_tokens + num_new
        is_first = num_computed == request.num_tokens and not request.num_output_tokens
        if request.followers and is_first:
            # One that has a token already has started, and was interrupted.
            followers = [
                r
                for r in request.followers
                if not (r.status.is_finished or r.num_output_tokens)
            ]
            if chosen := followers[: max(0, self._num_places(plan))]:
                plan.followers[request.request_id] = chosen
                plan.num_followers += len(chosen)
                for follower in chosen:
                    self.block_manager.prepare_fork(
                        request.request_id, follower.request_id
                    )

    def _start_follower(self, follower: Request, leader: Request) -> None:
        """Let a request run that has its leader's prompt, and the blocks of it."""
        num_tokens = leader.num_computed_tokens
        self.block_manager.fork(leader.request_id, follower.request_id, num_tokens)
        self._stop_waiting(follower)
        self.running.append(follower)
        follower.status = RequestStatus.RUNNING
        follower.num_computed_tokens = num_tokens
        follower.first_scheduled_time = leader.first_scheduled_time

    def _take_tokens(self, request: Request, model_output: ModelOutput) -> None:
        """Append what a request got; end it if it is complete."""
        error = model_output.errors.get(request.request_id)
        if error is not None:
            self._end(request, RequestStatus.FINISHED_ERROR, error)
        request.logprobs += model_output.logprobs.get(request.request_id, ())
        for token_id in model_output.sampled_token_ids.get(request.request_id, ()):
            request.token_ids.append(token_id)
            if token_id in request.stop_token_ids:
                self._end(request, RequestStatus.FINISHED_STOPPED)
            elif request.num_output_tokens >= request.max_tokens:
                self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
            if request.status.is_finished:
                break
