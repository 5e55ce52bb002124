"""Tests of vLLM's that ours does not pass by intention, by name, and why.

By name and by what each fails with: should a new vLLM set one of these flags by itself, every test fails for it, and
one that is expected to differ in its order may still lose a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Intended:
    """Tests that fail under ``schedulers``, each with the error that it names."""

    schedulers: tuple[str, ...]
    tests: Mapping[str, str]
    reason: str


def each(error: str, names: str) -> dict[str, str]:
    """All these tests with the same error."""
    return dict.fromkeys(names.split(), error)


EVERY = ("vllm", "plug-in", "slo")
INTENDED = (
    Intended(
        EVERY,
        {"test_abort_request_when_structured_output_fsm_cannot_advance": "has no attribute '_failures'"},
        "the test makes a scheduler without calling its constructor",
    ),
    Intended(
        EVERY,
        {"test_diffusion_scheduler_is_selected_by_default": "get_scheduler_cls()"},
        "the test asks which of its own classes vLLM selects",
    ),
    Intended(
        ("plug-in",),
        each(
            "ConfigError: --scheduling-policy: ",
            "test_priority_scheduling_basic_ordering test_priority_scheduling_arrival_time_tiebreaker"
            " test_priority_scheduling_mixed_priority_and_arrival test_priority_scheduling_preemption"
            " test_priority_scheduling_no_preemption_when_space_available"
            " test_priority_scheduling_preemption_victim_selection test_priority_scheduling_equal_priority_preemption"
            " test_priority_scheduling_waiting_queue_order test_priority_scheduling_fcfs_fallback"
            " test_priority_scheduling_with_limited_slots test_priority_scheduling_heap_property"
            " test_priority_scheduling_preemption_and_resumption_when_out_of_kv"
            " test_allocation_retry_waits_for_fence_then_succeeds"
            " test_priority_scheduler_preempt_skipped_request",
        ),
        "refused: beside objectives there is no second order by priority",
    ),
    Intended(
        ("plug-in",),
        each(
            "ConfigError: --long-prefill-token-threshold: ",
            "test_schedule_concurrent_partial_requests test_long_prefill_threshold_ignored_when_alone"
            " test_long_prefill_threshold_applies_with_other_requests test_long_prefill_threshold_floored_by_fair_share"
            " test_replay_only_chunks_make_progress",
        ),
        "refused: the planner sizes the chunks of a prompt",
    ),
    Intended(
        ("plug-in",),
        each(
            "ConfigError: --no-enable-chunked-prefill: ",
            "test_schedule_order test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request"
            " test_variable_length_cross_attn_block_allocation test_cross_attn_blocks_not_over_allocated"
            " test_cross_attn_blocks_not_under_allocated test_cross_attn_zero_blocks_without_encoder_inputs",
        ),
        "refused: the planner cuts prompts into chunks",
    ),
    Intended(
        ("plug-in",),
        each(
            "ConfigError: --pipeline-parallel-size: ",
            "test_async_scheduling_pp_allows_rescheduling_with_output_placeholders",
        ),
        "refused: the planner knows one batch at a time",
    ),
    Intended(
        ("slo",),
        {
            "test_schedule_order": "assert 3 == ",
            "test_kv_cache_release_after_keep_pause_preserves_requests": "assert {'1': 10} == {'0': 11}",
            "test_fcfs_mixed_blocked_types_remote_load_drains_first": "assert [<vllm.v1.req",
            "test_async_load_reservation_prevents_wedge_e2e": "assert <RequestStatus.WAITING: ",
        },
        "of equal requests the shorter prompt runs first, not the earlier one",
    ),
    Intended(
        ("slo",),
        {
            "test_pooling_chunked_prefill_can_finish_at_max_model_len": "assert {'pool': 2} == {'pool': 4}",
            "test_p_side_chunked_prefill_mamba": "assert 16 == 32",
        },
        "where every request ends with one token, prompts are cut at half of the token budget",
    ),
    Intended(
        ("slo",),
        {
            "test_sync_load_failure": "assert 1 == 3",
            "test_sync_load_failure_with_shared_blocks": "assert 1 == 2",
        },
        "a KV store is asked for hits when vLLM schedules a request, not before: the plan counts the whole prompt, so"
        " fewer begin in one step",
    ),
    Intended(
        ("slo",),
        {"test_cannot_schedule_after_recv": "assert 2 == 1"},
        "a request for which there is no block runs later and keeps its own, where vLLM takes them from it",
    ),
    Intended(
        ("slo",),
        {"test_schedule_concurrent_partial_requests": "assert 2 == 3"},
        "sets long_prefill_token_threshold, which a configuration with the planner refuses",
    ),
    Intended(
        ("slo",),
        {
            "test_priority_scheduling_preemption": "Expected low-priority 'lo1' to be preempted",
            "test_priority_scheduling_preemption_and_resumption_when_out_of_kv": "assert '0' == '1'",
            **each(
                "'PriorityRequestQueue' object has no attribute 'clear'",
                "test_priority_scheduling_equal_priority_preemption test_priority_scheduling_waiting_queue_order"
                " test_priority_scheduling_with_limited_slots test_priority_scheduling_heap_property",
            ),
        },
        "sets the policy priority, which a configuration with the planner refuses",
    ),
)


def reason_for(scheduler: str, test: str, why: str) -> str:
    """Why ``scheduler`` is meant not to pass a test that failed with ``why``; empty where it is not meant so."""
    name = test.rpartition("::")[2].partition("[")[0]
    for intended in INTENDED:
        if scheduler in intended.schedulers and name in intended.tests and intended.tests[name] in why:
            return intended.reason
    return ""
