"""Tuned capacity of a system: settings are chosen on seeds of their own, then measured on the experiment's seeds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from profiles.profile import Profile
from simulation.studies.capacity import MakeJobs, Search, median_and_spread
from simulation.studies.systems import EXACT, WHOLE_PROMPTS, DistServe, System

TUNING_SEED = 1000
TUNING_TOLERANCE = 0.05
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
SIDES = ((1, 1), (2, 1), (1, 2))  # prefill to decode replicas of DistServe
PREFILLS = (2048, WHOLE_PROMPTS)  # tokens that its batches of prompts have at most
MARGINS = (
    0.0,
    0.1,
    0.3,
    0.6,
    1.0,
    2.0,
)  # fixed slack margins of who sizes iterations by deadlines, beside the one learnt from errors


def variants(system: System, budgets: Sequence[int], drafts: Sequence[int]) -> dict[str, System]:
    """The settings of a system that its paper leaves to tuning, by name."""
    if isinstance(system, DistServe):
        return {
            f"{p}:{d}, {tokens}": replace(system, sides=(p, d), prefill_tokens=tokens)
            for p, d in SIDES
            for tokens in PREFILLS
        }
    if system.drafts:
        how = "up to " if system.adapts_drafts else ""
        return {f"{how}{d} drafts": replace(system, drafts=d) for d in drafts}
    if system.policy in ("sarathi", "sarathi-shed", "edf", "sjf"):
        return {f"budget {b}": system.with_budget(b) for b in budgets}
    if system.policy == "edf-shed":
        learnt = {} if system.straying == EXACT else {"learnt margin": system}
        return learnt | {f"margin {m}": replace(system, guards=False, slack_margin=m) for m in MARGINS}
    return {"as it is": system}


def tuned_over(system: System) -> dict[str, Any]:
    """What a task is told of its system's own settings, so that other choices make another task."""
    if isinstance(system, DistServe):
        return {"sides": list(SIDES), "prefills": list(PREFILLS)}
    return {"margins": list(MARGINS)} if system.policy == "edf-shed" else {}


def tuned_capacity(
    system: System,
    profile: Profile,
    make_jobs: MakeJobs,
    tuning_jobs: MakeJobs,
    bound_per_s: float,
    config: dict[str, Any],
) -> dict[str, Any]:
    """Capacity per GPU with the best setting, both figures, every seed.

    The setting with the highest per-tier capacity on ``TUNING_SEED`` is kept; the experiment's seeds do not choose.
    """
    options = variants(system, config["budgets"], config["drafts"])
    scores = {}
    for name, option in options.items() if len(options) > 1 else ():
        search = Search(option, profile, tuning_jobs, TUNING_SEED, config["target"], TUNING_TOLERANCE)
        scores[name] = search.capacity("worst_tier", bound_per_s / 2 * option.gpus) / option.gpus
    setting = max(scores, key=lambda name: scores[name]) if scores else next(iter(options))
    chosen, figures = options[setting], {}
    searches = [
        Search(chosen, profile, make_jobs, seed, config["target"], config["tolerance"]) for seed in config["seeds"]
    ]
    for figure in ("worst_tier", "overall"):
        rates = [search.capacity(figure, bound_per_s / 2 * chosen.gpus) / chosen.gpus for search in searches]
        figures[figure] = {**median_and_spread(rates), "seeds": rates}
    return {"setting": setting, "tuning": scores, "runs": sum(len(s.known) for s in searches), **figures}
