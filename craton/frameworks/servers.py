"""Commands for vLLM and SGLang from a job of kind `serve`, with the same model, address, limits and memory.

On several nodes every node runs the command (`processes: node`); in vLLM all nodes but the first run headless.
"""

from __future__ import annotations

from craton.frameworks.errors import FrameworkError
from craton.job import Job
from craton.job.model import model_presets
from craton.job.sections.serving import Serve

# Values of a job are arguments of this script, never part of its text.
HEADLESS = 'if [ "$CRATON_NODE_RANK" != 0 ]; then set -- "$@" --headless; fi; exec "$@"'
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # others: a quantized checkpoint names its own


def vllm_command(job: Job, tp: int, pp: int = 1, num_nodes: int = 1) -> list[str]:
    """Return `vllm serve` for a job of kind serve, with tp · pp GPUs per model replica."""
    serve = _serve(job)
    words = ["vllm", "serve", str(job.model), "--host", serve.host, "--port", str(serve.port)]
    words += ["--served-model-name", job.served_name, "--max-model-len", str(job.served_length)]
    words += ["--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp)]
    words += ["--gpu-memory-utilization", f"{serve.memory:g}", "--max-num-seqs", str(serve.running)]
    words += ["--max-num-batched-tokens", str(serve.step_tokens), "--dtype", DTYPES.get(serve.precision, "auto")]
    words += ["--quantization", "fp8"] if serve.precision == "fp8" else []
    words += ["--kv-cache-dtype", "fp8"] if serve.kv_precision == "fp8" else []
    if num_nodes == 1:
        return words
    words += ["--nnodes", "{num_nodes}", "--node-rank", "{node_rank}"]
    words += ["--master-addr", "{master_address}", "--master-port", "{master_port}"]
    return ["sh", "-c", HEADLESS, "vllm", *words]


def sglang_command(job: Job, tp: int, pp: int = 1, num_nodes: int = 1) -> list[str]:
    """Return the SGLang launch command for a job of kind serve."""
    serve = _serve(job)
    words = ["python", "-m", "sglang.launch_server", "--model-path", str(job.model)]
    words += ["--host", serve.host, "--port", str(serve.port), "--served-model-name", job.served_name]
    words += ["--context-length", str(job.served_length), "--tp-size", str(tp), "--pp-size", str(pp)]
    words += ["--mem-fraction-static", f"{serve.memory:g}", "--max-running-requests", str(serve.running)]
    words += ["--chunked-prefill-size", str(serve.step_tokens), "--dtype", DTYPES.get(serve.precision, "auto")]
    words += ["--quantization", "fp8"] if serve.precision == "fp8" else []
    words += ["--kv-cache-dtype", "fp8_e4m3"] if serve.kv_precision == "fp8" else []
    if num_nodes > 1:
        words += ["--nnodes", "{num_nodes}", "--node-rank", "{node_rank}"]
        words += ["--dist-init-addr", "{master_address}:{master_port}"]
    return words


def _serve(job: Job) -> Serve:
    if job.serve is None or not isinstance(job.model, str) or job.model in model_presets():
        raise FrameworkError("a server command needs a job of kind serve whose model is a folder or a Hub id")
    return job.serve
