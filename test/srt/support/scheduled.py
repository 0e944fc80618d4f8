"""SGLang's whole scheduler in one process, without server and tokenizer.

A server test says when requests are sent. Here a script says in which scheduler step each one joins and
after how many tokens it is aborted, so batches change in the same steps every time.
"""

import os
import pickle
import random
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver

# The tests' folder and its rooms: a test's logit processors are pickled by the name of its file.
_TESTS = Path(__file__).parents[1]
_PATHS = [str(_TESTS), *(str(_TESTS / room) for room in ("engine", "server", "long"))]
# Run as a module of this name, so that what is pickled there is known here.
_PROGRAM = f"import sys; sys.path[:0] = {_PATHS!r}; from support import scheduled; scheduled.main()"


@dataclass(frozen=True)
class Job:
    """One request.

    step: the scheduler step it joins in. abort_after: abort it once it has so many tokens. abort: fields of
    the AbortReq beside the id. processor: a serialized custom logit processor. masks: return sampling masks.
    reasons: it begins inside its thoughts. adapter: the LoRA adapter's name. fields: others of SGLang's
    TokenizedGenerateReqInput.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int = 32
    step: int = 0
    abort_after: int | None = None
    abort: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    ignore_eos: bool = True
    logprobs: bool = False
    mm_inputs: Any = None  # SGLang's MultimodalProcessorOutput
    processor: str | None = None
    masks: bool = False
    reasons: bool = False
    adapter: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The answer to a job.

    logprobs: of the output ids; gaps: the lead of the best token at each position over the second, in log
    probability; both if requested. accepted: drafts kept in each verified block, in order. masks: the tokens
    that each output token was drawn from, with its log probability among them, if requested. counts: numbers
    of what the scheduler sent, and of the request's cycles.
    """

    output_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    accepted: tuple[int, ...]
    cached_tokens: int
    retractions: int
    masks: tuple[tuple[frozenset[int], float], ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Oracle:
    """Known answers in place of the draft's tokens, each slot spoiled with this probability.

    Accepts are then long whatever the weights are. answers: one per job, output ids, at least as long as
    requested; None leaves a job to its draft.
    """

    answers: Sequence[Sequence[int] | None]
    error_rate: float = 0.15
    seed: int = 5


def run(
    arguments: Sequence[object],
    groups: Sequence[Sequence[Job]],
    oracle: Oracle | None = None,
    environment: dict[str, str] | None = None,
    prepare: Callable[[Any], None] | None = None,
    is_cold: bool = False,
    timeout: float = 300,
) -> list[list[Answer]]:
    """Serve groups of jobs one after another on one scheduler, under SGLang's `arguments`.

    The prefix cache of one group is there for the next. Returns one answer per job. A RuntimeError ends
    with what the process printed.

    prepare: called in the process with its scheduler, before anything runs; pickled. A request's id is its
    job's number. is_cold: in a separate interpreter, which reads the whole environment. timeout: seconds
    after which the process is killed.
    """
    from support.servers import KNOWN_COSTS, run_to_end  # of the tests' process alone

    with tempfile.TemporaryDirectory() as folder:
        task, answers = Path(folder) / "task", Path(folder) / "answers"
        task.write_bytes(pickle.dumps(([str(a) for a in arguments], groups, oracle, prepare)))
        ended = run_to_end(
            *("-c", _PROGRAM, task, answers),
            environment={**KNOWN_COSTS, **(environment or {})},
            is_cold=is_cold,
            timeout=timeout,
        )
        if not answers.exists():
            raise RuntimeError(f"exit code {ended.code}; its output ends:\n{ended.output[-4000:]}")
        return pickle.loads(answers.read_bytes())


def serve(
    arguments: list[str], groups: Sequence[Sequence[Job]], oracle: Oracle | None, prepare=None
) -> list[list[Answer]]:
    """Run the groups in this process, which cannot do anything else afterwards."""
    from sglang.srt.managers import schedule_policy
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    if "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION" in os.environ:  # SGLang read it when it was imported
        schedule_policy.CLIP_MAX_NEW_TOKENS = int(os.environ["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"])
    load_plugins()
    server_args = prepare_server_args([*arguments, "--log-level", "warning", "--skip-server-warmup"])
    server_args.resolve_once()
    server_args.check_server_args()
    ports = PortArgs.init_new(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    configure_scheduler_process(server_args, 0)
    scheduler = Scheduler(server_args, ports)
    scheduler.idle_sleeper = None  # it waits a second for messages that never come here
    driver = _Driver(scheduler, groups)
    scheduler.ipc_channels.send_to_detokenizer.send_output = lambda *_: None
    scheduler.output_streamer.send_to_detokenizer.send_output = driver.note_output
    if scheduler.draft_worker is not None:
        worker = scheduler.draft_worker
        vocab_size = worker.target_worker.model_runner.model_config.vocab_size
        worker.observers.append(_Notes(driver, oracle, vocab_size))
    if prepare is not None:
        prepare(scheduler)
    scheduler.run_event_loop()
    return driver.answers()


def _rid(job: int) -> str:
    """Return the id of a job's request. SGLang aborts each request whose id begins with a given one."""
    return f"{job:06}"


class _Driver:
    """Replacement for the scheduler's input, called once per step."""

    def __init__(self, scheduler, groups):
        self.scheduler = scheduler
        adapters = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
        refs = adapters.lora_refs.values() if adapters is not None else ()
        self._adapter_ids = {ref.lora_name: ref.lora_id for ref in refs}
        self.groups = list(groups)
        self.sizes = [len(group) for group in groups]
        self.jobs = [job for group in groups for job in group]
        self.requests: dict[str, Any] = {}
        self.accepted: dict[str, list[int]] = {}
        self.masks: dict[str, list[tuple[frozenset[int], float]]] = {}
        self.counts: dict[str, Counter] = {}
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

    def note_output(self, output, *_):
        """Take the sampling masks and numbers of what the scheduler sends."""
        for at, rid in enumerate(output.rids):
            counts = self.counts.setdefault(rid, Counter())
            counts["output_ids"] += len(output.output_ids[at])
            counts["logprobs"] += len((output.output_token_logprobs_val or {at: ()})[at])
            for name in ("completion_tokens", "reasoning_tokens"):
                counts[name] = getattr(output, name)[at]
        for rid, chunk in zip(output.rids, output.output_token_sampling_mask or (), strict=False):
            if chunk is not None:
                tokens, logprobs = chunk.to_lists(support_logprobs=False)
                self.masks.setdefault(rid, []).extend(zip(map(frozenset, tokens), logprobs, strict=True))

    def ingest(self, stop_at_pause=False):
        from sglang.srt.managers.io_struct import AbortReq

        due = [i for i in self.waiting if self.jobs[i].step <= self.step]
        self.waiting = [i for i in self.waiting if self.jobs[i].step > self.step]
        self.step += 1
        for i in due:
            self.scheduler.process_input_requests([self._tokenized(i)])
        for rid, request in self.requests.items():
            limit = self.jobs[int(rid)].abort_after
            if limit is not None and len(request.output_ids) >= limit and not request.finished():
                if request.to_finish is None:
                    self.scheduler.process_input_requests([AbortReq(rid=rid, **self.jobs[int(rid)].abort)])
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
        sampling = SamplingParams(
            max_new_tokens=job.max_new_tokens, ignore_eos=job.ignore_eos, **job.sampling
        )
        sampling.normalize(self.scheduler.tokenizer)
        request = TokenizedGenerateReqInput(
            rid=_rid(i),
            input_text=None,
            input_ids=array("q", job.input_ids),
            input_embeds=None,
            mm_inputs=job.mm_inputs,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=job.logprobs,
            logprob_start_len=-1,
            top_logprobs_num=2 if job.logprobs else 0,
            token_ids_logprob=None,
            stream=False,
            custom_logit_processor=job.processor,
            return_sampling_mask=job.masks,
            require_reasoning=job.reasons,
            lora_id=self._adapter_ids.get(job.adapter),
        )
        for name, value in job.fields.items():
            setattr(request, name, value)
        return request

    def answers(self):
        """Return the answers per group, in the order of the jobs."""
        found, at = [], 0
        for size in self.sizes:
            found.append([self._answer(self.requests[_rid(i)]) for i in range(at, at + size)])
            at += size
        return found

    def _answer(self, request):
        output_ids = tuple(request.output_ids[: request.finished_len])
        accepted, said = [], 1
        # A finished request may have been in one more step.
        for kept in self.accepted.get(request.rid, []):
            if said < len(output_ids):
                accepted.append(kept)
            said += kept + 1
        logprobs, top = [], []
        if request.return_logprob:
            logprobs, top = request.logprob.output_token_logprobs_val, request.logprob.output_top_logprobs_val
        return Answer(
            output_ids=output_ids,
            finish_reason=type(request.finished_reason).__name__,
            logprobs=tuple(logprobs[: len(output_ids)]),
            gaps=tuple(values[0] - values[1] for values in top[: len(output_ids)]),
            accepted=tuple(accepted),
            cached_tokens=request.cached_tokens,
            retractions=request.retraction_count,
            masks=tuple(self.masks.get(request.rid, ())),
            counts={
                **self.counts.get(request.rid, {}),
                "verifies": request.spec_verify_ct,
                "correct_drafts": request.spec_num_correct_drafts,
            },
        )


class _Notes(CycleObserver):
    """Records the accepted tokens of each cycle, and replaces drafts by the oracle's."""

    def __init__(self, driver, oracle, vocab_size: int):
        self._driver, self._oracle, self._vocab_size = driver, oracle, vocab_size
        self._generator = random.Random(oracle.seed) if oracle is not None else None

    def on_drafted(self, batch, cycle, block):
        """Draft by the oracle."""
        if self._oracle is None:
            return
        generator = self._generator
        for row, request in enumerate(batch.reqs):
            index = int(request.rid)
            if self._oracle.answers[index] is None:
                continue
            text = [*self._driver.jobs[index].input_ids, *self._oracle.answers[index]]
            anchor = int(cycle.committed[row])
            for slot in range(1, block.tokens.shape[1]):
                is_known = anchor + slot < len(text) and generator.random() >= self._oracle.error_rate
                block.tokens[row, slot] = (
                    text[anchor + slot] if is_known else generator.randrange(self._vocab_size)
                )

    def on_accepted(self, batch, cycle, accepted):
        """Note the accept lengths."""
        for request, accept_len in zip(batch.reqs, accepted.accept_len.tolist(), strict=True):
            self._driver.accepted.setdefault(request.rid, []).append(accept_len)


def main() -> None:
    """Serve in the scheduler's process; argv names the files of the input and of the answers."""
    task, answers = map(Path, sys.argv[1:])
    found = serve(*pickle.loads(task.read_bytes()))
    partial = answers.with_suffix(".part")
    partial.write_bytes(pickle.dumps(found))
    partial.rename(answers)
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads and exit hooks are not ours to wait for
