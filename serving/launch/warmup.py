"""Compile, or load from the cache, every kernel of a live fleet: the controller's, and those of its engines.

``python -m serving.launch.warmup`` fills the cache, so that engines which start together do not compile the same ones
each: those on this machine wait for it. Takes a minute or two; a start takes a second or two after that.
"""

from controller.warmup import warm_up as warm_up_controller
from profiles.cache_filling import filling
from replicas.config import EMBEDDED_PROFILE
from replicas.request_rows import RequestRows
from replicas.step_planner import StepPlanner, profile_coefficients


def warm_up() -> None:
    """As the controller's actor and each engine's scheduler do when they start."""
    warm_up_controller()
    coefficients, capacity_tokens = profile_coefficients(EMBEDDED_PROFILE)
    planner = StepPlanner(
        coefficients, kv_capacity_tokens=capacity_tokens, block_tokens=32, max_running=64, max_batch_tokens=2048
    )
    planner.warm_up()
    RequestRows().warm_up()


if __name__ == "__main__":
    with filling():
        warm_up()
