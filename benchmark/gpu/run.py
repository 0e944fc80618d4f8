"""Everything of DFLASH that needs a GPU: one list of parts, in the order of need.

    python benchmark/gpu/run.py --minutes 9               # what fits into 9 minutes; call again to go on
    python benchmark/gpu/run.py --list --minutes 9        # when each part is over, by the estimates
    python benchmark/gpu/run.py --minutes 9 --hold        # and leave the next server held for the next call
    python benchmark/gpu/run.py --from figures.tar.xz     # go on with another machine's figures
    python benchmark/gpu/run.py --rehearse                # the same list on a CPU, with small models

benchmark/gpu/README.md is the sheet of a run. Nothing is downloaded. Every figure is a file below build/gpu;
the folder --out gets all of them as figures.tar.xz, and page.md shows them. A figure is measured once. One
that failed is tried again when nothing else is left, or first of all when the source has changed.

Exit status: 0 all done; 1 something failed (see the page); 2 it cannot begin; 3 parts are left.
"""

import argparse
import importlib.util
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu import caches, held, page  # noqa: E402
from gpu.measure import GPU_SIZES, REHEARSAL_SIZES, Session, Sizes, running  # noqa: E402
from gpu.parts import Part, Step, list_of_parts, rehearsed  # noqa: E402
from gpu.servers import SCRATCH, shrunk  # noqa: E402
from gpu.state import Figures, ask_gpu, versions  # noqa: E402
from serving import ROOT, documented, verdict_or_2  # noqa: E402
from shapes import QWEN3_06B, QWEN3_4B, QWEN3_8B  # noqa: E402

DONE, FAILED, PARTS_ARE_LEFT = 0, 1, 3
SHOWN = 300  # characters of a problem that are printed
MOST_OF_ESTIMATE = 3  # times its estimate after which a part is taken to hang
MOST_TRIES = 2  # of a figure in a call
A_DAY = 1440.0  # minutes, of a call without a limit
COMPILED = Path.home() / caches.COMPILED


@verdict_or_2
def main() -> int:
    args = _parse_arguments()
    out, archive = args.out.absolute(), args.archive and args.archive.absolute()
    sizes = REHEARSAL_SIZES if args.rehearse else GPU_SIZES
    parts = [rehearsed(part) if args.rehearse else part for part in list_of_parts()]
    if args.list:
        print(table(parts, 60 * args.minutes, compiled()))
        return DONE
    gpu = ask_gpu("name,memory.total")
    if gpu is None and not args.rehearse:
        raise OSError("no GPU here: --rehearse runs the list on a CPU")
    if importlib.util.find_spec("sglang") is None:
        raise OSError("no SGLang here: bring it first (benchmark/gpu/README.md)")
    os.chdir(ROOT)  # servers get relative paths
    held.end_measured()  # of a call that was killed
    for pair in (QWEN3_8B, QWEN3_4B, QWEN3_06B):
        (shrunk(pair) if args.rehearse else pair).write(SCRATCH / pair.name)
    name = "a rehearsal without a GPU: its figures mean nothing" if args.rehearse else gpu
    figures = Figures(SCRATCH / "figures", {"machine": name, "versions": versions()}, out)
    if archive:
        try:
            figures.adopt(archive)
        except (OSError, ValueError) as error:
            raise OSError(str(error)) from error
    run = Run(parts, figures, sizes, 60 * args.minutes)
    try:
        status = run.go_on()
        if args.hold:
            Run(parts, figures, sizes, 60 * A_DAY).hold_next()
        return status
    finally:
        if not args.hold:
            held.drop()


