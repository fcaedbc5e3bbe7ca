"""FSx for Lustre metrics from CloudWatch, fetched once a minute in the background: its servers have no other access.

One exporter per file system is enough, and CloudWatch charges for every metric requested, so the bridge is off by
default. A value is that of the newest complete minute. Values older than OLD_SECONDS are omitted: a frozen gauge would
look like an idle file system.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from craton.errors import CratonError
from craton.extras import require_extra
from craton.infrastructure.probes import NodeRoot, read_mounts
from craton.observability.exporter.collector import Collector, reason
from craton.observability.exporter.exposition import Sample
from craton.observability.exporter.families import FAMILIES

PERIOD_SECONDS = 60
ASK_SECONDS = 60.0
LOOK_BACK = timedelta(minutes=10)  # CloudWatch is sometimes minutes late
OLD_SECONDS = 600.0
MAX_QUERIES = 500  # per GetMetricData call
_IDENTITY = re.compile(r"fs-[0-9a-f]{8,40}")
_REGION = re.compile(r"\.fsx\.([a-z0-9-]+)\.amazonaws\.com")
_ASKED = {name: family.cloudwatch.split(".") for name, family in FAMILIES.items() if family.cloudwatch}


class FsxCollector(Collector):
    """Export the values that the background thread fetched; never wait for AWS."""

    name = "fsx"

    def __init__(self, identities: Sequence[str], make_client: Callable[[], Any], ask_seconds: float = ASK_SECONDS):
        self._identities, self._make_client, self._ask_seconds = tuple(identities), make_client, ask_seconds
        self._values: dict[tuple[str, str], tuple[float, float]] = {}  # (family, file system) → (moment, value)
        self._ended = threading.Event()
        self.fetched = threading.Event()
        self._thread = threading.Thread(target=self._fetch_forever, name="fsx", daemon=True)
        self._thread.start()

    def collect(self, now: float) -> Iterator[Sample]:
        for (name, identity), (moment, value) in list(self._values.items()):
            if now - moment <= OLD_SECONDS:
                yield name, (identity,), value

    def close(self) -> None:
        self._ended.set()

    def _fetch_forever(self) -> None:
        client = None
        while True:
            try:
                client = client or self._make_client()
                self._values |= fetch(client, self._identities, datetime.now(UTC))
            except Exception as error:  # noqa: BLE001 - botocore has separate exception classes per service
                self.errors += 1
                self.say(reason(error))
            self.fetched.set()
            if self._ended.wait(self._ask_seconds):
                return


def fetch(client: Any, identities: Sequence[str], now: datetime) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the newest value of every metric of these file systems, from all pages of GetMetricData."""
    asked = {
        f"m{number}": pair for number, pair in enumerate((name, identity) for identity in identities for name in _ASKED)
    }
    queries = [_query(key, *pair) for key, pair in asked.items()]
    readings: dict[tuple[str, str], tuple[float, float]] = {}
    for start in range(0, len(queries), MAX_QUERIES):
        request: dict[str, Any] = {
            "MetricDataQueries": queries[start : start + MAX_QUERIES],
            "StartTime": now - LOOK_BACK,
            "EndTime": now,
            "ScanBy": "TimestampDescending",
        }
        while True:
            answer = client.get_metric_data(**request)
            for result in answer["MetricDataResults"]:
                if result["Values"] and asked[result["Id"]] not in readings:
                    readings[asked[result["Id"]]] = (result["Timestamps"][0].timestamp(), float(result["Values"][0]))
            if not answer.get("NextToken"):
                break
            request["NextToken"] = answer["NextToken"]
    return readings


def fsx_bridge(asked: str, root: NodeRoot) -> FsxCollector | None:
    """Return the collector for `auto` (FSx file systems mounted by name, if there are credentials) or comma-separated
    IDs; None for `off`. CratonError when the request cannot be met."""
    if asked == "off":
        return None
    mounted = [mount.source for mount in read_mounts(root) if mount.kind == "lustre"]
    if asked == "auto":
        identities = sorted({match[0] for source in mounted if (match := _IDENTITY.match(source))})
    else:
        identities = asked.split(",")
    bad = [identity for identity in identities if not _IDENTITY.fullmatch(identity)]
    if bad:
        raise CratonError(
            f"--fsx {bad[0]!r} is not an FSx file system ID: give off, auto, or IDs such as fs-0123456789abcdef0"
        )
    session = _session(required=asked != "auto")
    if not identities or session is None:
        return None
    region = next((match[1] for source in mounted if (match := _REGION.search(source))), None)
    return FsxCollector(identities, lambda: session.create_client("cloudwatch", region_name=region))


def _session(required: bool) -> Any:
    """Return botocore's session; None when botocore or credentials are missing."""
    try:
        from botocore.session import Session
    except ImportError:
        if required:
            require_extra("observe", "--fsx", ("botocore",))
        return None
    session = Session()
    if session.get_credentials() is None:
        if required:
            raise CratonError("--fsx found no AWS credentials: give the node a role with cloudwatch:GetMetricData")
        return None
    return session


def _query(key: str, family: str, identity: str) -> dict[str, Any]:
    metric, statistic = _ASKED[family]
    return {
        "Id": key,
        "MetricStat": {
            "Metric": {
                "Namespace": "AWS/FSx",
                "MetricName": metric,
                "Dimensions": [{"Name": "FileSystemId", "Value": identity}],
            },
            "Period": PERIOD_SECONDS,
            "Stat": statistic,
        },
        "ReturnData": True,
    }
