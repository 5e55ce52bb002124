"""vLLM's own server without the plug-in and with it, in turns, under load of vLLM's own ``bench serve``.

    python -m benchmarks.plug_in --json OUT --write docs/results/plug-in.md

Two classes at a time: interactive requests with an objective, judged by ``--goodput``, and bulk requests without one.
Loads are multiples of what the stock server sustains of the mix, measured first. Both servers are up all the time; each
load runs on both, one after the other, and the next pair begins with the other one.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_file import processor, write_result
from benchmarks.vllm_alone import MODEL, PLUG_IN, server
from replicas.embedded import ensure_embedded_model

SYSTEMS = ("vllm", "plug-in")
INTERACTIVE = {"prompt": 48, "output": 24, "share": 0.6}
BULK = {"prompt": 400, "output": 48, "share": 0.4}
SIZES = ("--max-num-seqs", "32", "--max-num-batched-tokens", "512")
ROW = "| {load:g} | {system} | {attained:.3f} | {goodput:.2f} | {ttft:.0f} | {tpot:.0f} | {bulk_tokens:.0f} |"


def main() -> None:
    """Start both servers, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.5])
    parser.add_argument("--pairs", type=int, default=2, help="runs of both systems at each load")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each run")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=150.0)
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--write", type=Path, help="Markdown file")
    options = parser.parse_args()
    with contextlib.ExitStack() as up:
        urls = {"vllm": up.enter_context(server(*SIZES)), "plug-in": up.enter_context(server(*SIZES, *PLUG_IN))}
        for url in urls.values():
            run(url, options, 4.0, 0, rate_seconds=2.0)
        capacity = sustained(urls["vllm"], options)
        points = []
        for load in options.loads:
            for pair in range(options.pairs):
                for system in SYSTEMS if pair % 2 == 0 else SYSTEMS[::-1]:
                    measured = run(urls[system], options, load * capacity, pair, options.seconds)
                    points.append({"load": load, "system": system, "pair": pair, **measured})
                    print(json.dumps(points[-1]), flush=True)
    text = page(points, capacity, options)
    print(text)
    if options.json:
        asked = {name: value for name, value in vars(options).items() if name not in ("json", "write")}
        config = {**asked, "capacity_per_s": capacity, "interactive": INTERACTIVE, "bulk": BULK}
        seeds = range(options.pairs)
        write_result(options.json, "plug_in", config=config, seeds=seeds, headline=headline(points), points=points)
    if options.write:
        options.write.write_text(text, encoding="utf-8")


def sustained(url: str, options: argparse.Namespace) -> float:
    """Requests per second of the mix that a server finishes when it always has work."""
    told = run(url, options, 1000.0, 99, rate_seconds=0.05)
    return float(told["requests"] / told["took_s"])


