"""Hidden states that the worker captures for one request, under scheduled.py."""

import torch

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver


class Captures(CycleObserver):
    """Hidden states captured for one request, kept in a file.

    The object is called in the scheduler's process.
    """

    def __init__(self, job: int, path):
        self.job, self.path = job, path
        self.rows: list[tuple[int, torch.Tensor]] = []

    def __call__(self, scheduler) -> None:
        scheduler.draft_worker.observers.append(self)

    def on_prefilled(self, batch, prompts, aux_hidden):
        """Keep the states of a prompt."""
        positions, states = (rows.split(prompts.extend_lens) for rows in (prompts.positions, aux_hidden))
        for req, of_req, its_states in zip(batch.reqs, positions, states, strict=True):
            self._keep(req, of_req, its_states)

    def on_committed(self, batch, cycle, aux_hidden, accepted):
        """Keep the states of the output of a block."""
        blocks = cycle.layout.to_blocks(aux_hidden)
        for row, (req, states) in enumerate(zip(batch.reqs, blocks, strict=True)):
            count = int(accepted.commit_lens[row])
            self._keep(req, cycle.positions[row, :count], states[:count])

    def _keep(self, req, positions, states) -> None:
        if int(req.rid) == self.job:
            self.rows += zip(positions.tolist(), states.clone(), strict=True)
            torch.save(self.rows, self.path)

    def read(self, layers: int) -> dict[int, torch.Tensor]:
        """Return the states by position: [layers, hidden]."""
        return {position: states.view(layers, -1) for position, states in torch.load(self.path)}
