"""Configuration of the third set: ranks that differ, numbers as text, proxies, weight decay, equal rank numbers."""

from __future__ import annotations

from collections.abc import Mapping

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.node_network import WRAP
from craton.bench.why.faults.program_injections import SERVICE_PORT, start_service

PROGRAM = "third_configuration"
NODE_ACTIONS = (r"\bdrain\b", r"\breboot\b", r"replace the node")
SETTINGS = "model: {hidden: 64, layers: 2}\noptimizer: {lr: 3e-4, weight_decay: 0.1}\n"
PROXY = "http://127.0.0.1:3128"  # of another network; nothing listens here


def _script(fault: str, nodes: int, victim: int | None = None, network: bool = False) -> JobRecipe:
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={"command": ["{python}", f"{PROGRAM}.py"]},
        program=PROGRAM,
        fault=fault,
        victim=victim,
        files={"settings.yaml": SETTINGS},
        network=network,
        wrap=WRAP if network else (),
    )


def _objective(name: str, fault: str, keys: Mapping[str, object], env: Mapping[str, str] | None = None) -> JobRecipe:
    return JobRecipe(
        keys={"objective": f"{PROGRAM}:{name}", "layout": {"fsdp": 2, "micro_batch": 4}, **keys},
        program=PROGRAM,
        fault=fault,
        env=env or {},
        prepare=start_service if fault == "proxy" else None,
    )


FAULTS = (
    LiveFault(
        name="ranks-configured-differently",
        family="configuration",
        summary="Rank 2 has an old copy of the settings with one layer more; DDP finds other parameters there, raises.",
        source="https://github.com/huggingface/accelerate/issues/1481",
        job=_script("layers", nodes=3, victim=2),
        expected=ExpectedVerdict(
            layers=("framework", "collective"),
            conditions=("dead",),
            remedy=(r"same model|inconsistent|params|shape|DDP|mismatch|differ",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="learning-rate-read-as-text",
        family="configuration",
        summary="YAML reads `lr: 3e-4` as text, because it has no point; the optimizer of every rank raises TypeError.",
        source="https://github.com/hiyouga/LlamaFactory/issues/4149",
        job=_script("text", nodes=2),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            remedy=(r"TypeError|not supported between|'str'|learning rate|\blr\b",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="proxy-variable-set",
        family="configuration",
        summary="The job sets http_proxy for downloads; requests to the reward server go to the proxy too, and fail.",
        source="https://github.com/THUDM/slime/pull/1714",
        job=_objective("rewarded_loss", "proxy", {}, {**SERVICE_PORT, "http_proxy": PROXY}),
        expected=ExpectedVerdict(
            layers=("framework", "fabric"),
            conditions=("dead",),
            remedy=(r"proxy|refused|URLError|Errno 111|reward",),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="weight-decay-too-high",
        family="configuration",
        summary="The weight decay is 300 instead of 0.3: weights shrink to a tenth in every step, nothing is learnt.",
        source="https://github.com/fastai/fastai/issues/1806",
        job=_objective("loss", "decay", {"train": {"weight_decay": 300, "warmup_steps": 5}}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"weight[ _]decay|regulari[sz]ation|learning[ _]rate|hyper-?parameter",
                r"loss (does not|has not|is not|did not|stays|is flat|no longer)",
                r"learns? nothing|not learn",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=40,
    ),
    LiveFault(
        name="two-ranks-with-one-number",
        family="configuration",
        summary="Both machines start a script with node rank 0, from the same copied line; each waits for rank 1.",
        source="https://github.com/pytorch/pytorch/issues/52848",
        job=_script("number", nodes=2, network=True),
        expected=ExpectedVerdict(
            layers=("framework", "collective"),
            conditions=("starting", "hung"),
            remedy=(
                r"node[ _-]?rank|\brank numbers?\b|same rank|world[ _]size",
                r"rendezvous|init_process_group|wait.*(rank|peer)|stack|py-spy",
            ),
            misleading=NODE_ACTIONS,
        ),
        judge_seconds=60,
        needs=("root", "ip", "nsenter"),
    ),
)
