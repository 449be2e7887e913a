"""Send jobs through the engine itself, as fast as it takes them: no text, no server.

In vLLM: vllm/benchmarks/throughput.py (run_vllm).
Source: appendix A9, "Measuring".
"""

from collections.abc import Sequence

from minivllm.benchmarks.measure import Timing
from minivllm.benchmarks.workloads import Job
from minivllm.engine.engine import LLMEngine
from minivllm.errors import MinivllmError
from minivllm.outputs import RequestOutput
from minivllm.sampling.params import SamplingParams


def run_jobs(engine: LLMEngine, jobs: Sequence[Job]) -> Timing:
    """Do all jobs at once, with an empty prefix cache at the start.

    Raises:
        RequestError: A job is too long for the model or the cache.
        MinivllmError: A request failed on the way.
    """
    engine.scheduler.block_manager.reset_prefix_cache()
    start = engine.runner.now()
    for index, job in enumerate(jobs):
        params = SamplingParams(
            temperature=0.0, max_tokens=job.num_output_tokens, ignore_eos=True
        )
        request = engine.make_request(str(index), job.prompt_token_ids, params)
        engine.submit(request, only_final=True)
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished[output.request_id] = output
    wall_s = engine.runner.now() - start
    outputs = [finished[str(index)] for index in range(len(jobs))]
    for output in outputs:
        if output.outputs[0].error:
            raise MinivllmError(output.outputs[0].error)
    return Timing(
        first_s=[output.metrics.first_token_time - start for output in outputs],
        last_s=[output.metrics.finished_time - start for output in outputs],
        wall_s=wall_s,
        token_ids=[output.outputs[0].token_ids for output in outputs],
    )
