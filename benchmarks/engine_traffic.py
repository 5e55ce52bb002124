"""The traffic of the engine benchmark: classes of requests, their objectives, arrivals, and what a run attained."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.attainment import judge
from protocol.messages import Slo


@dataclass(frozen=True)
class Class:
    """One kind of request: its share of the arrivals, its sizes, its objectives as multiples of its time alone."""

    name: str
    share: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    ttft_times: float = 0.0  # 0: best effort
    tpot_times: float = 0.0


CLASSES = (
    Class("tight", 0.5, (20, 80), (20, 60), ttft_times=10.0, tpot_times=6.0),
    Class("loose", 0.3, (400, 800), (30, 80), ttft_times=15.0, tpot_times=40.0),
    Class("best effort", 0.2, (200, 400), (60, 120)),
)

# The same kinds at the size of a GPU that serves a model of 8B: objectives of about 0.3 s / 25 ms and 1.5 s / 100 ms.
GPU_CLASSES = (
    Class("tight", 0.5, (200, 1500), (80, 200), ttft_times=15.0, tpot_times=4.0),
    Class("loose", 0.3, (3000, 6000), (100, 300), ttft_times=15.0, tpot_times=16.0),
    Class("best effort", 0.2, (2000, 4000), (200, 400)),
)


@dataclass
class Job:
    """One request of a run and the times of its tokens, in seconds since it was due to arrive."""

    kind: Class
    slo: Slo
    arrival_s: float
    prompt: list[int]
    max_tokens: int
    times_s: list[float] = field(default_factory=list)
    finished: bool = False

    @property
    def is_attained(self) -> bool:
        return judge(self.times_s, self.slo.ttft_s, self.slo.tpot_s, finished=self.finished).strict


def make_jobs(
    rate: float, seconds: float, slos: dict[str, Slo], seed: int, classes: tuple[Class, ...] = CLASSES
) -> list[Job]:
    """Poisson arrivals of the mix."""
    choose, jobs, now_s = random.Random(seed), [], 0.0
    while (now_s := now_s + choose.expovariate(rate)) < seconds:
        kind = choose.choices(classes, [each.share for each in classes])[0]
        prompt = [choose.randrange(32, 127) for _ in range(choose.randint(*kind.prompt_tokens))]
        jobs.append(Job(kind, slos[kind.name], now_s, prompt, choose.randint(*kind.output_tokens)))
    return jobs


def to_slos(alone: dict[str, tuple[float, float]], classes: tuple[Class, ...] = CLASSES) -> dict[str, Slo]:
    """Objectives of the classes from their times alone."""
    slos = {}
    for kind in classes:
        ttft_s, tpot_s = alone[kind.name]
        is_bound = kind.ttft_times > 0
        slos[kind.name] = Slo(ttft_s * kind.ttft_times, tpot_s * kind.tpot_times) if is_bound else Slo(best_effort=True)
    return slos


def summarize(jobs: list[Job], took_s: float) -> dict[str, float]:
    """What one run attained."""
    bound = [job for job in jobs if not job.slo.best_effort]
    spare = [job for job in jobs if job.slo.best_effort]
    result = {
        "attained": sum(job.is_attained for job in bound) / max(len(bound), 1),
        "tokens_per_s": sum(len(job.times_s) + len(job.prompt) * bool(job.times_s) for job in jobs) / took_s,
        "best_effort_tokens": float(sum(len(job.times_s) for job in spare)),
        "best_effort_finished": float(sum(job.finished for job in spare)),
        "requests": float(len(jobs)),
    }
    for kind in {job.kind.name: job.kind for job in bound}.values():
        mine = [job for job in bound if job.kind is kind]
        if mine:
            result[f"attained {kind.name}"] = sum(job.is_attained for job in mine) / len(mine)
    return result


def middle_rate(finished_s: Sequence[float]) -> float:
    """Requests per second that finish in the middle third of a burst, from the times at which they do."""
    in_order = sorted(finished_s)
    first, last = len(in_order) // 3, 2 * len(in_order) // 3
    return (last - first) / (in_order[last] - in_order[first])
