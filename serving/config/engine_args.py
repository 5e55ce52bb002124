"""Arguments of vLLM that an application must not set: set elsewhere, without effect, or not working yet.

Pure: knows vLLM's names, not vLLM. Each refusal is a reason to show behind the field's path.
"""

from typing import Any

PLUG_IN = "is how this project's scheduler and its reports reach vLLM; engine.scheduler chooses the order"
DATA_PARALLEL = "data parallelism inside a replica does not work yet; raise fleet.num_replicas"
ONE_NODE = "a replica's engine runs on one node; raise fleet.num_replicas"
ELSEWHERE = {  # an argument of vLLM -> the key that sets it
    "model": "model.id",
    "model_tag": "model.id",
    "served_model_name": "model.served_model_name",
    "enable_prefix_caching": "engine.enable_prefix_caching",
    "kv_cache_memory_bytes": "engine.kv_cache_gib",
    "max_num_active_seqs": "engine.max_num_seqs",
    "max_num_scheduled_tokens": "engine.max_num_batched_tokens",
}
REFUSED = {
    "scheduler_cls": PLUG_IN,
    "additional_config": PLUG_IN,
    "distributed_executor_backend": "a replica brings its own executor, which ends with it",
    "pipeline_parallel_size": "the iteration-time model knows one batch at a time; use tensor_parallel_size",
    "prefill_context_parallel_size": "KV capacity is not yet counted over context-parallel ranks",
    "decode_context_parallel_size": "KV capacity is not yet counted over context-parallel ranks",
    "nnodes": ONE_NODE,
    "node_rank": ONE_NODE,
    "enable_elastic_ep": DATA_PARALLEL,
    "elastic_ep_max_dp_size": DATA_PARALLEL,
    "enable_fault_tolerance": "a replica that fails is replaced as a whole",
    "enable_prompt_embeds": "admission counts tokens, which an embedded prompt does not have",
    "tokens_only": "the ingress serves text",
    "enable_scale_out": "the ingress serves text",
    "max_num_queued_reqs": "has no effect behind the dispatcher",
    "max_num_queued_tokens": "has no effect behind the dispatcher",
    "_api_process_count": "is vLLM's own business",
    "_api_process_rank": "is vLLM's own business",
}
ONLY_FOR_STOCK = {  # what schedulers other than vLLM's own decide themselves
    "enable_chunked_prefill": "splits prompts itself",
    "long_prefill_token_threshold": "splits prompts itself",
    "long_prefill_token_threshold_adaptive": "splits prompts itself",
    "scheduling_policy": "orders requests itself",
}
SPECULATES = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
MOVES_KV = ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend")
HARMLESS: dict[str, tuple[Any, ...]] = {  # values that say what is so anyway
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "data_parallel_size": (1,),
    "data_parallel_size_local": (1,),
    "data_parallel_backend": ("mp",),
    "nnodes": (1,),
    "node_rank": (0,),
    "scheduling_policy": ("fcfs",),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
}
SERVES_OWN = (  # where vLLM's own HTTP server would listen, and how many processes of it there would be
    "host port uds root_path headless api_server_count grpc grpc_port config h11_max_incomplete_event_size"
    " h11_max_header_count uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints"
    " enable_ssl_refresh ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers"
).split()
ENGINES_ONLY = (  # sizes of an engine, of which the ingress has none
    "tensor_parallel_size gpu_memory_utilization num_gpu_blocks_override enable_chunked_prefill scheduling_policy"
    " async_scheduling kv_transfer_config speculative_config long_prefill_token_threshold kv_cache_dtype"
).split()


def python_name(argument: str) -> str:
    """``--max-logprobs`` as ``max_logprobs``."""
    return argument.lstrip("-").replace("-", "_")


def why_not(name: str, value: Any) -> str:
    """Why no engine takes ``name=value``; empty where one does."""
    if value is None or value is False or value in HARMLESS.get(name, ()):
        return ""
    if name in ELSEWHERE:
        return f"set {ELSEWHERE[name]} instead"
    if name in ("runner", "convert"):
        return "only text generation is served"
    return DATA_PARALLEL if name.startswith("data_parallel_") else REFUSED.get(name, "")


def why_not_in_server(name: str, value: Any) -> str:
    """Why the ingress takes no ``name=value``; empty where it does."""
    if name in SERVES_OWN:
        return "has no effect, because Ray Serve listens; see http_options of the Serve file"
    if name in ENGINES_ONLY:
        return f"concerns engines; set engine.engine_kwargs.{name} instead"
    return why_not(name, value)
