"""What a drafter is given of one request, on a scheduler of scheduled.py's."""

import torch


class Captures:
    """What the drafter is given of one request, kept in a file. Called in the scheduler's process."""

    def __init__(self, job: int, path):
        self.job, self.path = str(job), path
        self.rows: list[tuple[int, torch.Tensor]] = []

    def __call__(self, scheduler) -> None:
        worker = scheduler.draft_worker
        drafter, batch = worker._drafter, []
        prefill, commit = drafter.prefill, drafter.commit
        for name in ("_prefill", "_decode"):
            setattr(worker, name, self._noting(getattr(worker, name), batch))

        def keep_prompt(given, hidden, *rest):
            for req, positions, states in zip(
                batch, given.positions.split(given.extend_lens), hidden.split(given.extend_lens)
            ):
                self.keep(req, positions, states)
            return prefill(given, hidden, *rest)

        def keep_blocks(cycle, hidden, verdict):
            for row, (req, states) in enumerate(zip(batch, hidden.view(cycle.bs, -1, hidden.shape[-1]))):
                count = int(verdict.accept_len[row]) + 1
                self.keep(req, cycle.positions[row, :count], states[:count])
            return commit(cycle, hidden, verdict)

        drafter.prefill, drafter.commit = keep_prompt, keep_blocks

    def keep(self, req, positions, states) -> None:
        if req.rid == self.job:
            self.rows += zip(positions.tolist(), states.clone())
            torch.save(self.rows, self.path)

    @staticmethod
    def _noting(method, batch):
        def noted(given, *rest):
            batch[:] = given.reqs
            return method(given, *rest)

        return noted

    def read(self, layers: int) -> dict[int, torch.Tensor]:
        """Position -> [layers, hidden]."""
        return {position: states.view(layers, -1) for position, states in torch.load(self.path)}
