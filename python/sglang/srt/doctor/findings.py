"""Findings of the doctor: one line each, with advice."""

from dataclasses import dataclass

FAULT, NOTE = "fault", "note"


@dataclass(frozen=True)
class Finding:
    """One finding; problem and advice have no full stop."""

    level: str  # FAULT makes the doctor exit with 1; NOTE may be intended
    problem: str
    advice: str
    is_fatal: bool = False  # whether the draft cannot even be loaded

    def __str__(self) -> str:
        return f"{self.level}: {self.problem}. {self.advice}"


def fault(problem: str, advice: str, is_fatal: bool = False) -> Finding:
    return Finding(FAULT, problem, advice, is_fatal)


def note(problem: str, advice: str) -> Finding:
    return Finding(NOTE, problem, advice)
