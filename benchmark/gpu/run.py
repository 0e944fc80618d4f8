"""Everything of DFLASH that needs a GPU: one list of parts, in the order of need.

    python benchmark/gpu/run.py --minutes 9               # what fits into 9 minutes; call again to go on
    python benchmark/gpu/run.py --list --minutes 9        # when each part is over, by the estimates
    python benchmark/gpu/run.py --minutes 9 --hold        # and leave the next server held for the next call
    python benchmark/gpu/run.py --from figures.tar.xz     # go on with another machine's figures
    python benchmark/gpu/run.py --rehearse --minutes 9    # the same list on a CPU, with small models

benchmark/gpu/README.md is the sheet of a run. Nothing is downloaded. Every figure is a file in the folder
--state, and page.md there shows them all; --bring is a folder that gets both anew after each figure. A figure
is measured once: to measure it again, delete its file. One that failed is tried again when nothing else is
left, or first of all when the source has changed.

Exit status: 0 all done; 1 something failed (see the page); 3 parts are left.
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
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu import caches, held, page  # noqa: E402
from gpu.measure import GPU_SIZES, REHEARSAL_SIZES, Session, Sizes, running  # noqa: E402
from gpu.parts import Part, Step, list_of_parts, schedule  # noqa: E402
from gpu.servers import SCRATCH  # noqa: E402
from gpu.shapes import PAIRS, shrunk  # noqa: E402
from gpu.state import Figures, ask_gpu, versions  # noqa: E402
from serving import ROOT  # noqa: E402

DONE, FAILED, PARTS_ARE_LEFT = 0, 1, 3
SHOWN = 300  # characters of a problem that are printed
MOST_OF_ESTIMATE = 3  # times its estimate after which a part is taken to hang
MOST_TRIES = 2  # of a figure in a call
A_DAY = 86_400.0  # seconds, for a call without a limit
COMPILED = Path.home() / caches.COMPILED


def main() -> int:
    args = _parse_arguments()
    os.chdir(ROOT)  # servers get relative paths
    sizes = REHEARSAL_SIZES if args.rehearse else GPU_SIZES
    run = Run(list_of_parts(sizes), sizes, A_DAY if args.minutes is None else 60 * args.minutes)
    if args.list:
        print(table(run.parts, 60 * (args.minutes or 9)))
        return DONE
    gpu = ask_gpu("name,memory.total")
    if gpu is None and not args.rehearse:
        print("no GPU here: --rehearse runs the list on a CPU", file=sys.stderr)
        return FAILED
    if importlib.util.find_spec("sglang") is None:
        print("no SGLang here: bring it first (benchmark/gpu/README.md)", file=sys.stderr)
        return FAILED
    held.end_measured()  # of a call that was killed
    for pair in PAIRS:
        (shrunk(pair) if args.rehearse else pair).write(SCRATCH / pair.name)
    name = "a rehearsal without a GPU: its figures mean nothing" if args.rehearse else gpu
    figures = Figures(args.state, {"machine": name, "versions": versions()}, args.bring)
    if args.archive:
        try:
            figures.adopt(args.archive)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return FAILED
    try:
        status = run.go_on(figures)
        if args.hold:
            Run(run.parts, sizes, A_DAY).hold_next(figures)
        return status
    finally:
        if not args.hold:
            held.drop()


class Run:
    """A call of the program: it takes the parts that are due and fit, one after the other.

    Attributes:
        parts: In the order of need.
    """

    def __init__(self, parts: Sequence[Part], sizes: Sizes, seconds: float):
        self.parts, self._sizes = parts, sizes
        self._end = time.monotonic() + seconds
        self._tries: Counter[str] = Counter()

    def go_on(self, figures: Figures) -> int:
        """Run the parts, each if its estimate fits; return the exit status."""
        said = set(page.ratios(figures.records))
        while found := self._next(figures):
            part, steps, seconds = found
            print(f"{part.name} ...", flush=True)
            most = A_DAY if self._sizes.is_rehearsal else MOST_OF_ESTIMATE * seconds
            self._run(part, steps, figures, most)
            for line in page.ratios(figures.records):
                if line not in said:
                    print(line, flush=True)
                    said.add(line)
        self._show(figures)
        names = [name for part in self.parts for name in part.figures()]
        if left := page.parts_of(name for name in names if name not in figures.records):
            print(f"left for the next call: {', '.join(left)}")
            if absent := sorted({model for part in self.parts for model in _absent(part)}):
                print(f"not here (benchmark/gpu/README.md): {', '.join(absent)}")
            return PARTS_ARE_LEFT
        return FAILED if any(map(figures.has_failed, names)) else DONE

    def hold_next(self, figures: Figures) -> None:
        """Start the server of the next part, and hold it."""
        found = self._next(figures, is_held=True)
        if found and found[0].spec:
            held.hold(found[0].spec)

    def _next(self, figures: Figures, is_held: bool = False) -> tuple[Part, list[Step], float] | None:
        """Return the next part that fits, its steps to be taken and its seconds by the estimate.

        Its models are here. What failed comes again when nothing else is left.
        """

        def is_due(name: str) -> bool:
            return figures.is_due(name) and not self._tries[name]

        def is_worth_a_try(name: str) -> bool:
            return figures.has_failed(name) and self._tries[name] < MOST_TRIES

        for wanted in (is_due, is_worth_a_try):
            for part in self.parts:
                steps = [step for step in part.steps if wanted(part.figure(step))]
                ready = is_held or (part.spec is not None and held.is_held(part.spec))
                seconds = part.seconds(steps, ready, compiled())
                if steps and seconds <= self._end - time.monotonic() and not _absent(part):
                    return part, steps, seconds
        return None

    def _run(self, part: Part, steps: Sequence[Step], figures: Figures, most: float) -> None:
        """Take the steps with the part's server, which ends after `most` seconds.

        A step that fails does not keep the others from trying, unless its server is gone.
        """
        for name in map(part.figure, steps):
            is_first = figures.is_due(name) and not self._tries[name]
            self._tries[name] = 1 if is_first else MOST_TRIES
        begun = time.monotonic()
        deadline = min(begun + most, self._end)
        timer = threading.Timer(max(0.0, deadline - begun), held.end_measured)
        timer.start()
        rest = list(steps)
        try:
            begin = partial(self.hold_next, figures)
            with running(part.spec, begin) if part.spec else nullcontext() as server:
                started = time.monotonic() - begun
                session = Session(self._sizes, part, figures.folder, deadline, server, started)
                if part.spec and part.steps[0] not in steps:
                    part.steps[0].run(session)  # the first requests compile here too; their figure is known
                while rest:
                    self._take(part, rest[0], figures, session)
                    rest.pop(0)
        except Exception as error:  # recorded for every step that has not been taken
            why = f"{type(error).__name__}: {error}"
            if timer.finished.is_set():
                why = f"ended at {time.monotonic() - begun:.0f} s, at most {most:.0f} were planned. {why}"
            if time.monotonic() < self._end:  # else the next call tries
                for step in rest:
                    self._keep(part, step, figures, {"error": why}, 0.0)
        finally:
            timer.cancel()

    def _take(self, part: Part, step: Step, figures: Figures, session: Session) -> None:
        begun = time.monotonic()
        try:
            outcome = {"result": step.run(session)}
        except Exception as error:
            if time.monotonic() >= self._end or (session.server and held.is_dying(session.server)):
                raise  # with the server's log, for this step and those after it
            # Recorded, shown on the page and in the exit status.
            outcome = {"error": f"{type(error).__name__}: {error}"}
        self._keep(part, step, figures, outcome, time.monotonic() - begun)
        if "result" in outcome and not self._sizes.is_rehearsal:
            COMPILED.mkdir(parents=True, exist_ok=True)
            for name in part.cold:
                (COMPILED / name).touch()

    def _keep(self, part: Part, step: Step, figures: Figures, outcome: dict, seconds: float) -> None:
        name, command = part.figure(step), part.spec and part.spec.command()
        problems = figures.keep(name, outcome, seconds, command)
        self._show(figures)
        said = " ".join("; ".join(problems).split())[:SHOWN] or "done"  # the whole of it is in the figure
        print(f"{name}: {said}, {seconds:.1f} s", flush=True)

    def _show(self, figures: Figures) -> None:
        planned = [name for part in self.parts for name in part.figures()]
        figures.bring(page.markdown(figures.setting, figures.records, planned))


def compiled() -> frozenset[str]:
    """Return what this machine has compiled, or got from another one (`caches.py`)."""
    return frozenset(file.name for file in COMPILED.glob("*"))


def _absent(part: Part) -> list[str]:
    """Return the models that a part needs and that have not come along."""
    return [word for word in part.spec.models() if not (ROOT / word).is_dir()] if part.spec else []


def table(parts: Sequence[Part], seconds: float) -> str:
    """Tabulate the parts, with the minute of a call at which each is over, and the models that it needs.

    The first server is held before the call. What the machine has to compile is counted.
    """
    over = {part.name: end for part, end in schedule(parts, seconds, compiled())}
    lines = [f"{'seconds':>7}  {'cold':>4}  {'over at':>7}  part"]
    for part in parts:
        end = over.get(part.name)
        at = "–" if end is None else f"{int(end) // 60}:{int(end) % 60:02}"
        warm = part.seconds(is_held=True, compiled=part.cold)
        cold = part.seconds(is_held=True, compiled=compiled()) - warm
        models = f"  ({', '.join(part.spec.models())})" if part.spec and part.spec.models() else ""
        lines.append(f"{warm:7.0f}  {cold:4.0f}  {at:>7}  {part.name}{models}")
    return "\n".join(lines)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="of this call; default: no limit")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, with small models")
    parser.add_argument("--list", action="store_true", help="print the parts and their estimates")
    parser.add_argument(
        "--hold", action="store_true", help="hold the next server at the end, for the next call"
    )
    parser.add_argument("--from", dest="archive", type=Path, help="figures.tar.xz of another machine")
    parser.add_argument("--bring", type=Path, help="folder that gets the page and all figures")
    parser.add_argument("--state", type=Path, help="folder of the figures; default: below build/gpu")
    args = parser.parse_args()
    args.state = args.state or ROOT / SCRATCH / ("rehearsal" if args.rehearse else "figures")
    for name in ("state", "bring", "archive"):
        if (path := getattr(args, name)) is not None:
            setattr(args, name, path.absolute())
    return args


if __name__ == "__main__":
    sys.exit(main())
