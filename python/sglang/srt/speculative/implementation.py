"""The implementation of DFLASH that serves: ours, or SGLang's built-in one.

The launcher decides once (`arg_groups/fallback.py`). The decision travels to every process on the record of
server arguments.
"""

from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any

from sglang_dflash import __version__

# The seal of the record passes attributes that begin with an underscore, and pickles them.
_ATTRIBUTE = "_dflash_implementation"
# The target is loaded by then, on every rank.
RANKS_AGREE_WITHIN = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation that serves, as `/server_info` reports it.

    `because` says why the built-in serves, and is empty if ours does. `lost` names features of ours that the
    built-in lacks.
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


def check_ranks_run_ours() -> None:
    """Raise ValueError unless all ranks arrive here: another may run the built-in.

    Nodes decide by themselves, from their own files and devices.
    """
    import torch.distributed as dist
    from sglang.srt.distributed import get_tp_group

    if not dist.is_initialized() or get_tp_group().world_size == 1:
        return
    try:
        dist.monitored_barrier(get_tp_group().cpu_group, RANKS_AGREE_WITHIN, wait_all_ranks=True)
    except RuntimeError as error:
        raise ValueError(
            f"DFLASH: not all ranks run sglang-dflash ({error}). Give all nodes the same draft, flags and "
            "devices, and see in their logs who serves."
        ) from error
