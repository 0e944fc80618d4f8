"""Rows of SGLang's request table, and the tables that are indexed by them."""

from typing import Protocol

from sglang_dflash.srt.speculative.dflash_info import PrefilledRequests, Prompts


class RowListener(Protocol):
    """Owner of a table indexed by request row, for example penalty counts."""

    def begin_prefill(self, prompts: Prompts) -> None:
        """Take in the requests of a prefill, before the target's forward."""

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Take in requests that another server has prefilled, before their first cycle."""


class RequestRows:
    """Tells every listener about each request that takes a row, in the order of the listeners."""

    def __init__(self, *listeners: RowListener):
        self._listeners = listeners

    def begin_prefill(self, prompts: Prompts) -> None:
        """Announce a prefill, before the target's forward."""
        for listener in self._listeners:
            listener.begin_prefill(prompts)

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Announce requests that another server has prefilled, before their first cycle."""
        for listener in self._listeners:
            listener.admit_prefilled(requests)