def run(url: str, options: argparse.Namespace, rate: float, seed: int, rate_seconds: float) -> dict[str, float]:
    """Both classes at once against one server; ``rate`` is of both together."""
    with tempfile.TemporaryDirectory() as folder:
        objective = {"slo_ttft_ms": options.ttft_ms, "slo_tpot_ms": options.tpot_ms}
        goodput = ("--goodput", f"ttft:{options.ttft_ms}", f"tpot:{options.tpot_ms}")
        xargs = ("--extra-body", json.dumps({"vllm_xargs": objective}))
        asked = {
            "interactive": bench(url, INTERACTIVE, rate, rate_seconds, (*goodput, *xargs, "--seed", str(2 * seed))),
            "bulk": bench(url, BULK, rate, rate_seconds, ("--seed", str(2 * seed + 1))),
        }
        started = {
            name: subprocess.Popen(
                [*words, "--save-result", "--result-dir", folder, "--result-filename", name],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, words in asked.items()
        }
        for name, process in started.items():
            _, told = process.communicate(timeout=600)
            if process.returncode:
                raise SystemExit(f"bench serve of {name} failed: {told[-2000:]}")
        results = {name: json.loads((Path(folder) / name).read_text()) for name in asked}
    return figures(results["interactive"], results["bulk"])


def bench(url: str, kind: dict[str, Any], rate: float, seconds: float, more: Sequence[str]) -> list[str]:
    """The command line of ``vllm bench serve`` for one class."""
    own = rate * kind["share"]
    return [
        *(sys.executable, "-m", "serving.cli.commands", "bench", "serve", "--backend", "openai"),
        *("--base-url", url, "--endpoint", "/v1/completions", "--model", MODEL),
        *("--tokenizer", str(ensure_embedded_model()), "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(kind["prompt"]), "--random-output-len", str(kind["output"])),
        *("--num-prompts", str(max(4, round(own * seconds))), "--request-rate", f"{own:.4f}", "--disable-tqdm", *more),
    ]


def figures(interactive: dict[str, Any], bulk: dict[str, Any]) -> dict[str, float]:
    """What is told of one run; failed requests are misses."""
    asked = interactive["num_prompts"]
    took_s = max(interactive["duration"], bulk["duration"])
    return {
        "attained": interactive["request_goodput"] * interactive["duration"] / asked,
        "goodput": interactive["request_goodput"],
        "ttft": interactive["p99_ttft_ms"],
        "tpot": interactive["p99_tpot_ms"],
        "bulk_tokens": bulk["output_throughput"],
        "requests": float(interactive["completed"] + bulk["completed"]),
        "took_s": took_s,
    }


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """By load, medians over the pairs: attainment of both systems, and bulk tokens of the plug-in over vLLM's."""
    found: dict[str, float] = {}
    for load in sorted({point["load"] for point in points}):
        at = f"{load:g}".replace(".", "_")
        bulk = {}
        for system in SYSTEMS:
            own = [point for point in points if (point["load"], point["system"]) == (load, system)]
            found[f"attained_{system.replace('-', '_')}_{at}"] = statistics.median(p["attained"] for p in own)
            bulk[system] = statistics.median(p["bulk_tokens"] for p in own)
        found[f"bulk_tokens_ratio_{at}"] = bulk["plug-in"] / bulk["vllm"]
    return found


def page(points: list[dict[str, Any]], capacity: float, options: argparse.Namespace) -> str:
    """The result as a page: medians over the pairs, and the ratios of each pair."""
    command = f"python -m benchmarks.plug_in --pairs {options.pairs} --seconds {options.seconds:g}"
    lines = [
        "# The plug-in against vLLM's own order",
        "",
        f"`{command} --loads {' '.join(f'{load:g}' for load in options.loads)}`",
        "",
        f"vLLM's own server with the embedded model, on a CPU ({processor()}) that other work shared.",
        f"`vllm bench serve` sends two classes at once: interactive "
        f"({INTERACTIVE['prompt']} + {INTERACTIVE['output']} tokens, "
        f"{options.ttft_ms:g} ms and then {options.tpot_ms:g} ms",
        f"per token) and bulk ({BULK['prompt']} + {BULK['output']} tokens, no objective). A load is a multiple of the "
        f"{capacity:.1f} requests/s that stock vLLM",
        "sustains. Servers take turns; figures are medians over the pairs, latencies of interactive requests at P99.",
        "",
        "| load | system | attained | goodput/s | TTFT ms | TPOT ms | bulk tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for load in options.loads:
        for system in SYSTEMS:
            mine = [point for point in points if (point["load"], point["system"]) == (load, system)]
            names = ("attained", "goodput", "ttft", "tpot", "bulk_tokens")
            medians = {name: statistics.median(point[name] for point in mine) for name in names}
            lines.append(ROW.format(load=load, system=system, **medians))
    lines += ["", "Attained by pair, plug-in and vLLM:", ""]
    for load in options.loads:
        told = {(p["pair"], p["system"]): p["attained"] for p in points if p["load"] == load}
        pairs = [f"{told[pair, 'plug-in']:.3f} and {told[pair, 'vllm']:.3f}" for pair in range(options.pairs)]
        lines.append(f"- load {load:g}: {'; '.join(pairs)}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
