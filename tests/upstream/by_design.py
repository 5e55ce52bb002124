"""Tests of vLLM's that ours does not pass by intention, by name, and why.

By name rather than by what they fail with: should a new vLLM set one of these flags by itself, every test fails for it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Intended:
    """Tests that fail with ``error`` under ``schedulers``."""

    schedulers: tuple[str, ...]
    error: str
    reason: str
    tests: frozenset[str]


EVERY = ("vllm", "plug-in", "slo")
INTENDED = (
    Intended(
        EVERY,
        "has no attribute '_failures'",
        "the test makes a scheduler without calling its constructor",
        frozenset({"test_abort_request_when_structured_output_fsm_cannot_advance"}),
    ),
    Intended(
        EVERY,
        "get_scheduler_cls()",
        "the test asks which of its own classes vLLM selects",
        frozenset({"test_diffusion_scheduler_is_selected_by_default"}),
    ),
    Intended(
        ("plug-in",),
        "ConfigError: --scheduling-policy: ",
        "refused: beside objectives there is no second order by priority",
        frozenset(
            "test_priority_scheduling_basic_ordering test_priority_scheduling_arrival_time_tiebreaker"
            " test_priority_scheduling_mixed_priority_and_arrival test_priority_scheduling_preemption"
            " test_priority_scheduling_no_preemption_when_space_available"
            " test_priority_scheduling_preemption_victim_selection test_priority_scheduling_equal_priority_preemption"
            " test_priority_scheduling_waiting_queue_order test_priority_scheduling_fcfs_fallback"
            " test_priority_scheduling_with_limited_slots test_priority_scheduling_heap_property"
            " test_priority_scheduling_preemption_and_resumption_when_out_of_kv"
            " test_allocation_retry_waits_for_fence_then_succeeds"
            " test_priority_scheduler_preempt_skipped_request".split()
        ),
    ),
    Intended(
        ("plug-in",),
        "ConfigError: --long-prefill-token-threshold: ",
        "refused: the planner sizes the chunks of a prompt",
        frozenset(
            "test_schedule_concurrent_partial_requests test_long_prefill_threshold_ignored_when_alone"
            " test_long_prefill_threshold_applies_with_other_requests test_long_prefill_threshold_floored_by_fair_share"
            " test_replay_only_chunks_make_progress".split()
        ),
    ),
    Intended(
        ("plug-in",),
        "ConfigError: --no-enable-chunked-prefill: ",
        "refused: the planner cuts prompts into chunks",
        frozenset(
            "test_schedule_order test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request"
            " test_variable_length_cross_attn_block_allocation test_cross_attn_blocks_not_over_allocated"
            " test_cross_attn_blocks_not_under_allocated test_cross_attn_zero_blocks_without_encoder_inputs".split()
        ),
    ),
    Intended(
        ("plug-in",),
        "ConfigError: --pipeline-parallel-size: ",
        "refused: the planner knows one batch at a time",
        frozenset({"test_async_scheduling_pp_allows_rescheduling_with_output_placeholders"}),
    ),
    Intended(
        ("slo",),
        "",
        "of equal requests the shorter prompt runs first, not the earlier one",
        frozenset(
            "test_schedule_order test_kv_cache_release_after_keep_pause_preserves_requests"
            " test_fcfs_mixed_blocked_types_remote_load_drains_first"
            " test_async_load_reservation_prevents_wedge_e2e".split()
        ),
    ),
    Intended(
        ("slo",),
        "",
        "where every request ends with one token, prompts are cut at half of the token budget",
        frozenset({"test_pooling_chunked_prefill_can_finish_at_max_model_len", "test_p_side_chunked_prefill_mamba"}),
    ),
    Intended(
        ("slo",),
        "",
        "a KV store is asked for hits when vLLM schedules a request, not before: the plan counts the whole prompt",
        frozenset({"test_sync_load_failure", "test_sync_load_failure_with_shared_blocks"}),
    ),
    Intended(
        ("slo",),
        "",
        "a request for which there is no block runs later and keeps its own, where vLLM takes them from it",
        frozenset({"test_cannot_schedule_after_recv"}),
    ),
    Intended(
        ("slo",),
        "",
        "sets long_prefill_token_threshold, which a configuration with the planner refuses",
        frozenset({"test_schedule_concurrent_partial_requests"}),
    ),
    Intended(
        ("slo",),
        "",
        "sets the policy priority, which a configuration with the planner refuses",
        frozenset(
            "test_priority_scheduling_preemption test_priority_scheduling_equal_priority_preemption"
            " test_priority_scheduling_waiting_queue_order test_priority_scheduling_with_limited_slots"
            " test_priority_scheduling_heap_property"
            " test_priority_scheduling_preemption_and_resumption_when_out_of_kv".split()
        ),
    ),
)


def reason_for(scheduler: str, test: str, why: str) -> str:
    """Why ``scheduler`` is meant not to pass a test that failed with ``why``; empty where it is not meant so."""
    name = test.rpartition("::")[2].partition("[")[0]
    for each in INTENDED:
        if scheduler in each.schedulers and name in each.tests and each.error in why:
            return each.reason
    return ""
