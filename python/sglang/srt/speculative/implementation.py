"""The implementation of DFLASH that serves: ours, or SGLang's built-in one.

The launcher decides once (`arg_groups/hand_over.py`). The decision travels to every process on the record of
server arguments.
"""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from sglang_dflash import __version__

# The seal of the record passes attributes that begin with an underscore, and pickles them.
_ATTRIBUTE = "_dflash_implementation"


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation that serves, as `/server_info` reports it.

    because: why the built-in serves; empty if ours does.
    lost: features of ours that the built-in lacks.
    """

    name: str = "sglang-dflash"
    version: str = __version__
    because: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def is_builtin(self) -> bool:
        return bool(self.because)

    @classmethod
    def builtin(cls, because: tuple[str, ...], lost: tuple[str, ...]) -> "Implementation":
        """Return SGLang's own implementation."""
        return cls("sglang", version("sglang"), because, lost)

    @classmethod
    def of(cls, server_args: Any) -> "Implementation":
        """Return the decision on a record; ours if there is none."""
        return getattr(server_args, _ATTRIBUTE, None) or cls()

    def decide(self, server_args: Any) -> None:
        """Write the decision on the record."""
        setattr(server_args, _ATTRIBUTE, self)

    def report(self) -> dict[str, Any]:
        """Return the decision for `/server_info`."""
        return asdict(self)


def check_ranks_agree(implementation: Implementation) -> None:
    """Raise ValueError if another rank runs another implementation.

    Nodes decide by themselves, from their own files and devices.
    """
    import torch.distributed as dist

    try:
        from sglang.srt.distributed import get_tp_group
    except ImportError:  # a SGLang that we do not know, whose built-in serves
        return
    if not dist.is_initialized() or get_tp_group().world_size == 1:
        return
    group = get_tp_group()
    decisions: list[Any] = [None] * group.world_size
    dist.all_gather_object(decisions, implementation, group=group.cpu_group)
    check_equal(decisions)


def check_equal(decisions: list[Implementation]) -> None:
    """Raise ValueError unless all ranks run one implementation."""
    for rank, decision in enumerate(decisions):
        if decision.is_builtin != decisions[0].is_builtin:
            raise ValueError(
                f"DFLASH: rank 0 runs {_described(decisions[0])}, but rank {rank} runs "
                f"{_described(decision)}. Give all nodes the same draft, flags and devices."
            )


def _described(implementation: Implementation) -> str:
    if implementation.is_builtin:
        return f"SGLang's built-in implementation, because {'; '.join(implementation.because)}"
    return "sglang-dflash, which serves all that its node was asked for"
