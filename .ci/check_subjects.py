"""Check that subjects of commits begin with an imperative and are short.

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
VERBS = frozenset(
    """
    Accept Add Adjust Adopt Allow Answer Append Apply Ask Assert Avoid Begin Bind Bound Build Bump Call Cap
    Carry Change Check Choose Clean Clear Close Collect Combine Commit Compare Compile Complete Compute
    Connect Convert Copy Correct Count Cover Create Cut Decide Declare Define Delete Describe Detect Disable
    Document Download Draft Draw Drop Enable End Enforce Ensure Estimate Exclude Explain Export Expose
    Extend Extract Fall Fetch Fill Find Finish Fit Fix Fold Follow Forbid Format Free Fuse Generalize Generate
    Give Group Guard Hand Handle Hide Hold Ignore Implement Import Improve Include Increase Initialize
    Inline Install Join Keep Know Label Launch Learn Leave Let Lift Limit Link List Load Log Lower Make Map
    Mark Match Measure Mend Mention Merge Model Move Multiply Name Narrow Note Number Omit Open Order Pack
    Parse Pass Patch Pause Pin Place Plan Point Predict Prefer Prepare Price Print Probe Profile Protect
    Prove Provide Publish Put Quantize Quote Raise Read Record Recover Reduce Refer Refuse Register Rehearse
    Reject Release Remember Remove Rename Render Reorder Repair Replace Report Require Reset Resolve Restore
    Retry Return Reuse Revert Review Revise Rewrite Route Run Sample Save Say Schedule Search Select Send
    Separate Serve Set Share Shorten Show Shrink Simplify Simulate Size Skip Sort Split Start State Stop
    Store Stream Strip Support Swap Switch Sync Take Tell Test Tidy Time Tolerate Trace Track Train Trim Try
    Turn Type Unify Unpack Update Upgrade Use Validate Verify Wait Walk Warm Warn Weigh Widen Withdraw Wrap
    Write
    """.split()
)


def complaint(subject: str) -> str | None:
    """Return what is wrong with a subject. None: nothing."""
    word = re.split(r"[\s,:]", subject, maxsplit=1)[0]
    if word not in VERBS:
        return (
            f"begin with an imperative, not {word!r}. If it is one, add it to VERBS in .ci/check_subjects.py"
        )
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
