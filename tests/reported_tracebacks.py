"""Ends of logs from public issue trackers, shortened, with the issue that each is from and what must be read from it.

Middle frames and messages are cut, and names of people and companies replaced; the form of the lines is as reported.
"""

# ruff: noqa: E501 -- lines of logs

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """The end of a log; expected: type, words of the message, user frame, and the cause that follows."""

    name: str
    source: str
    text: str
    type: str
    message: str
    user_frame: str = ""
    cause: str = ""
    is_echo: bool = False
    code: int = 1


LIBRARY = "/opt/conda/lib/python3.10/site-packages"


def traced(*frames: str, end: str) -> str:
    """A traceback of these frames, `file:line in function`, with a line of code each."""
    lines = ["Traceback (most recent call last):"]
    for frame in frames:
        file, _, rest = frame.rpartition(":")
        line, _, function = rest.partition(" in ")
        lines += [f'  File "{file}", line {line}, in {function}', "    work(self)", "    ^^^^^^^^^^"]
    return "\n".join([*lines, end])


def prefixed(prefix: str, text: str) -> str:
    return "\n".join(f"{prefix}{line}" for line in text.splitlines())


DURING = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
EMPTY = traced(f"{LIBRARY}/torch/utils/data/dataloader.py:724 in _try_get_data", end="_queue.Empty")
CHILD_FAILED = (
    traced(
        "/opt/conda/bin/torchrun:8 in <module>",
        f"{LIBRARY}/torch/distributed/launcher/api.py:264 in launch_agent",
        end="torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    )
    + "\n============\ntrain.py FAILED\n------------\nRoot Cause (first observed failure):\n[0]:\n"
    "  rank      : 3 (local_rank: 3)\n  exitcode  : 1 (pid: 96)\n"
)

ENDINGS = (
    Ending(
        "loader worker exited",
        "https://github.com/azadis/MC-GAN/issues/19",
        EMPTY
        + DURING
        + traced(
            "/home/me/train_stack.py:44 in <module>",
            f"{LIBRARY}/torch/utils/data/dataloader.py:737 in _try_get_data",
            end="RuntimeError: DataLoader worker (pid(s) 18360) exited unexpectedly",
        )
        + "\n\nProcess finished with exit code 1\n",
        "RuntimeError",
        "exited unexpectedly",
        "/home/me/train_stack.py:44 in <module>",
        "user_code_failed",
    ),
    Ending(
        "quota",
        "https://github.com/open-mmlab/mmdetection/issues/12069",
        "12/09 06:49:23 - mmengine - INFO - Saving checkpoint at 14 epochs\n"
        + traced(
            "tools/train.py:122 in <module>",
            f"{LIBRARY}/mmengine/hooks/checkpoint_hook.py:345 in after_train_epoch",
            end="OSError: [Errno 122] Disk quota exceeded",
        ),
        "OSError",
        "Disk quota exceeded",
        "tools/train.py:122 in <module>",
        "storage_full",
    ),
    Ending(
        "no space behind a logger",
        "https://github.com/databrickslabs/dolly/issues/139",
        prefixed(
            "2023-04-29 06:01:12.977 [177/train/578 (pid 28936)] [09c561ee] ",
            "2023-04-29 06:01:12 ERROR [__main__] main failed\n"
            + traced(
                f"{LIBRARY}/torch/serialization.py:604 in _save", end="OSError: [Errno 28] No space left on device"
            ),
        ),
        "OSError",
        "No space left",
        "",
        "storage_full",
    ),
    Ending(
        "no space, then another",
        "https://github.com/babysor/MockingBird/issues/774",
        "{| Epoch: 55/167 (996/1926) | Loss: 0.29 |}"
        + traced(f"{LIBRARY}/torch/serialization.py:499 in _save", end="OSError: [Errno 28] No space left on device")
        + DURING
        + traced(
            "/home/me/synthesizer_train.py:37 in <module>",
            f"{LIBRARY}/torch/serialization.py:260 in __exit__",
            end="RuntimeError: [enforce fail at inline_container.cc:300] . unexpected pos 640 vs 534",
        ),
        "OSError",
        "No space left",
        "/home/me/synthesizer_train.py:37 in <module>",
        "storage_full",
    ),
    Ending(
        "write failed",
        "https://github.com/pytorch/pytorch/issues/10577",
        traced(
            "train.py:250 in <module>",
            f"{LIBRARY}/torch/serialization.py:297 in _save",
            end="RuntimeError: write(): fd 29 failed with Input/output error",
        ),
        "RuntimeError",
        "Input/output error",
        "train.py:250 in <module>",
        "storage_error",
    ),
    Ending(
        "torchrun",
        "https://github.com/VCIP-RGBD/DFormer/issues/52",
        traced(
            "utils/train.py:240 in <module>",
            f"{LIBRARY}/torch/nn/functional.py:2478 in batch_norm",
            end="torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 76.00 MiB.",
        )
        + "\n"
        + CHILD_FAILED,
        "torch.cuda.OutOfMemoryError",
        "CUDA out of memory",
        "utils/train.py:240 in <module>",
        "gpu_out_of_memory",
    ),
    Ending(
        "torchrun alone",
        "https://github.com/QwenLM/Qwen3-Coder/issues/174",
        CHILD_FAILED,
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
        "exitcode  : 1",
        "",
        "rank_failed",
    ),
    Ending(
        "old CUDA",
        "https://github.com/pytorch/pytorch/issues/465",
        "THCudaCheck FAIL file=/pytorch/torch/lib/THC/generic/THCStorage.cu line=66 error=2 : out of memory\n"
        + traced(
            "main_snli.py:74 in __init__",
            f"{LIBRARY}/torch/nn/modules/module.py:143 in cuda",
            end="RuntimeError: cuda runtime error (2) : out of memory at THCStorage.cu:66",
        ),
        "RuntimeError",
        "out of memory",
        "main_snli.py:74 in __init__",
        "gpu_out_of_memory",
    ),
    Ending(
        "no such model",
        "https://github.com/huggingface/transformers/issues/36104",
        traced(
            f"{LIBRARY}/requests/models.py:1024 in raise_for_status",
            end="requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/a/b",
        )
        + CAUSED
        + traced(
            f"{LIBRARY}/huggingface_hub/utils/_http.py:454 in hf_raise_for_status",
            end="huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-67a)\n\nRepository",
        )
        + CAUSED
        + traced(
            "/home/me/main.py:3 in <module>",
            f"{LIBRARY}/transformers/utils/hub.py:426 in cached_file",
            end="OSError: a/b is not a local folder and is not a valid model identifier listed on the Hub",
        ),
        "huggingface_hub.errors.RepositoryNotFoundError",
        "401 Client Error",
        "/home/me/main.py:3 in <module>",
        "missing_model",
    ),
    Ending(
        "clients did not join",
        "https://github.com/OpenRLHF/OpenRLHF/issues/1040",
        prefixed(
            "(ActorModelRayActor pid=4711) ",
            traced(
                f"{LIBRARY}/torch/distributed/rendezvous.py:174 in _create_c10d_store",
                end="torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
            ),
        ),
        "torch.distributed.DistStoreError",
        "1/3 clients joined",
        "",
        "rendezvous_failed",
    ),
    Ending(
        "gloo timeout",
        "https://github.com/meta-pytorch/torchtune/issues/2676",
        prefixed(
            "[rank2]: ",
            traced(
                f"{LIBRARY}/recipes/lora_finetune_distributed.py:745 in save_checkpoint",
                end="RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting",
            ),
        ),
        "RuntimeError",
        "Timed out waiting",
        "",
        is_echo=True,
    ),
    Ending(
        "segmentation fault",
        "https://github.com/ziyanx02/Genesis-backflip/issues/2",
        "Fatal Python error: Segmentation fault\n\nThread 0x00007f9fb1cff700 (most recent call first):\n  <no Python frame>\n\n"
        "Thread 0x00007fa040e2b700 (most recent call first):\n"
        '  File "/opt/conda/lib/python3.10/threading.py", line 324 in wait\n\n'
        "Current thread 0x00007fa2972464c0 (most recent call first):\n"
        f'  File "{LIBRARY}/torch/nn/modules/module.py", line 1532 in _wrapped_call_impl\n'
        '  File "/home/me/reward_wrapper.py", line 88 in _reward\n'
        '  File "/home/me/env.py", line 498 in compute_reward\n\nExtension modules: numpy.core (total: 1)\n',
        "Fatal Python error",
        "Segmentation fault",
        "/home/me/reward_wrapper.py:88 in _reward",
        "program_crashed",
        code=-11,
    ),
    Ending(
        "port of a server",
        "https://github.com/microsoft/JARVIS/issues/118",
        "[ ready ] 87.86s\n"
        + traced(
            "models_server.py:635 in <module>",
            f"{LIBRARY}/waitress/wasyncore.py:396 in bind",
            end="OSError: [Errno 98] Address already in use",
        ),
        "OSError",
        "already in use",
        "models_server.py:635 in <module>",
        "port_in_use",
    ),
    Ending(
        "port of a store",
        "https://github.com/vllm-project/vllm/issues/11617",
        traced(
            f"{LIBRARY}/torch/distributed/rendezvous.py:186 in _create_c10d_store",
            end="RuntimeError: The server socket has failed to listen on any local network address. useIpv6: 0, code: -98, "
            "name: EADDRINUSE, message: address already in use",
        ),
        "RuntimeError",
        "EADDRINUSE",
        "",
        "port_in_use",
    ),
    Ending(
        "embedding",
        "https://github.com/DEEP-PolyU/KEQA_WSDM19/issues/26",
        traced(
            "test_main.py:41 in entity_predict",
            "/home/me/entity_detection.py:39 in forward",
            f"{LIBRARY}/torch/nn/functional.py:2210 in embedding",
            end="IndexError: index out of range in self",
        ),
        "IndexError",
        "index out of range in self",
        "/home/me/entity_detection.py:39 in forward",
        "bad_data",
    ),
    Ending(
        "slurm",
        "https://github.com/ArjunaCluster/ArjunaUsers/issues/52",
        "Epoch: [0][511/1736]\t Loss 0.5117 MAE 0.6075\n"
        "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  python3 main.py --epochs 400\n"
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may have been "
        "killed by the cgroup out-of-memory handler.\n",
        "",
        "oom-kill event",
        "",
        "out_of_memory",
        code=137,
    ),
    Ending(
        "slurm, new words",
        "https://github.com/chrisknewman/tusas/issues/149",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: nid001277: tasks 1-3: Out Of Memory\nsrun: Terminating StepId=440575.0\n",
        "",
        "Out Of Memory",
        "",
        "out_of_memory",
        code=137,
    ),
    Ending(
        "shared memory",
        "https://github.com/open-mmlab/mmsegmentation/issues/1356",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        + traced(
            f"{LIBRARY}/torch/utils/data/_utils/signal_handling.py:66 in handler",
            end="RuntimeError: DataLoader worker (pid 7579) is killed by signal: Bus error. It is possible that dataloader's "
            "workers are out of shared memory. Please try to raise your shared memory limit.",
        )
        + CAUSED
        + traced(
            "tools/train.py:245 in <module>",
            f"{LIBRARY}/torch/utils/data/dataloader.py:1003 in _try_get_data",
            end="RuntimeError: DataLoader worker (pid(s) 7579) exited unexpectedly",
        ),
        "RuntimeError",
        "out of shared memory",
        "tools/train.py:245 in <module>",
        "shared_memory_full",
    ),
    Ending(
        "open files",
        "https://github.com/kuleshov-group/caduceus/issues/58",
        traced(
            "/home/me/train.py:700 in main",
            "/opt/conda/lib/python3.8/multiprocessing/popen_fork.py:68 in _launch",
            end="OSError: [Errno 24] Too many open files",
        )
        + "\n\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n",
        "OSError",
        "Too many open files",
        "/home/me/train.py:700 in main",
        "too_many_open_files",
    ),
    Ending(
        "host memory",
        "https://github.com/pytorch/pytorch/pull/20618",
        traced(
            "<stdin>:1 in <module>",
            end="RuntimeError: [enforce fail at CPUAllocator.cpp:65] . DefaultCPUAllocator: can't allocate memory: you tried "
            "to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)",
        ),
        "RuntimeError",
        "can't allocate memory",
        "<stdin>:1 in <module>",
        "out_of_memory",
    ),
    Ending(
        "missing package",
        "https://github.com/togethercomputer/OpenChatKit/issues/175",
        traced(
            "/home/me/training/dist_clm_train.py:478 in <module>",
            "/home/me/training/modules/llama_modules.py:37 in <module>",
            end="ModuleNotFoundError: No module named 'flash_attn'",
        ),
        "ModuleNotFoundError",
        "flash_attn",
        "/home/me/training/modules/llama_modules.py:37 in <module>",
        "missing_package",
    ),
    Ending(
        "hub",
        "https://github.com/huggingface/huggingface_hub/issues/2319",
        traced(
            f"{LIBRARY}/urllib3/util/connection.py:85 in create_connection",
            end="OSError: [Errno 101] Network is unreachable",
        )
        + DURING
        + traced(
            f"{LIBRARY}/urllib3/connection.py:186 in _new_conn",
            end="urllib3.exceptions.NewConnectionError: <HTTPSConnection object at 0x7fc3>: Failed to establish a new connection",
        )
        + DURING
        + traced(
            "/home/me/run.py:9 in <module>",
            f"{LIBRARY}/requests/adapters.py:519 in send",
            end="requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded",
        ),
        "OSError",
        "Network is unreachable",
        "/home/me/run.py:9 in <module>",
        "service_unreachable",
    ),
    Ending(
        "peer closed",
        "https://github.com/pytorch/pytorch/issues/78514",
        traced(
            "/home/me/test.py:20 in main_worker",
            f"{LIBRARY}/torch/distributed/distributed_c10d.py:1002 in recv",
            end="RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [18.25.6.30]:30872",
        ),
        "RuntimeError",
        "Connection closed by peer",
        "/home/me/test.py:20 in main_worker",
        is_echo=True,
    ),
    Ending(
        "full mesh, two actors",
        "https://github.com/vllm-project/vllm/issues/6775",
        prefixed(
            "[rank0]: ",
            traced(
                f"{LIBRARY}/torch/distributed/distributed_c10d.py:1509 in _new_process_group_helper",
                end="RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
            ),
        )
        + "\n"
        + prefixed(
            "(RayWorkerWrapper pid=24271) ERROR 07-25 07:05:40 worker_base.py:382] ",
            traced(
                "/home/me/worker.py:132 in init_device",
                end="ValueError: the address of the worker is wrong",
            ),
        ),
        "ValueError",
        "the address of the worker is wrong",
        "/home/me/worker.py:132 in init_device",
        "user_code_failed",
    ),
    Ending(
        "weights",
        "https://github.com/guxd/deep-code-search/issues/77",
        traced(
            "train.py:327 in test",
            f"{LIBRARY}/torch/nn/modules/module.py:1224 in load_state_dict",
            end="RuntimeError: Error(s) in loading state_dict for JointEmbeder:\n"
            "        size mismatch for embedding.weight: copying a param with shape torch.Size([18869, 256])",
        ),
        "RuntimeError",
        "size mismatch",
        "train.py:327 in test",
        "wrong_configuration",
    ),
    Ending(
        "rich",
        "https://github.com/FudanNLP/CPT/issues/85",
        "╭───────────── Traceback (most recent call last) ─────────────╮\n"
        "│ /home/me/finetune.py:88 in main                              │\n"
        "│   87 │   optimizer.zero_grad()                               │\n"
        "│ ❱ 88 │   loss = model(batch)                                 │\n"
        f"│ {LIBRARY}/torch/nn/functional.py:2267 in embedding │\n"
        "╰──────────────────────────────────────────────────────────────╯\n"
        "IndexError: index out of range in self\n",
        "IndexError",
        "index out of range in self",
        "/home/me/finetune.py:88 in main",
        "bad_data",
    ),
    Ending(
        "not installed with a fallback",
        "https://github.com/facebookresearch/xformers/issues/826",
        traced(
            f"{LIBRARY}/xformers/ops/fmha/triton.py:17 in <module>",
            end="ModuleNotFoundError: No module named 'flash_attn'",
        )
        + DURING
        + traced(
            "/home/me/train.py:4 in <module>",
            "<frozen importlib._bootstrap_external>:1073 in get_data",
            end="FileNotFoundError: [Errno 2] No such file or directory: '/opt/flash_attn_triton.py'",
        ),
        "ModuleNotFoundError",
        "flash_attn",
        "/home/me/train.py:4 in <module>",
        "missing_package",
    ),
    Ending(
        "undefined name",
        "https://github.com/bytedance/lynx/issues/9",
        traced(
            "/home/me/modules/full/transformer_wan.py:26 in WanAttnProcessor2_0",
            end="NameError: name 'Attention' is not defined. Did you mean: 'WanAttention'?",
        ),
        "NameError",
        "is not defined",
        "/home/me/modules/full/transformer_wan.py:26 in WanAttnProcessor2_0",
        "user_code_failed",
    ),
    Ending(
        "loader in a thread",
        "https://github.com/STVIR/pysot/issues/256",
        traced(
            "../../tools/train.py:176 in train",
            f"{LIBRARY}/torch/utils/data/dataloader.py:227 in handler",
            end="RuntimeError: DataLoader worker (pid 80064) exited unexpectedly with exit code 1. Details are lost due to "
            "multiprocessing. Rerunning with num_workers=0 may give better error trace.",
        ),
        "RuntimeError",
        "exited unexpectedly with exit code 1",
        "../../tools/train.py:176 in train",
        "user_code_failed",
    ),
)
