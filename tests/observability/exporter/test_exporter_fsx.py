"""FSx's metrics from CloudWatch: paging with botocore's own Stubber, the whole way with moto's server."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.stub import ANY, Stubber
from observability.exporter.exporting import collected
from s3 import S3Server
from waiting import PATIENCE_SECONDS

from craton.errors import CratonError
from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter import FAMILIES, fsx_bridge
from craton.observability.exporter.fsx import OLD_SECONDS, FsxCollector, fetch

IDENTITY = "fs-0123456789abcdef0"
NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def client() -> Any:
    return botocore.session.Session().create_client("cloudwatch")


def test_pages_are_followed_and_the_newest_value_counts() -> None:
    cloudwatch = client()
    names = [name for name, family in FAMILIES.items() if family.cloudwatch]
    read = f"m{names.index('aws_fsx_data_read_bytes_sum')}"
    free = f"m{names.index('aws_fsx_free_data_storage_capacity_minimum')}"
    asked = {"MetricDataQueries": ANY, "StartTime": ANY, "EndTime": NOW, "ScanBy": "TimestampDescending"}
    newest, before = NOW - timedelta(minutes=2), NOW - timedelta(minutes=3)
    with Stubber(cloudwatch) as stub:
        first = {"Id": read, "Timestamps": [newest, before], "Values": [6e9, 5e9], "StatusCode": "PartialData"}
        answer = {"MetricDataResults": [first], "NextToken": "more"}
        stub.add_response("get_metric_data", answer, asked)
        last = {"Id": free, "Timestamps": [before], "Values": [1e12], "StatusCode": "Complete"}
        empty = {"Id": "m1", "Timestamps": [], "Values": [], "StatusCode": "Complete"}
        older = {"Id": read, "Timestamps": [before], "Values": [4e9], "StatusCode": "Complete"}
        stub.add_response(
            "get_metric_data", {"MetricDataResults": [last, empty, older]}, {**asked, "NextToken": "more"}
        )
        found = fetch(cloudwatch, [IDENTITY], NOW)
        stub.assert_no_pending_responses()
    assert found == {
        ("aws_fsx_data_read_bytes_sum", IDENTITY): (newest.timestamp(), 6e9),
        ("aws_fsx_free_data_storage_capacity_minimum", IDENTITY): (before.timestamp(), 1e12),
    }


def test_what_cloudwatch_refuses_is_counted_and_said_and_serves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    cloudwatch = client()
    with Stubber(cloudwatch) as stub:
        stub.add_client_error("get_metric_data", "AccessDenied", "not allowed", 403)
        collector = FsxCollector([IDENTITY], lambda: cloudwatch)
        assert collector.fetched.wait(PATIENCE_SECONDS)
        collector.close()
    assert collector.errors == 1
    assert "fsx cannot be read: ClientError: " in (told := capfd.readouterr().err)
    assert "AccessDenied" in told
    assert list(collector.collect(time.time())) == []


def test_old_values_are_left_out() -> None:
    collector = FsxCollector([], client)
    assert collector.fetched.wait(PATIENCE_SECONDS)
    collector.close()
    collector._values = {("aws_fsx_data_read_bytes_sum", IDENTITY): (1000.0, 5.0)}
    assert len(list(collector.collect(1000.0 + OLD_SECONDS))) == 1
    assert list(collector.collect(1001.0 + OLD_SECONDS)) == []


def test_a_mounted_file_system_is_found_and_its_numbers_served(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    (tmp_path / "proc/1").mkdir(parents=True)
    source = f"{IDENTITY}.fsx.eu-west-1.amazonaws.com@tcp:/abcdefgh"
    (tmp_path / "proc/1/mounts").write_text(f"{source} /fsx lustre rw 0 0\n")
    there = botocore.session.Session().create_client("cloudwatch", region_name="eu-west-1")
    there.put_metric_data(
        Namespace="AWS/FSx",
        MetricData=[
            {
                "MetricName": "DataReadBytes",
                "Dimensions": [{"Name": "FileSystemId", "Value": IDENTITY}],
                "Timestamp": datetime.now(UTC) - timedelta(minutes=3),
                "Value": value,
                "Unit": "Bytes",
            }
            for value in (1e9, 3e9)
        ],
    )
    collector = fsx_bridge("auto", NodeRoot(tmp_path))
    assert collector is not None
    assert collector.fetched.wait(PATIENCE_SECONDS)
    collector.close()
    assert not collector.said
    found = collected(collector.collect(time.time()))
    assert found["aws_fsx_data_read_bytes_sum", IDENTITY] == 4e9
    assert found["aws_fsx_data_read_bytes_maximum", IDENTITY] == 3e9
    assert found["aws_fsx_data_read_bytes_average", IDENTITY] == 2e9


def test_without_credentials_auto_is_silent_and_a_wish_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    root = NodeRoot(tmp_path)
    assert fsx_bridge("off", root) is None
    assert fsx_bridge("auto", root) is None
    with pytest.raises(CratonError, match="no AWS credentials"):
        fsx_bridge(IDENTITY, root)
