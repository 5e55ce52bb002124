"""Upper bounds of output lengths (Tempo, Concord): coverage and width on traces, by the live controller's own code.

A trace is played through ``controller.lengths.fleet_lengths`` as the controller uses it: asked at arrival and every 50
tokens, told of every end, trained as it goes. Every answer is given before its request has finished: all are held out.
"""

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from controller.lengths.estimate import ASK_EVERY_TOKENS, LengthOptions
from controller.lengths.fleet_lengths import Answer, FleetLengths
from controller.lengths.training import grow_from
from protocol.messages import AdmissionRequest, Outcome, Progress, Slo, Traits, Verdict
from simulation.experiments.length_cost import PRIOR_TOKENS, batch_ms
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.workloads.traces import Trace, read_trace

OURS = "forest"
TRACES = ("azure_2023_conv", "azure_2023_code", "mooncake_conversation", "arxiv_summarization", "agentic_coding_a")
TPOT_S = 0.03  # of every request: how long it is in flight
REFRESH_S = 0.1  # between two batches of questions
RATE_PER_S = 4.0  # of arrivals where a trace has none, and of sessions where those have clocks of their own
LEAST_ANSWERS = 1000  # of a position, to judge its coverage by
SLO = Slo(tier="all")


def config(quick: bool) -> dict[str, Any]:
    common = {"coverage": 0.9, "max_tokens": 4096}
    if quick:
        return {**common, "traces": [TRACES[0]], "estimators": [OURS, "tier_mean"], "requests": 3000, "warm_up": 1000,
                "seeds": [1], "cost_requests": 800, "cost_rounds": 30}  # fmt: skip
    estimators = [OURS, "tier_mean", "gaussian", "none"]
    return {**common, "traces": list(TRACES), "estimators": estimators, "requests": 6000, "warm_up": 1500,
            "seeds": [1, 2, 3], "cost_requests": LengthOptions().window, "cost_rounds": 200}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per trace, estimator and seed; several seeds for forests alone, which are drawn. What asking a forest
    costs, per seed."""
    common = {name: config[name] for name in ("coverage", "max_tokens", "requests", "warm_up")}
    cost = {"kind": "cost", "requests": config["cost_requests"], "rounds": config["cost_rounds"]}
    own = {**common, **cost, "estimator": OURS}
    costs = [Task(f"cost/{seed}", {**own, "seed": seed}) for seed in config["seeds"]]
    return costs + [
        Task(f"{trace}/{estimator}/{seed}", {**common, "trace": trace, "estimator": estimator, "seed": seed})
        for seed in config["seeds"]
        for estimator in (config["estimators"] if seed == config["seeds"][0] else [OURS])
        for trace in config["traces"]
    ]


def run(params: Mapping[str, Any], context: Context) -> Point:
    """Coverage at arrival and at every position, and widths; where the trace is not there the point says so. Of a
    cost: milliseconds per batch of 64 questions."""
    if params.get("kind") == "cost":
        spent_ms = batch_ms(params["requests"], params["rounds"], params["seed"], context.clock)
        p99_ms = float(np.percentile(spent_ms, 99))
        return {"kind": "cost", "seed": params["seed"], "ms_per_64": float(np.median(spent_ms)), "p99_ms": p99_ms}
    point = {name: params[name] for name in ("trace", "estimator", "seed")}
    path = context.traces / f"{params['trace']}.parquet"
    if not path.is_file():
        return {**point, "skipped": f"no trace {path.name}"}
    judged = list(_play(_lengths(params), _requests(read_trace(path), params), params["warm_up"]))
    return {**point, **_figures(judged, params["coverage"], params["max_tokens"])}


def _lengths(params: Mapping[str, Any]) -> FleetLengths:
    options = LengthOptions(params["estimator"], params["coverage"], seed=params["seed"])
    return FleetLengths(options, PRIOR_TOKENS, {})


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the estimator answers now about requests that are the same for ever."""
    rng = np.random.default_rng(0)
    drawn = zip(range(700), np.rint(rng.lognormal(5.0, 0.8, 700)).astype(int).tolist(), strict=True)
    requests = [(0.3 * i, AdmissionRequest(str(i), 10 + output // 4, 4096, SLO), output) for i, output in drawn]
    told = [(answer.source, answer.bound_tokens) for answer, _output in _play(_lengths(params), requests, 100)]
    return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()


Judged = tuple[Answer, int]  # an answer and the output that it was about


def _requests(trace: Trace, params: Mapping[str, Any]) -> list[tuple[float, AdmissionRequest, int]]:
    """When each request of a trace arrives, what is asked about it, and its output, in order of arrival."""
    count, rng = len(trace.input_tokens), np.random.default_rng(params["seed"])
    arrival_s = trace.arrival_s if len(trace.arrival_s) else np.cumsum(rng.exponential(1.0 / RATE_PER_S, count))
    has_sessions = len(np.unique(trace.session)) < count
    if has_sessions and trace.arrival_s.size and (np.diff(trace.arrival_s) < 0).any():
        names, which = np.unique(trace.session, return_inverse=True)
        arrival_s = trace.arrival_s + np.cumsum(rng.exponential(10.0 / RATE_PER_S, len(names)))[which]
    order, cap = np.argsort(arrival_s, kind="stable")[: params["requests"]], params["max_tokens"]
    return [
        (
            float(arrival_s[i]),
            AdmissionRequest(
                str(i),
                int(trace.input_tokens[i]),
                cap,
                SLO,
                traits=Traits(str(trace.app[i]), str(trace.session[i]) if has_sessions else ""),
            ),
            min(cap, int(trace.output_tokens[i])),
        )
        for i in order
    ]


def _play(
    lengths: FleetLengths, requests: Sequence[tuple[float, AdmissionRequest, int]], warm_up: int
) -> Iterator[Judged]:
    """All answers about requests beyond the first ``warm_up``, in order of their ends."""
    events = [(arrival_s, place, 0) for place, (arrival_s, _request, _output) in enumerate(requests)]
    heapq.heapify(events)
    refreshed_s = 0.0
    while events:
        now_s, place, emitted = heapq.heappop(events)
        if now_s >= refreshed_s + REFRESH_S:
            refreshed_s = now_s
            while lengths.refresh():
                pass
            if (known := lengths.training_set()) is not None:
                lengths.set_forest(grow_from(known, lengths.next_version, lengths.options.seed))
        arrival_s, request, output = requests[place]
        if emitted >= output:
            answers = lengths.live[request.request_id].answers
            lengths.learn(_outcome(request, output))
            if place >= warm_up:
                yield from ((answer, output) for answer in answers)
            continue
        if emitted:
            lengths.at_progress(_progress(request, emitted))
        else:
            lengths.at_arrival(request)
        after = min(output, emitted + ASK_EVERY_TOKENS)
        heapq.heappush(events, (arrival_s + after * TPOT_S, place, after))


def _progress(request: AdmissionRequest, emitted: int) -> Progress:
    known = request.prompt_tokens + emitted - 1
    return Progress(
        request.request_id, SLO, 1.0, request.prompt_tokens, known, emitted, emitted + 1, request.max_tokens, True
    )


def _outcome(request: AdmissionRequest, output: int) -> Outcome:
    finish = "length" if output == request.max_tokens else "stop"
    figures = (0.0, 0.0, 0.0, 0.0, 0.0)
    told = (SLO.tier, SLO.tier, finish, True, *figures, output, Verdict.ADMITTED)
    return Outcome(request.request_id, *told, output_cap_tokens=request.max_tokens)


def _figures(judged: Sequence[Judged], coverage: float, cap: int) -> dict[str, Any]:
    """Coverage and width of the answers of each source at each position."""
    places: dict[tuple[str, int], list[tuple[bool, float, float]]] = defaultdict(list)
    for answer, output in judged:
        if answer.emitted_tokens < output:
            bound = min(answer.bound_tokens, cap)
            error = abs(answer.mean_tokens - output)
            places[answer.source, answer.emitted_tokens].append((output <= bound, bound / cap, error))
    shares = {
        source: {
            at: [float(np.mean(column)) for column in zip(*found, strict=True)] + [len(found)]
            for (of, at), found in sorted(places.items())
            if of == source and len(found) >= LEAST_ANSWERS
        }
        for source in {source for source, _at in places}
    }
    return {
        "sources": {
            source: {
                "positions": len(told),
                "arrival": told.get(0),
                "coverage_error_points_max": max((100 * abs(row[0] - coverage) for row in told.values()), default=None),
                "coverage_error_points_mean": _mean([100 * abs(row[0] - coverage) for row in told.values()]),
                "coverage_later": _weighted({at: row for at, row in told.items() if at}, 0),
            }
            for source, told in sorted(shares.items())
        }
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _weighted(told: Mapping[int, Sequence[float]], column: int) -> float | None:
    answers = sum(row[-1] for row in told.values())
    return sum(row[column] * row[-1] for row in told.values()) / answers if answers else None


def _own(point: Point) -> dict[str, Any] | None:
    """The figures of the answers about the requests themselves."""
    sources = point.get("sources", {})
    return sources.get(point["estimator"]) or next(iter(sources.values()), None)


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Of forests: the worst coverage error of any trace, position and seed, the mean width over ``max_tokens``, and
    the milliseconds of a batch of 64."""
    costs_ms = [p["ms_per_64"] for p in points if "ms_per_64" in p]
    figures = {"ms_per_64": round(float(np.median(costs_ms)), 3)} if costs_ms else {}
    points = [p for p in points if "ms_per_64" not in p]
    ours = [own for p in points if p["estimator"] == OURS and (own := _own(p)) is not None]
    errors = [own["coverage_error_points_max"] for own in ours if own["coverage_error_points_max"] is not None]
    later = [own["coverage_error_points_mean"] for own in ours if own["coverage_error_points_mean"] is not None]
    widths = [own["arrival"][1] for own in ours if own["arrival"]]
    if not ours:
        return figures
    return figures | {
        "coverage_error_points_max": round(max(errors), 3),
        "coverage_error_points_mean": round(float(np.mean(later)), 3),
        "width_ratio_vs_max_tokens": round(float(np.mean(widths)), 4),
    }


def tables(points: Sequence[Point]) -> str:
    """One row per trace and source of answers, the median over seeds."""
    points = [p for p in points if "ms_per_64" not in p]
    rows, skipped = [], sorted({p["trace"] for p in points if "skipped" in p})
    kinds = dict.fromkeys((p["trace"], p["estimator"], source) for p in points for source in p.get("sources", {}))
    for trace, estimator, source in kinds:
        same = [p for p in points if (p["trace"], p["estimator"]) == (trace, estimator)]
        found = [p["sources"][source] for p in same if source in p.get("sources", {})]
        at_arrival = [f["arrival"] for f in found if f["arrival"]]
        worst = [f["coverage_error_points_max"] for f in found if f["coverage_error_points_max"] is not None]
        later = [f["coverage_later"] for f in found if f["coverage_later"] is not None]
        figures = [_median([row[place] for row in at_arrival]) for place in (0, 1, 2)]
        rows.append([trace, estimator, source, *figures, _median(later), _median(worst)])
    header = ("trace", "estimator", "answers by", "covered at arrival", "bound / max_tokens", "error of the mean",
              "covered later", "worst position, points off")  # fmt: skip
    told = markdown_table(header, rows)
    return told + "".join(f"\n\n`{name}` was not there and is left out." for name in skipped)


def _median(values: Sequence[float]) -> float | str:
    return float(np.median(values)) if values else "-"


LENGTH_BOUNDS = register(
    Experiment("length-bounds", "Upper bounds of output lengths", config, tasks, run, headline, tables, behaves)
)
