"""Compare spin times of waiting OpenMP threads on idle and busy CPU servers.

    python benchmark/openmp_wait.py \\
        --settings GOMP_SPINCOUNT=300000 GOMP_SPINCOUNT=10000 OMP_WAIT_POLICY=passive

PyTorch splits an operator over its threads and waits for all of them. Spinning costs nothing on an idle
machine, but a great deal if the thread it waits for has no core. Sleeping at once costs a wake-up per
operator. All servers, one DFLASH server per setting, start first and are then measured in turn for several
rounds. Prints tokens/s, the median of the rounds.
"""

import argparse
import contextlib
import multiprocessing
import statistics

from bench import measure
from serving import TARGET, dflash_arguments, heldout_prompts, serve

IDLE, BUSY = "idle", "beside a busy process"


@contextlib.contextmanager
def busy_process(how_many: int):
    processes = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(how_many)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _burn() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings", nargs="+", required=True, metavar="NAME=VALUE", help="the first is the reference"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--busy-rounds", type=int, default=1, help="rounds beside a busy process, which take minutes"
    )
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    params = {"temperature": 0, "max_new_tokens": args.max_new_tokens, "ignore_eos": True}
    prompts = [p["text"] for p in heldout_prompts() if not p.get("chat") and 16 <= p["num_tokens"] <= 128]
    bodies = [{"text": text, "sampling_params": params} for text in prompts[: max(24, args.concurrency)]]
    speeds = {(setting, place): [] for setting in args.settings for place in (IDLE, BUSY)}
    with contextlib.ExitStack() as stack:
        servers = {}
        for setting in args.settings:
            env = dict([setting.split("=", 1)])
            flags = ("--model-path", TARGET, "--sleep-on-idle", *dflash_arguments())
            servers[setting] = stack.enter_context(serve(*flags, env=env))
            measure(servers[setting], bodies, args.concurrency, setting)
        for number in range(args.rounds):
            for place, num_busy in ((IDLE, 0), (BUSY, 1))[: 2 if number < args.busy_rounds else 1]:
                with busy_process(num_busy):
                    for setting, server in servers.items():
                        measured = measure(server, bodies, args.concurrency, setting)
                        speeds[setting, place].append(measured.tokens_per_second)
                        print(
                            f"{setting:>32} {place:>22} {measured.tokens_per_second:8.1f} tokens/s",
                            flush=True,
                        )
    places = (IDLE, BUSY) if args.busy_rounds else (IDLE,)
    print(
        "\n| setting |"
        + "".join(f" {place} | |" for place in places)
        + "\n|---|"
        + "---:|---:|" * len(places)
    )
    medians = {key: statistics.median(values) for key, values in speeds.items() if values}
    for setting in args.settings:
        cells = []
        for place in places:
            speed = medians[setting, place]
            cells += [f"{speed:.1f} tokens/s", f"{speed / medians[args.settings[0], place]:.2f}x"]
        print(f"| `{setting}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
