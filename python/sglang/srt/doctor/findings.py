"""What the doctor says: one line a finding, with what to do about it."""

from dataclasses import dataclass

FAULT, NOTE = "fault", "note"


@dataclass(frozen=True)
class Finding:
    """level: FAULT makes the doctor exit with 1; NOTE may be as intended. is_fatal: the draft cannot even be
    loaded."""

    level: str
    what: str
    what_to_do: str
    is_fatal: bool = False

    def __str__(self) -> str:
        return f"{self.level}: {self.what}. {self.what_to_do}"


def fault(what: str, what_to_do: str, is_fatal: bool = False) -> Finding:
    return Finding(FAULT, what, what_to_do, is_fatal)


def note(what: str, what_to_do: str) -> Finding:
    return Finding(NOTE, what, what_to_do)
