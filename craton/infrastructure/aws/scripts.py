"""Shell scripts of the nodes: set-up, Slurm's prolog and epilog, the health check. All of them run `craton doctor`.

Every value from the cluster file is quoted for the shell. A check that cannot run (not installed, too slow, crashed) is
logged and lets the job start; only a failure of the node itself blocks the job, and only if `health.policy` says so.
Software failures belong to the checked installation, not to the node: they are logged, and a run finds them in its own
environment before its first step.
"""

from __future__ import annotations

from shlex import quote

from craton.infrastructure.aws.site import AwsSite

HOOKS = "/opt/craton/hooks"
CHECK_SECONDS = 60
HEALTH_INTERVAL_SECONDS = 300
EXPORTERS = {"node": 9100, "efa": 9109, "dcgm": 9400}  # ports as AWS's and NVIDIA's exporters have them
SLURM_PAGES = ("jobs", "nodes", "partitions", "scheduler")  # of slurmctld's metrics, from Slurm 25.11 on
JOB_MAPPING = "/run/slurm/dcgm_job_mapping"  # where dcgm-exporter looks for the job of a GPU

NO_HOLD = "nohold_on_prolog_fail"  # for SchedulerParameters: a job whose node fails its prolog starts on another node

# Exits with 0 only if the file is a report of doctor with a failure of the node; prints the other failures.
_HAS_FAILURE = (
    "import json, sys; "
    'found = json.load(open(sys.argv[1], encoding="utf-8"))["findings"]; '
    'failed = [one for one in found if one["severity"] == "fail"]; '
    'print(*(one["what"] + ": " + one["evidence"] for one in failed if one["layer"] != "infrastructure"), sep="; "); '
    'sys.exit(all(one["layer"] != "infrastructure" for one in failed))'
)
_CHECK = f"""\
craton=${{CRATON:-/opt/craton/bin/craton}}
state=${{CRATON_STATE:-/run/craton}}
mapping=${{DCGM_JOB_MAPPING:-{JOB_MAPPING}}}
mkdir -p "$state"

# 0: the node is fine, or could not be checked; 1: a check of the node failed. A doctor that crashes also exits with 1,
# so only failures in its report count, and software failures do not.
check() {{
  timeout {CHECK_SECONDS} "$craton" doctor --json > "$state/doctor.json" 2> "$state/doctor.err"
  local code=$? software judged=2
  if [ $code -eq 1 ]; then
    software=$("${{craton%/*}}/python" -c '{_HAS_FAILURE}' "$state/doctor.json" 2>> "$state/doctor.err")
    judged=$?
  fi
  [ $judged -eq 0 ] && return 1
  if [ $code -eq 1 ] && [ -n "${{software:-}}" ]; then
    logger -t craton "software failure, not of this node: $software" || true
  elif [ $code -ne 0 ]; then
    logger -t craton "craton doctor cannot check this node (exit code $code): $state/doctor.err" || true
  fi
  return 0
}}
"""


def slurm_hooks(site: AwsSite) -> dict[str, str]:
    """Return name → text of the scripts that Slurm runs on a node."""
    return {
        "hooks/prolog.sh": _prolog(site),
        "hooks/epilog.sh": _epilog(),
        "hooks/health.sh": _health(site),
    }


def setup_script(site: AwsSite, *, timer: bool = False, raid: bool = False) -> str:
    """Return the script that a node runs once, as root. `timer`: systemd runs the health check, where Slurm's settings
    cannot be changed; `raid`: join and mount the local drives, where the image does not."""
    metrics = f"{site.lustre.path}/prometheus"
    targets = ", ".join(f'"$(hostname -s):{port}"' for port in EXPORTERS.values()).replace('"', '\\"')
    lines = [
        "#!/bin/bash",
        f"# Set-up of a node of {site.name}: Craton, its hooks for Slurm, and where Prometheus finds the node.",
        "set -euo pipefail",
        "",
        "python3 -m venv /opt/craton 2>/dev/null || { apt-get update -qq; apt-get install -y -qq python3-venv; "
        "python3 -m venv /opt/craton; }",
        *_install(site),
        f"mkdir -p {HOOKS}",
        f"aws s3 cp --recursive --region {quote(site.region)} {quote(site.scripts + '/hooks')} {HOOKS}",
        f"chmod 755 {HOOKS}/*.sh",
    ]
    nvme = site.file.storage.nvme
    if raid and nvme and nvme.path:
        lines += ["", *_raid(nvme.path)]
    if timer:
        lines += ["", *_timer()]
    lines += [
        "",
        f"mkdir -p {quote(metrics)}",
        f'echo "[{{\\"targets\\": [{targets}], \\"labels\\": {{\\"node\\": \\"$(hostname -s)\\"}}}}]" '
        f'> {quote(metrics)}/"$(hostname -s).json"',
    ]
    return "\n".join(lines) + "\n"


