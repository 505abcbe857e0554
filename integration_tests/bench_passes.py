"""What our own code costs in a pass: planning, committing and carrying out, beside the decode.

Run by hand: ``python integration_tests/bench_passes.py``. Prints, for some numbers of streams, the
part of a pass that is ours (the median of each), and tokens a second of all streams together.
"""

import argparse
import statistics
import sys
import time

from agent.llama import LlamaEngine
from agent.loop import carry_out
from agent.prompt import Preparer
from agent.scheduler import Scheduler
from common.ids import RequestId
from common.messages import Generate, RawPrompt, Sampling
from deploy.model import default_model

STREAMS = (1, 2, 4, 8, 16, 64)
PASSES = 100
GREEDY = Sampling(temperature=0, penalty_repeat=1, penalty_presence=0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    threads, runs = (vars(parser.parse_args())[name] for name in ("threads", "runs"))
    say(f"{'streams':>7} {'tokens/s':>9} {'ours, us':>9} {'ours ÷ pass':>12}")
    for streams in STREAMS:
        engine = LlamaEngine(
            str(default_model()),
            slots=streams,
            threads=threads,
            context=1024,
            cells=1024 * streams,
        )
        try:
            figures = [measure(engine, streams) for _ in range(runs)]
        finally:
            engine.close()
        rate, ours, part = (statistics.median(column) for column in zip(*figures, strict=True))
        say(f"{streams:>7} {rate:>9.0f} {ours * 1e6:>9.0f} {part:>12.2%}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measure(engine: LlamaEngine, streams: int) -> tuple[float, float, float]:
    """Tokens a second, our seconds in a pass, and their part of it."""
    scheduler = Scheduler(
        vocabulary=engine.vocabulary,
        capacity=engine.capacity,
        longest_gap=0.15,
        most_cached=0,
    )
    preparer = Preparer(engine)
    for n in range(streams):
        request = Generate(
            request_id=RequestId(str(n)),
            prompt=RawPrompt(f"Story number {n}: once upon a time there was"),
            max_tokens=PASSES + 20,
            sampling=GREEDY,
        )
        carry_out(scheduler.submit(preparer.prepare_prompt(request)), scheduler, engine)
    ours: list[float] = []
    whole: list[float] = []
    for _ in range(PASSES + 10):
        began = time.perf_counter()
        carry_out(scheduler.make_room(), scheduler, engine)
        chunks = scheduler.plan()
        planned = time.perf_counter()
        decoded = engine.decode(chunks)
        sampled = time.perf_counter()
        carry_out(scheduler.commit(chunks, decoded, seconds=sampled - planned), scheduler, engine)
        ended = time.perf_counter()
        ours.append(planned - began + ended - sampled)
        whole.append(ended - began)
    for n in range(streams):
        carry_out(scheduler.cancel(RequestId(str(n))), scheduler, engine)
    part, total = statistics.median(ours[10:]), sum(whole[10:])
    return streams * PASSES / total, part, part / statistics.median(whole[10:])


if __name__ == "__main__":
    main()
