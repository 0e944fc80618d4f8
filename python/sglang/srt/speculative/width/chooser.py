"""The policy with its memory: asked how wide a cycle is, told what was kept and what it took. No engine, no tensors."""

from dataclasses import dataclass

import numpy as np

from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.policy import Constants, Exploration, Standing, best_width, expected_tokens, explore, settle


@dataclass(frozen=True, slots=True)
class Choice:
    """width: slots to verify, the anchor counted. index: among the candidates. is_probe: verified to learn, not because it is
    best. tokens, seconds: expected of this cycle."""

    width: int
    index: int
    is_probe: bool
    tokens: float
    seconds: float


class WidthChooser:
    """costs: also says which widths there are. estimate: what is learned of acceptance."""

    def __init__(self, costs: CostTable, estimate: SurvivalEstimate, constants: Constants = Constants()):
        self.costs, self.estimate, self.constants = costs, estimate, constants
        self._standing: Standing | None = None
        self._exploration = Exploration()

    def ask(self, slots: np.ndarray, modes: np.ndarray) -> Choice:
        """How wide the next cycle of these requests is. slots: [n] rows of the request table. modes: [n], of `MODES`."""
        num_requests, widths = len(slots), self.costs.widths
        tokens = expected_tokens(self.estimate.accept_probs(slots, modes), widths)
        seconds = self.costs.seconds(num_requests)
        if self._standing is None:
            self._standing = Standing.at(best_width(tokens, seconds, self.constants.free_rows), len(widths), num_requests)
        else:
            self._standing = settle(self._standing, tokens, seconds, num_requests, self.constants)
        index = self._standing.width
        self._exploration, probed = explore(self._exploration, index, tokens, seconds, self.constants)
        self.estimate.age()
        chosen = index if probed is None else probed
        return Choice(int(widths[chosen]), chosen, probed is not None, float(tokens[chosen]), float(seconds[chosen]))

    def began(self, slots: np.ndarray) -> None:
        """These rows of the request table hold new requests."""
        self.estimate.reset(slots)

    def kept(self, slots: np.ndarray, modes: np.ndarray, width: int, accepted: np.ndarray) -> None:
        """A cycle of this width kept so many drafted tokens of each of these requests, [n]."""
        self.estimate.learn(slots, modes, width - 1, accepted)

    def took(self, num_requests: int, width: int, seconds: float) -> float:
        """`CostTable.follow`."""
        return self.costs.follow(num_requests, int(np.searchsorted(self.costs.widths, width)), seconds)