class Run:
    """A call of the program: it takes the parts that are due and fit, one after the other."""

    def __init__(self, parts: Sequence[Part], figures: Figures, sizes: Sizes, seconds: float):
        self._parts, self._figures, self._sizes = parts, figures, sizes
        self._end = time.monotonic() + seconds
        self._planned = [step.name for part in parts for step in part.steps]
        self._tries: Counter[str] = Counter()

    def go_on(self) -> int:
        """Run the parts, each if its estimate fits; return the exit status."""
        self._show()  # figures of another machine come back, too, if this call is killed at once
        while found := self._next():
            self._run(*found)
        print("\n".join(page.ratios(self._figures.records)))
        if left := page.parts_of(name for name in self._planned if name not in self._figures.records):
            print(f"left for the next call: {', '.join(left)}")
            return PARTS_ARE_LEFT
        return FAILED if any(map(self._figures.has_failed, self._planned)) else DONE

    def hold_next(self) -> None:
        """Start the server of the next part, and hold it."""
        found = self._next(is_held=True)
        if found and found[0].spec:
            held.hold(found[0].spec)

    def _next(self, is_held: bool = False) -> tuple[Part, list[Step], float] | None:
        """Return the next part that fits, its steps to be taken and its seconds by the estimate.

        What failed comes again when nothing else is left.
        """
        figures, tries = self._figures, self._tries
        due = {name for name in self._planned if figures.is_due(name) and not tries[name]}
        failed = {name for name in self._planned if figures.has_failed(name) and tries[name] < MOST_TRIES}
        for wanted in (due, failed):
            for part in self._parts:
                steps = [step for step in part.steps if step.name in wanted]
                is_ready = is_held or (part.spec is not None and held.is_held(part.spec))
                seconds = part.seconds(steps, is_ready, compiled())
                if steps and seconds <= self._end - time.monotonic():
                    return part, steps, seconds
        return None

    def _run(self, part: Part, steps: list[Step], seconds: float) -> None:
        """Take the steps with the part's server, which ends if it takes too long.

        A step that fails does not keep the others from trying, unless its server is gone.
        """
        print(f"{part.name} ...", flush=True)
        self._tries.update(step.name for step in steps)
        begun = time.monotonic()
        most = 60 * A_DAY if self._sizes.is_rehearsal else MOST_OF_ESTIMATE * seconds
        deadline = min(begun + most, self._end)
        timer = threading.Timer(deadline - begun, held.end_measured)
        timer.start()
        rest = list(steps)
        try:
            with running(part.spec, self.hold_next) if part.spec else nullcontext() as server:
                session = Session(self._sizes, part, deadline, server, time.monotonic() - begun)
                if part.spec and part.steps[0] not in steps:
                    part.steps[0].run(session)  # the first request compiles here too; their figure is known
                while rest:
                    self._take(part, rest[0], session)
                    rest.pop(0)
        except Exception as error:  # recorded for every step that has not been taken
            why = f"{type(error).__name__}: {error}"
            if timer.finished.is_set():
                why = f"ended at {time.monotonic() - begun:.0f} s, at most {most:.0f} were planned. {why}"
            if time.monotonic() < self._end:  # else the next call tries
                for step in rest:
                    self._keep(part, step, {"error": why}, 0.0)
        finally:
            timer.cancel()

    def _take(self, part: Part, step: Step, session: Session) -> None:
        begun = time.monotonic()
        try:
            outcome = {"result": step.run(session)}
        except Exception as error:
            if session.server:
                time.sleep(2.0)  # requests of a dying server fail a moment before its end
                if session.server.process.poll() is not None or time.monotonic() >= self._end:
                    raise  # with the server's log, for this step and those after it
            # Recorded, shown on the page and in the exit status.
            outcome = {"error": f"{type(error).__name__}: {error}"}
        self._keep(part, step, outcome, time.monotonic() - begun)
        if "result" in outcome:
            COMPILED.mkdir(parents=True, exist_ok=True)
            for name in part.cold:
                (COMPILED / name).touch()

    def _keep(self, part: Part, step: Step, outcome: dict, seconds: float) -> None:
        problems = self._figures.keep(step.name, outcome, seconds, part.spec and part.spec.command())
        self._show()
        said = " ".join("; ".join(problems).split())[:SHOWN] or "done"  # the whole of it is in the figure
        print(f"{step.name}: {said}, {seconds:.1f} s", flush=True)

    def _show(self) -> None:
        self._figures.bring(page.markdown(self._figures.setting, self._figures.records, self._planned))


def compiled() -> frozenset[str]:
    """Return what this machine has compiled, or got from another one (`caches.py`)."""
    return frozenset(file.name for file in COMPILED.glob("*"))


def table(parts: Sequence[Part], seconds: float, done: frozenset[str]) -> str:
    """Tabulate the parts that a call starts, by the estimates, each server held before.

    done: keys of COLD_S that are compiled.
    """
    lines, now = [f"{'seconds':>7}  {'over at':>7}  part"], 0.0
    for part in parts:
        if now + (takes := part.seconds(part.steps, True, done)) <= seconds:
            now += takes
            done |= part.cold
            lines.append(f"{takes:7.0f}  {int(now) // 60:4}:{int(now) % 60:02}  {part.name}")
    return "\n".join(lines)


def _parse_arguments() -> argparse.Namespace:
    parser = documented(__doc__)
    parser.add_argument("--minutes", type=float, default=A_DAY, help="of this call; default: no limit")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, with small models")
    parser.add_argument("--list", action="store_true", help="print the parts that fit, by their estimates")
    parser.add_argument("--hold", action="store_true", help="hold the next call's first server at the end")
    parser.add_argument("--from", dest="archive", type=Path, help="figures.tar.xz of another machine")
    parser.add_argument("--out", type=Path, default=ROOT / SCRATCH / "out", help="folder that comes back")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
