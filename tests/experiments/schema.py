"""result.json, schema 1, key by key, and what we add to it."""

from typing import Any

INTERVAL = {"value", "low", "high", "n"}
SIDE = {"tokens", "ttft_s", "tpot_s", "itl_p50_s", "itl_p99_s", "tokens_per_second", "latency_s"}
# Schema 1, and what we add to it.
SCHEMA: dict[str, set[str]] = {
    "": {
        "schema", "key", "config", "digests", "provenance", "status", "prompts", "baseline", "strategy", "by_category",
        "speedup", "end_to_end_speedup", "predicted_speedup", "exactness", "memory", "decode", "prefill", "quality",
        "compare_hf", "implementation", "warnings",
    },
    "digests": {"weights", "draft", "task"},
    "provenance": {
        "version", "commit", "dirty", "python", "torch", "triton", "transformers", "device", "threads", "dtype", "seed",
        "started_at", "load_before", "load_after",
    },
    "baseline": {"kind"} | SIDE,
    "strategy": SIDE | {
        "tokens_per_step", "tokens_per_drafted_step", "acceptance_rate", "acceptance_by_position", "drafted_per_step",
        "rows_verified_per_step", "accepted_by_source", "time_share",
    },
    "strategy.time_share": {"draft", "verify", "accept", "commit", "other"},
    "by_category.copy": {"n", "speedup", "tokens_per_step", "acceptance_rate"},
    "by_category.copy.speedup": INTERVAL,
    "speedup": INTERVAL,
    "end_to_end_speedup": INTERVAL,
    "exactness": {"verdict", "identical", "prompts", "divergences"},
    "memory": {"weights_bytes", "kv_bytes", "kv_bytes_formula", "peak_bytes"},
    "decode": {"mbu", "mbu_textbook"},
    "prefill": {"mfu_useful", "mfu_hardware"},
    "timing": {"mode", "baseline", "anchors", "drift"},
}  # fmt: skip
ADDED: dict[str, set[str]] = {
    "": {"profile", "timing", "replay", "pages"},
    "digests": {"model", "quality", "replay"},
    "provenance": {"dtype_reason", "clock_mhz", "omp_wait_policy"},
    "baseline": {"burst"},
    "strategy": {"burst", "steps", "steps_without_draft", "by_source"},
    "memory": {"kv_bytes_per_token"},
    "decode": {"mbu_baseline", "peak"},
}
# A line of samples.jsonl, and what a replay reads of it.
SAMPLE = {"id", "category", "batch", "prompt_tokens", "prompt", "baseline", "strategy", "divergence"}
SAMPLE |= {"prompt_ids", "documents", "max_new_tokens"}
ANSWER = {"text", "tokens", "reason", "ttft_s", "tpot_s", "latency_s", "delivered"}
REPLAY = {"source", "run", "prompts", "answers", "device", "dtype"}
DIVERGENCE = {"id", "position", "gap"} | {"expected", "got", "second", "top_logit"}


def at(result: dict[str, Any], path: str) -> Any:
    for name in path.split(".") if path else ():
        result = result[name]
    return result
