"""Everything of DFLASH that needs a GPU: one list of parts, in the order of need.

    python benchmark/gpu/run.py --minutes 9               # what fits into 9 minutes; call again to go on
    python benchmark/gpu/run.py --list --minutes 9        # when each part is over, by the estimates
    python benchmark/gpu/run.py --hold                    # start the first server, for the next call
    python benchmark/gpu/run.py --rehearse --minutes 9    # the same list on a CPU, with small models

benchmark/gpu/README.md is the sheet of a run. Nothing is downloaded. Every figure is a file in the folder
--state, and page.md there shows them all; --bring is a folder that gets both anew after each figure. A figure
is measured once: to measure it again, delete its file.

Exit status: 0 all done; 1 something failed (see the page); 3 parts are left.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu import held, page  # noqa: E402
from gpu.limit import OutOfTime, TimeLimit  # noqa: E402
from gpu.measure import GPU_SIZES, REHEARSAL_SIZES, Session, Sizes, running  # noqa: E402
from gpu.parts import Part, Step, list_of_parts, schedule  # noqa: E402
from gpu.servers import SCRATCH  # noqa: E402
from gpu.shapes import PAIRS, shrunk  # noqa: E402
from gpu.state import Figures, machine, problems_of, versions  # noqa: E402
from serving import ROOT  # noqa: E402

DONE, FAILED, PARTS_ARE_LEFT = 0, 1, 3
SHOWN = 300  # characters of a problem that are printed
MOST_OF_ESTIMATE = 3  # times its estimate after which a part is taken to hang


def main() -> int:
    args = _parse_arguments()
    os.chdir(ROOT)  # servers get relative paths
    sizes = REHEARSAL_SIZES if args.rehearse else GPU_SIZES
    parts = list_of_parts(sizes)
    if args.list:
        print(table(parts, 60 * (args.minutes or 9)))
        return DONE
    gpu = machine()
    if gpu is None and not args.rehearse:
        print("no GPU here: --rehearse runs the list on a CPU", file=sys.stderr)
        return FAILED
    if importlib.util.find_spec("sglang") is None:
        print("no SGLang here: bring it first (benchmark/gpu/README.md)", file=sys.stderr)
        return FAILED
    held.end_unfinished()
    for pair in PAIRS:
        (shrunk(pair) if args.rehearse else pair).write(SCRATCH / pair.name)
    name = "a rehearsal without a GPU: its figures mean nothing" if args.rehearse else gpu
    figures = Figures(args.state, {"machine": name, "versions": versions()}, args.bring)
    if args.hold:
        hold_next(parts, figures, float("inf"))
        return DONE
    try:
        return go_on(parts, figures, TimeLimit(args.minutes and 60 * args.minutes), sizes)
    finally:
        held.drop()


def go_on(parts: Sequence[Part], figures: Figures, limit: TimeLimit, sizes: Sizes) -> int:
    """Run the parts one after the other, each if its estimate fits; return the exit status.

    While a part runs, the next server imports.
    """
    said = set(page.ratios(figures.records))
    figures.planned = names = [name for part in parts for name in part.figures()]
    for number, part in enumerate(parts):
        steps = _missing(part, figures)
        if not steps or part.seconds(steps, _is_held(part)) > limit.left():
            continue
        print(f"{part.name} ...", flush=True)
        # A machine's first part compiles kernels, which no estimate knows.
        most = MOST_OF_ESTIMATE * part.seconds(steps) if figures.records else float("inf")
        try:
            with limit.at_most(most):
                _run(part, steps, figures, limit, sizes, following=parts[number + 1 :])
        except OutOfTime:
            if limit.left() > 0:  # else the next call tries again
                _fail(part, steps, figures, f"took more than {MOST_OF_ESTIMATE} times its estimate")
        for line in page.ratios(figures.records):
            if line not in said:
                print(line, flush=True)
                said.add(line)
    show(figures)
    if left := page.parts_of(name for name in names if name not in figures.records):
        print(f"left for the next call: {', '.join(left)}")
        return PARTS_ARE_LEFT
    return FAILED if any(problems_of(figures.records[name]) for name in names) else DONE


def hold_next(parts: Sequence[Part], figures: Figures, seconds: float) -> None:
    """Start the server of the first part that lacks a figure and fits, and hold it."""
    for part in parts:
        steps = _missing(part, figures)
        if steps and part.spec and not _absent(part) and part.seconds(steps, is_held=True) <= seconds:
            held.hold(part.spec)
            return


def show(figures: Figures) -> None:
    figures.bring(page.markdown(figures.setting, figures.records, figures.planned))


def _missing(part: Part, figures: Figures) -> list[Step]:
    return [step for step, name in zip(part.steps, part.figures()) if name not in figures.records]


def _is_held(part: Part) -> bool:
    return part.spec is not None and held.is_held(part.spec)


def _absent(part: Part) -> list[str]:
    """Return the models that a part needs and that are not here."""
    return [word for word in part.spec.models() if not (ROOT / word).is_dir()] if part.spec else []


def _run(
    part: Part,
    steps: Sequence[Step],
    figures: Figures,
    limit: TimeLimit,
    sizes: Sizes,
    following: Sequence[Part] = (),
) -> None:
    """Take the steps that have no figure yet, with the part's server.

    A step that fails does not keep the others from trying, unless its server is gone.
    """
    try:
        if part.spec is None:
            for step in steps:
                _take(part, step, Session(sizes, limit, figures))
            return
        if absent := _absent(part):
            raise FileNotFoundError(f"{', '.join(absent)}: not here (benchmark/gpu/travel.sh bring)")
        begun = time.monotonic()
        with running(part.spec, limit, lambda: hold_next(following, figures, limit.left())) as server:
            started = time.monotonic() - begun
            session = Session(sizes, limit, figures, server, part.spec, started, part.says)
            if part.steps[0] not in steps:
                part.steps[0].run(session)  # the first requests compile here too; their figure is known
            for step in steps:
                _take(part, step, session)
    except Exception as error:
        _fail(part, steps, figures, f"{type(error).__name__}: {error}")


def _take(part: Part, step: Step, session: Session) -> None:
    begun = time.monotonic()
    try:
        outcome = {"result": step.run(session)}
    except Exception as error:
        if session.server is not None and session.server.process.poll() is not None:
            raise  # with the server's log, for this step and those after it
        # Recorded, shown on the page and in the exit status.
        outcome = {"error": f"{type(error).__name__}: {error}"}
    _keep(part, step, session.figures, outcome, time.monotonic() - begun)


def _fail(part: Part, steps: Sequence[Step], figures: Figures, why: str) -> None:
    """Record why the steps without a figure have none."""
    for step in steps:
        if f"{part.name}/{step.name}" not in figures.records:
            _keep(part, step, figures, {"error": why}, 0.0)


def _keep(part: Part, step: Step, figures: Figures, outcome: dict, seconds: float) -> None:
    name, command = f"{part.name}/{step.name}", part.spec and part.spec.command()
    problems = figures.keep(name, outcome, seconds, command)
    show(figures)
    said = " ".join("; ".join(problems).split())[:SHOWN] or "done"  # the whole of it is in the figure
    print(f"{name}: {said}, {seconds:.1f} s", flush=True)


def table(parts: Sequence[Part], seconds: float) -> str:
    """Tabulate the parts, with the minute of a call at which each is over, and the models that it needs.

    The first server is held before the call (--hold).
    """
    over = {part.name: end for part, end in schedule(parts, seconds)}
    lines = [f"{'seconds':>7}  {'over at':>7}  part"]
    for part in parts:
        end = over.get(part.name)
        at = "–" if end is None else f"{int(end) // 60}:{int(end) % 60:02}"
        models = f"  ({', '.join(part.spec.models())})" if part.spec and part.spec.models() else ""
        lines.append(f"{part.seconds(is_held=True):7.0f}  {at:>7}  {part.name}{models}")
    return "\n".join(lines)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="of this call; default: no limit")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, with small models")
    parser.add_argument("--list", action="store_true", help="print the parts and their estimates")
    parser.add_argument("--hold", action="store_true", help="start the next server, and hold it")
    parser.add_argument("--bring", type=Path, help="folder that gets the page and all figures")
    parser.add_argument("--state", type=Path, help="folder of the figures; default: below build/gpu")
    args = parser.parse_args()
    default = ROOT / SCRATCH / ("rehearsal" if args.rehearse else "figures")
    args.state = (args.state or default).absolute()
    args.bring = args.bring and args.bring.absolute()
    return args


if __name__ == "__main__":
    sys.exit(main())
