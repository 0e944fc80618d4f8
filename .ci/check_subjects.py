"""Check the form of the subjects of commits: a capital letter, at most 72 characters, no full stop.

Whether the first word is an imperative is for a reader to see.

Usage: `python .ci/check_subjects.py [FILE]`. FILE is the message of a commit that is being made, as git gives
it to a hook. Without it, all commits since `SINCE` are checked; none outside a git checkout, and the last one
alone in a shallow clone. Exit status 1 if a subject is not right.
"""

import re
import subprocess
import sys
from pathlib import Path

SINCE = "ba676026d6813ca7aff88203912c6cde9b547570"
LONGEST = 72


def complaint(subject: str) -> str | None:
    """Return what is wrong with a subject. None: nothing."""
    if not re.match(r"[A-Z][a-z]+ \S", subject):
        return "begin with an imperative that has a capital letter, as in `Add a test`"
    if len(subject) > LONGEST:
        return f"{len(subject)} characters, at most {LONGEST} are allowed"
    return "end without a full stop" if subject.endswith(".") else None


def subjects() -> list[str]:
    """Return the subjects of all commits since `SINCE`."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)

    if not (root / ".git").exists():
        return []
    is_known = git("merge-base", "--is-ancestor", SINCE, "HEAD").returncode == 0
    range_ = [f"{SINCE}..HEAD"] if is_known else ["-1"]
    return git("log", "--no-merges", "--format=%s", *range_).stdout.splitlines()


def main(file: str | None = None) -> int:
    """Print the subjects that are not right, and return the exit status."""
    found = subjects() if file is None else Path(file).read_text().splitlines()[:1]
    # git's own, which a rebase removes
    found = [subject for subject in found if not subject.startswith(("fixup! ", "squash! ", "amend! "))]
    wrong = [(subject, why) for subject in found if (why := complaint(subject))]
    for subject, why in wrong:
        print(f"Commit {subject!r}: {why}.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
