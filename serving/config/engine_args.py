"""Arguments of vLLM that an application must not set: set elsewhere, without effect, or not working yet.

Pure: knows vLLM's names, not vLLM. Each refusal is a reason to show behind the field's path.
"""

import json
from typing import Any

PLUG_IN = "is how this project's scheduler and its reports reach vLLM; engine.scheduler chooses the order"
DATA_PARALLEL = "replicas are the data parallelism here; raise fleet.num_replicas"
BY_RAY = "Ray places workers on nodes; set engine.placement_group_bundles or engine.placement_group_strategy"
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
    "worker_cls": "a replica brings its own executor and vLLM's workers",
    "prefill_context_parallel_size": "KV capacity is not yet counted over context-parallel ranks",
    "decode_context_parallel_size": "KV capacity is not yet counted over context-parallel ranks",
    "nnodes": BY_RAY,
    "node_rank": BY_RAY,
    "enable_elastic_ep": DATA_PARALLEL,
    "elastic_ep_max_dp_size": DATA_PARALLEL,
    "enable_fault_tolerance": "a replica that fails is replaced as a whole",
    "default_mm_loras": "name adapters in lora_modules, and have clients ask for them",
    "enable_prompt_embeds": "admission counts tokens, which an embedded prompt does not have",
    "tokens_only": "the ingress serves text",
    "enable_scale_out": "the ingress serves text",
    "max_num_queued_reqs": "has no effect behind the dispatcher",
    "max_num_queued_tokens": "has no effect behind the dispatcher",
    "sse_keep_alive_interval": "a stream begins when its request is admitted, which nothing may come before",
    "mm_processor_cache_type": "an ingress has no memory in common with engines",
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
SHARED = frozenset(  # say what the model, its tokenizer or its answers are: engines and ingress go by the same values
    "tokenizer tokenizer_mode trust_remote_code revision code_revision tokenizer_revision hf_config_path hf_overrides"
    " hf_token config_format model_impl model_class_overrides skip_tokenizer_init allowed_local_media_path"
    " allowed_media_domains limit_mm_per_prompt language_model_only media_io_kwargs mm_processor_kwargs"
    " interleave_mm_strings max_logprobs logprobs_mode logits_processors disable_sliding_window generation_config"
    " override_generation_config structured_outputs_config reasoning_config enable_lora max_loras max_lora_rank"
    " max_cpu_loras enable_tower_connector_lora".split()
)
ONLY_SERVER = frozenset(  # concern HTTP and text alone; engines have no such arguments
    "lora_modules chat_template_content_format trust_request_chat_template trust_request_mm_kwargs"
    " default_chat_template_kwargs response_role return_tokens_as_token_ids enable_auto_tool_choice"
    " exclude_tools_when_tool_choice_none tool_parser_plugin tool_strict_level tool_server max_log_len"
    " enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking enable_force_include_usage"
    " sse_keep_alive_interval enable_tokenizer_info_endpoint enable_log_outputs enable_log_deltas"
    " cohere_is_reasoning_model cohere_format anthropic_disabled_thinking_effort log_error_stack enable_scale_out"
    " fingerprint_mode fingerprint_value allow_credentials allowed_origins allowed_methods allowed_headers api_key"
    " middleware enable_request_id_headers disable_fastapi_docs enable_offline_docs enable_flash_late_interaction"
    " renderer_num_workers".split()
)
HARMLESS: dict[str, tuple[Any, ...]] = {  # values that say what is so anyway
    "worker_cls": ("auto",),
    "prefill_context_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "data_parallel_size": (1,),
    "data_parallel_size_local": (1,),
    "data_parallel_backend": ("mp",),
    "mm_processor_cache_type": ("lru",),
    "nnodes": (1,),
    "node_rank": (0,),
    "scheduling_policy": ("fcfs",),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
}
SERVES_OWN = (  # where vLLM's own HTTP server would listen, and how many processes of it there would be
    "host port uds root_path headless api_server_count grpc grpc_port config h11_max_incomplete_event_size"
    " h11_max_header_count uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints"
    " enable_ssl_refresh ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers data_parallel_supervisor_port"
    " dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold"
).split()
ENGINES_ONLY = (  # sizes of an engine, of which the ingress has none
    "tensor_parallel_size pipeline_parallel_size gpu_memory_utilization num_gpu_blocks_override enable_chunked_prefill"
    " scheduling_policy async_scheduling kv_transfer_config speculative_config long_prefill_token_threshold"
    " kv_cache_dtype mm_processor_cache_gb"
).split()

CORS: dict[str, Any] = {  # vLLM's defaults of what pages of other origins may do
    "allowed_origins": [],
    "allowed_methods": ["*"],
    "allowed_headers": ["*"],
    "allow_credentials": False,
}


def python_name(argument: str) -> str:
    """``--max-logprobs`` as ``max_logprobs``."""
    return argument.lstrip("-").replace("-", "_")


def why_not(name: str, value: Any) -> str:
    """Why no engine takes ``name=value``; empty where one does."""
    if value is None or value is False or value in HARMLESS.get(name, ()):
        return ""
    if name in ELSEWHERE:
        return f"set {ELSEWHERE[name]} instead"
    if name == "hf_token" and isinstance(value, str):
        return "put it into HF_TOKEN of the environment, where no page shows it; true takes the one of this machine"
    if name in ("runner", "convert"):
        return "only text generation is served"
    return DATA_PARALLEL if name.startswith("data_parallel_") else REFUSED.get(name, "")


def why_not_in_server(name: str, value: Any) -> str:
    """Why the ingress takes no ``name=value``; empty where it does."""
    if name in SERVES_OWN:
        return "has no effect, because Ray Serve listens; see http_options of the Serve file"
    if name in ENGINES_ONLY:
        return f"concerns engines; set engine.engine_kwargs.{name} instead"
    if name == "api_key" and value is not None and not _is_text(value):
        return "each key must be text; put it in quotes"  # without the key, which errors and logs do not show
    if name in CORS and name.startswith("allowed_") and not _is_list(value):
        return "must be a list; put it in brackets"
    return why_not(name, value)


def _is_list(value: Any) -> bool:
    """Whether it is a list, or one in JSON, as vLLM's own flag has it."""
    try:
        return isinstance(json.loads(value) if isinstance(value, str) else value, list | tuple)
    except ValueError:
        return False


def _is_text(value: Any) -> bool:
    """Whether it is a text or a list of texts."""
    return all(isinstance(each, str) for each in (value if isinstance(value, list | tuple) else [value]))
