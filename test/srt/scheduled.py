"""SGLang's whole scheduler in a forked child of the test process: no ports, no tokenizer, and no start-up but the model's.

A server test says when requests are sent; here a script says in which scheduler step each one joins and after how many
tokens it is cut off, so batches change in the same steps every time. Importing SGLang is paid once per test process.
"""

import multiprocessing
import os
import random
import traceback
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """One request. step: the scheduler step it joins in. abort_after: cut off once it has so many tokens."""

    input_ids: tuple[int, ...]
    max_new_tokens: int = 32
    step: int = 0
    abort_after: int | None = None
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    ignore_eos: bool = True
    mm_inputs: Any = None  # SGLang's MultimodalProcessorOutput


@dataclass(frozen=True)
class Answer:
    """finish_message: of a request that was refused or aborted. accepted: drafts kept in each verified block, in order. state_hits: prompt tokens that came from the cache."""

    output_ids: tuple[int, ...]
    finish_reason: str
    finish_message: str | None
    accepted: tuple[int, ...]
    cached_tokens: int
    retractions: int


@dataclass(frozen=True)
class Oracle:
    """In place of the draft's tokens: the known answers, each slot spoiled with this probability.

    Long accepts happen then whatever the weights are. answers: one per job, output ids, at least as long as is asked for;
    None leaves a job to its draft.
    """

    answers: Sequence[Sequence[int] | None]
    error_rate: float = 0.15
    seed: int = 5


def run(
    arguments: Sequence[object], jobs: Sequence[Job], oracle: Oracle | None = None, environment: dict[str, str] | None = None
) -> list[Answer]:
    """Serve `jobs` under SGLang's command-line `arguments`; one answer per job. Raises RuntimeError with the child's
    traceback, or what it printed last, if it fails."""
    return run_all(arguments, [jobs], oracle, environment)[0]


def run_all(arguments, groups, oracle=None, environment=None, prepare=None) -> list[list[Answer]]:
    """Groups of jobs one after another on one scheduler, so that the prefix cache of one is there for the next.

    prepare: called in the child with the scheduler, before anything runs. A request's id is its job's number.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(sender, [str(a) for a in arguments], groups, oracle, environment or {}, prepare)
    )
    process.start()
    sender.close()
    try:
        answers = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the scheduler's process ended with {process.exitcode} and said nothing") from None
    process.join()
    if isinstance(answers, str):
        raise RuntimeError(answers)
    return answers


def _child(sender, arguments, groups, oracle, environment, prepare):
    os.environ.update(environment)
    try:
        sender.send(_serve(arguments, groups, oracle, prepare))
    except BaseException:
        sender.send(traceback.format_exc())
    finally:
        sender.close()
        os._exit(0)  # SGLang's threads and exit hooks are not ours to wait for


def _serve(arguments, groups, oracle, prepare):
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    server_args = prepare_server_args([*arguments, "--log-level", "warning", "--skip-server-warmup"])
    server_args.resolve_once()
    server_args.check_server_args()
    ports = PortArgs.init_new(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    configure_scheduler_process(server_args, 0)
    scheduler = Scheduler(server_args, ports)
    scheduler.ipc_channels.send_to_detokenizer.send_output = lambda *_: None
    scheduler.output_streamer.send_to_detokenizer.send_output = lambda *_: None
    driver = _Driver(scheduler, groups)
    if oracle is not None:
        _install_oracle(scheduler.draft_worker, driver, oracle)
    if prepare is not None:
        prepare(scheduler)
    scheduler.run_event_loop()
    return driver.answers()


class _Driver:
    """Takes the place of the scheduler's input: called once per step."""

    def __init__(self, scheduler, groups):
        self.scheduler = scheduler
        self.groups = list(groups)
        self.sizes = [len(group) for group in groups]
        self.jobs = [job for group in groups for job in group]
        self.requests: dict[str, Any] = {}
        self.step = 0
        self.first = 0
        self.waiting: list[int] = []
        add = scheduler._add_request_to_queue

        def remember(request, *args, **kwargs):
            self.requests[request.rid] = request
            return add(request, *args, **kwargs)

        scheduler._add_request_to_queue = remember
        scheduler.ingest_requests = self.ingest
        self._begin_group()

    def _begin_group(self):
        count = len(self.groups.pop(0))
        self.waiting = list(range(self.first, self.first + count))
        self.first += count
        self.step = 0

    def ingest(self, stop_at_pause=False):
        from sglang.srt.managers.io_struct import AbortReq

        due = [i for i in self.waiting if self.jobs[i].step <= self.step]
        self.waiting = [i for i in self.waiting if i not in due]
        self.step += 1
        for i in due:
            self.scheduler.process_input_requests([self._tokenized(i)])
        for rid, request in self.requests.items():
            limit = self.jobs[int(rid)].abort_after
            if limit is not None and len(request.output_ids) >= limit and not request.finished():
                if request.to_finish is None:
                    self.scheduler.process_input_requests([AbortReq(rid=rid)])
        if not self.waiting and all(request.finished() for request in self.requests.values()):
            if not self.scheduler.is_fully_idle():
                return []
            if self.groups:
                self._begin_group()
            else:
                self.scheduler.gracefully_exit = True
        return []

    def _tokenized(self, i):
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        job = self.jobs[i]
        sampling = SamplingParams(max_new_tokens=job.max_new_tokens, ignore_eos=job.ignore_eos, **job.sampling)
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            rid=str(i),
            input_text=None,
            input_ids=array("q", job.input_ids),
            input_embeds=None,
            mm_inputs=job.mm_inputs,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    def answers(self):
        """Per group, in the order of the jobs."""
        found, at = [], 0
        for size in self.sizes:
            found.append([self._answer(self.requests[str(i)]) for i in range(at, at + size)])
            at += size
        return found

    @staticmethod
    def _answer(request):
        return Answer(
            output_ids=tuple(request.output_ids[: request.finished_len]),
            finish_reason=type(request.finished_reason).__name__,
            finish_message=getattr(request.finished_reason, "message", None),
            accepted=(),
            cached_tokens=request.cached_tokens,
            retractions=request.retraction_count,
        )


def _install_oracle(worker, driver, oracle):
    generator = random.Random(oracle.seed)
    decode, propose = worker._decode, worker._drafter.propose
    batch_of_cycle = []

    def decode_and_remember(batch, *args):
        batch_of_cycle[:] = [batch]
        return decode(batch, *args)

    def known_tokens(cycle, sampling_info):
        block = propose(cycle, sampling_info)
        vocabulary = worker._target_worker.model_runner.model_config.vocab_size
        for row, request in enumerate(batch_of_cycle[0].reqs):
            index = int(request.rid)
            if oracle.answers[index] is None:
                continue
            text = [*driver.jobs[index].input_ids, *oracle.answers[index]]
            anchor = int(cycle.seq_lens[row])
            for slot in range(1, block.tokens.shape[1]):
                known = text[anchor + slot] if anchor + slot < len(text) else 1
                wrong = generator.random() < oracle.error_rate
                block.tokens[row, slot] = generator.randrange(vocabulary) if wrong else known
        return block

    worker._decode, worker._drafter.propose = decode_and_remember, known_tokens