def _install(site: AwsSite) -> list[str]:
    """Install Craton from what the cluster file names, else from the wheel beside the scripts. The name alone would ask
    a package index, where it may be somebody else's."""
    if site.aws.package:
        return [f"/opt/craton/bin/pip install --quiet {quote(site.aws.package)}"]
    wheels = "/opt/craton/wheels"
    return [
        f"aws s3 cp --recursive --region {quote(site.region)} --exclude '*' --include 'craton-*.whl' "
        f"{quote(site.scripts)} {wheels}",
        f"/opt/craton/bin/pip install --quiet {wheels}/craton-*.whl",
    ]


def slurm_conf_lines() -> list[str]:
    """Return lines for slurm.conf, on clusters where it can be changed."""
    return [
        f"Prolog={HOOKS}/prolog.sh",
        f"Epilog={HOOKS}/epilog.sh",
        *health_settings(),
    ]


def health_settings() -> list[str]:
    return [
        f"HealthCheckProgram={HOOKS}/health.sh",
        f"HealthCheckInterval={HEALTH_INTERVAL_SECONDS}",
        "HealthCheckNodeState=IDLE",
    ]


def _prolog(site: AwsSite) -> str:
    keeps = site.file.health.policy != "observe"
    verdict = (
        'echo "craton doctor found this node unfit: $state/doctor.json"; exit 1'
        if keeps
        else 'logger -t craton "craton doctor found this node unfit (policy observe): $state/doctor.json" || true'
    )
    return f"""\
#!/bin/bash
# Before a job: check the node{"; if a check fails, the job does not start here and Slurm drains it" if keeps else ""}.
set -u
{_CHECK}
check || {{ {verdict}; }}

# dcgm-exporter labels a GPU's metrics with the job ids in the file of that GPU
mkdir -p "$mapping"
IFS=, read -ra gpus <<< "${{SLURM_JOB_GPUS:-}}"
for gpu in "${{gpus[@]}}"; do
  echo "$SLURM_JOB_ID" >> "$mapping/$gpu"
done
exit 0
"""


def _epilog() -> str:
    return f"""\
#!/bin/bash
# After a job: remove its id from the files of its GPUs; ids of other jobs on the node stay.
set -u
{_CHECK}
IFS=, read -ra gpus <<< "${{SLURM_JOB_GPUS:-}}"
for gpu in "${{gpus[@]}}"; do
  if [ -f "$mapping/$gpu" ]; then
    sed -i "/^${{SLURM_JOB_ID}}\\$/d" "$mapping/$gpu"
    [ -s "$mapping/$gpu" ] || rm -f "$mapping/$gpu"
  fi
done
check || logger -t craton "craton doctor found this node unfit after job $SLURM_JOB_ID: $state/doctor.json" || true
exit 0
"""


def _health(site: AwsSite) -> str:
    policy = site.file.health.policy
    reason = '"craton doctor: $state/doctor.json"'
    if policy == "observe":
        act = "logger -t craton 'craton doctor found this node unfit (health.policy is observe)' || true"
    else:
        # HyperPod replaces a node with exactly this reason; other clusters replace drained nodes themselves
        if policy == "replace":
            act = f"if [ -e /opt/sagemaker_cluster ]; then reason=Action:Replace; else reason={reason}; fi\n  "
        else:
            act = f"reason={reason}\n  "
        act += 'state_of=drain; [ "$reason" = Action:Replace ] && state_of=fail\n  '
        act += 'scontrol update "nodename=${SLURMD_NODENAME:-$(hostname -s)}" "state=$state_of" "reason=$reason"'
    return f"""\
#!/bin/bash
# Every {HEALTH_INTERVAL_SECONDS // 60} minutes: set the node's state from `craton doctor` (policy {policy}).
set -u
{_CHECK}
if ! check; then
  {act}
fi
exit 0
"""


def _raid(path: str) -> list[str]:
    mount = quote(path)
    return [
        f"if ! mountpoint -q {mount}; then",
        "  mapfile -t drives < <(lsblk -dpno NAME,MODEL | awk '/Instance Storage/ {print $1}')",
        "  if [ ${#drives[@]} -gt 0 ]; then",
        '    mdadm --create /dev/md0 --run --level=0 --raid-devices="${#drives[@]}" --force "${drives[@]}"',
        "    mkfs.xfs -q -f /dev/md0",
        f"    mkdir -p {mount} && mount -o noatime /dev/md0 {mount} && chmod 1777 {mount}",
        "  fi",
        "fi",
    ]


def _timer() -> list[str]:
    return [
        "cat > /etc/systemd/system/craton-health.service <<'UNIT'",
        "[Service]",
        "Type=oneshot",
        f"ExecStart={HOOKS}/health.sh",
        "UNIT",
        "cat > /etc/systemd/system/craton-health.timer <<'UNIT'",
        "[Timer]",
        f"OnBootSec={HEALTH_INTERVAL_SECONDS}",
        f"OnUnitActiveSec={HEALTH_INTERVAL_SECONDS}",
        "[Install]",
        "WantedBy=timers.target",
        "UNIT",
        "systemctl daemon-reload",
        "systemctl enable --now craton-health.timer",
    ]
