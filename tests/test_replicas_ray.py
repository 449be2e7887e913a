"""Two replicas of a tiny model on Ray Serve; `make test-ray` runs this."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from minivllm import LLM, SamplingParams
from tests.tiny_folder import write_parrot

pytestmark = pytest.mark.ray
pytest.importorskip("ray")

WAIT_S = 120.0
LONG = {"model": "parrot", "prompt": "xyz", "temperature": 0, "max_tokens": 3000}


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, f"not in {WAIT_S} s: {what}"
        time.sleep(0.1)


class Replicated:
    """`minivllm serve --replicas 2`, as a user starts it."""

    def __init__(self, folder: Path, *arguments: str, num_replicas: int = 2) -> None:
        self.log = folder / "log.txt"
        self.words = f"/v1; replicas: {num_replicas}"
        command = [sys.executable, "-m", "minivllm", "serve", str(folder / "parrot")]
        command += ["--replicas", str(num_replicas), "--port", "0"]
        command += ["--num-blocks", "800", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        until(lambda: self._is_there() or self.process.poll() is not None, "started")
        assert self.process.poll() is None, self.log.read_text()
        pattern = r"at (http://127\.0\.0\.1:\d+)/v1"
        self.url = re.search(pattern, self.log.read_text())[1]
        self.web = httpx.Client(base_url=self.url, timeout=WAIT_S)

    def _is_there(self) -> bool:
        return self.words in self.log.read_text()

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="-", timeout=WAIT_S, **options
        )

    def metric(self, name: str) -> dict[str, float]:
        """Return a metric of each replica."""
        text = self.web.get("/metrics").text
        pattern = rf'^{name}{{.*replica="(\w+)".*}} (\S+)$'
        return {key: float(n) for key, n in re.findall(pattern, text, re.MULTILINE)}

    def pids(self) -> list[int]:
        """Return the processes of the replicas."""
        found, parents = [], {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                words = (path / "cmdline").read_bytes()
            except OSError:
                continue
            parents[int(path.name)] = int(stat[1])
            if words.startswith(b"ray::ServeReplica"):
                found.append(int(path.name))
        return [pid for pid in found if self._is_ours(pid, parents)]

    def _is_ours(self, pid: int, parents: dict[int, int]) -> bool:
        while pid > 1:
            if pid == self.process.pid:
                return True
            pid = parents.get(pid, 0)
        return False

    def until_idle(self) -> None:
        until(
            lambda: list(self.metric("vllm:num_requests_running").values()) == [0, 0],
            "two replicas that do nothing",
        )

    def close(self) -> None:
        self.web.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    write_parrot(folder / "parrot")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Replicated]:
    served = Replicated(folder)
    yield served
    served.close()


def test_answers_are_those_of_one_engine(served, folder):
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(folder / "parrot")) as llm:
        answer = llm.generate("sky:", params)[0].outputs[0]
    expected = answer.text
    client = served.client(max_retries=0)
    ask = {"model": "parrot", "prompt": "sky:", "temperature": 0, "max_tokens": 12}
    for _ in range(4):
        assert client.completions.create(**ask).choices[0].text == expected
    chunks = list(
        client.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected
    assert chunks[-1].usage.completion_tokens == len(answer.token_ids)
    chat = {"model": "parrot", "messages": [{"role": "user", "content": "sky"}]}
    whole = client.chat.completions.create(**chat, temperature=0).choices[0].message
    pieces = client.chat.completions.create(**chat, temperature=0, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.content
    assert client.models.list().data[0].id == "parrot"


def test_errors_are_those_of_one_engine(served):
    client = served.client(max_retries=0)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="parrot", prompt="x", temperature=-1)
    answer = served.web.get("/nowhere", headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert answer.status_code == 404 and "nowhere" in answer.json()["error"]["message"]


def test_metrics_are_labelled_by_replica_and_both_work(served):
    before = served.metric("vllm:generation_tokens_total")
    assert len(before) == 2

    async def ask_all() -> None:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-")
        ask = {**LONG, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
        await asyncio.gather(*(client.completions.create(**ask) for _ in range(12)))

    asyncio.run(ask_all())
    after = served.metric("vllm:generation_tokens_total")
    gains = {name: after[name] - before[name] for name in before}
    assert sum(gains.values()) == 12 * 300
    assert min(gains.values()) > 0


def test_a_cancelled_request_leaves_its_replica(served):
    client = served.client(max_retries=0)
    stream = client.completions.create(
        **LONG, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert sum(served.metric("vllm:num_requests_running").values()) == 1
    aborted = sum(finished(served, "abort").values())
    stream.close()
    served.until_idle()
    assert sum(finished(served, "abort").values()) == aborted + 1
    assert set(served.metric("vllm:kv_cache_usage_perc").values()) == {0.0}


def finished(served: Replicated, reason: str) -> Counter[str]:
    """Return how many requests of each replica ended for a reason."""
    text = served.web.get("/metrics").text
    pattern = r"^vllm:request_success_total{(.*)} (\S+)$"
    counts: Counter[str] = Counter()
    for labels, count in re.findall(pattern, text, re.MULTILINE):
        if f'finished_reason="{reason}"' in labels:
            counts[re.search(r'replica="(\w+)"', labels)[1]] += int(float(count))
    return counts


def test_a_replica_is_killed_under_load_and_comes_back(served):
    async def ask(client: openai.AsyncOpenAI, stream: bool) -> str:
        try:
            answer = await client.completions.create(
                **LONG, stream=stream, extra_body={"ignore_eos": True}
            )
            if stream:
                last = None
                async for chunk in answer:
                    last = chunk.choices[0].finish_reason
                return last or "cut off without a word"
            return answer.choices[0].finish_reason
        except openai.APIError as error:
            assert "has stopped: ask again" in str(error)
            return "stopped"

    async def kill_one() -> list[str]:
        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="-", max_retries=0, timeout=WAIT_S
        )
        tasks = [asyncio.create_task(ask(client, i % 2 == 0)) for i in range(12)]
        while sum(served.metric("vllm:num_requests_running").values()) < 12:
            await asyncio.sleep(0.05)
        pids = served.pids()
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        return await asyncio.gather(*tasks)

    ends = Counter(asyncio.run(kill_one()))
    assert set(ends) == {"length", "stopped"}, ends
    short = {**LONG, "max_tokens": 4}
    for _ in range(20):  # the other one answers, and nobody is sent to the dead one
        assert served.client(max_retries=0).completions.create(**short).choices
    until(lambda: len(served.metric("vllm:num_requests_running")) == 2, "both are back")
    served.until_idle()
    assert len(served.pids()) == 2


def test_a_session_stays_with_its_replica_and_the_end_is_clean(folder):
    served = Replicated(folder, "--routing", "session", "--shutdown-timeout", "60")
    try:
        prompt = "a b c d e f g h " * 8
        for number in range(6):
            header = {"x-session-id": f"session {number}"}
            before = served.metric("vllm:prompt_tokens_total")
            for _ in range(4):
                served.client().completions.create(
                    model="parrot", prompt=prompt, max_tokens=4, extra_headers=header
                )
            after = served.metric("vllm:prompt_tokens_total")
            assert sum(after[name] > before[name] for name in before) == 1

        async def end_under_load() -> list[str]:
            client = openai.AsyncOpenAI(
                base_url=f"{served.url}/v1", api_key="-", max_retries=0, timeout=WAIT_S
            )

            async def ask() -> str:
                stream = await client.completions.create(
                    **LONG, stream=True, extra_body={"ignore_eos": True}
                )
                async for chunk in stream:
                    last = chunk.choices[0].finish_reason
                return last

            tasks = [asyncio.create_task(ask()) for _ in range(4)]
            while sum(served.metric("vllm:num_requests_running").values()) < 4:
                await asyncio.sleep(0.05)
            served.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

        assert asyncio.run(end_under_load()) == ["length"] * 4
        assert served.process.wait(WAIT_S) == 0, served.log.read_text()
    finally:
        served.close()


def test_another_replica_starts_when_one_has_too_much_to_do(folder):
    limits = ["--max-replicas", "2", "--target-ongoing-requests", "2"]
    served = Replicated(folder, *limits, num_replicas=1)
    try:
        assert len(served.metric("vllm:num_requests_running")) == 1

        async def keep_busy() -> None:
            client = openai.AsyncOpenAI(
                base_url=f"{served.url}/v1", api_key="-", timeout=WAIT_S
            )

            async def ask_on() -> None:
                while True:
                    ask = {**LONG, "extra_body": {"ignore_eos": True}}
                    await client.completions.create(**ask)

            tasks = [asyncio.create_task(ask_on()) for _ in range(8)]
            end = time.monotonic() + WAIT_S
            while len(served.metric("vllm:num_requests_running")) < 2:
                assert time.monotonic() < end, "there is still one replica"
                await asyncio.sleep(0.5)
            for task in tasks:
                task.cancel()

        asyncio.run(keep_busy())
    finally:
        served.close()


def test_a_model_that_is_not_there_is_said_at_once(tmp_path):
    command = [sys.executable, "-m", "minivllm", "serve", str(tmp_path / "none")]
    command += ["--replicas", "2", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 1
    assert str(tmp_path / "none") in ended.stderr
    assert "Traceback" not in ended.stderr
