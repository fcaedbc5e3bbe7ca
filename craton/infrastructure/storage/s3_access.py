"""Credentials for S3, and error messages for its failures."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craton.extras import install_package_command
from craton.infrastructure.errors import ObjectMissingError, StorageError

_OTHERS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_GIVE_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or give the machine a role that may use the bucket"
)


def credentials(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return keys and region of a profile, which obstore does not find by itself. Empty if the environment has keys."""
    if environment.get("AWS_ACCESS_KEY_ID") or any(environment.get(name) for name in _OTHERS):
        return {}
    profile = environment.get("AWS_PROFILE") or "default"
    home = Path(environment.get("HOME") or Path.home())
    config = _section(environment.get("AWS_CONFIG_FILE") or home / ".aws" / "config", profile, f"profile {profile}")
    keys = _section(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials", profile)
    settings = {**config, **keys}
    region = {} if environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") else {"region": "region"}
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        **region,
    }
    if "aws_access_key_id" in settings:
        return {ours: settings[theirs] for theirs, ours in names.items() if theirs in settings}
    if settings.keys() & {"sso_session", "sso_start_url", "role_arn", "credential_process", "login_session"}:
        return {"credential_provider": _boto3_provider(profile)}
    if environment.get("AWS_PROFILE"):
        raise StorageError(f"AWS_PROFILE is {profile}, which has no credentials in ~/.aws; {_GIVE_CREDENTIALS}")
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise StorageError(f"no credentials for S3: {_GIVE_CREDENTIALS}")
    return {}


def storage_error(where: str, bucket: str, error: Exception) -> StorageError:
    """Return an error of one line: the location, what happened, what to do."""
    text = str(error).partition("\n\nDebug source")[0]
    retries = re.search(r"after (\d+) retries", text)
    tried = f" ({int(retries[1]) + 1} attempts)" if retries else ""
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>([^<]+)</Code>", text)
    answer = f"S3 returned {status[1] if status else ''} {code[1] if code else ''}".rstrip()
    if "NoSuchBucket" in text:
        return StorageError(f"{where}: there is no bucket {bucket}; create it, or correct the name or AWS_ENDPOINT_URL")
    if isinstance(error, FileNotFoundError):
        return ObjectMissingError(f"{where} does not exist")
    if "169.254.1" in text or "CredentialProvider" in text or "security-credentials" in text:
        return StorageError(f"{where}: no credentials for S3: {_GIVE_CREDENTIALS}")
    if code and code[1] == "RequestTimeTooSkewed":
        return StorageError(f"{where}: {answer}; this machine's clock is wrong: synchronise it (NTP, chrony)")
    if status and status[1] in ("401", "403"):
        return StorageError(
            f"{where}: {answer}; these credentials lack permission: allow it in the bucket's policy, or "
            f"{_GIVE_CREDENTIALS}"
        )
    if status and status[1] == "412":
        return StorageError(f"{where}: it changed during the read; read it again")
    if (status and status[1] in ("301", "307", "400") and "egion" in text) or "redirect" in text:
        return StorageError(f"{where}: the bucket is in another region; set AWS_REGION to it")
    if status and status[1][0] == "5":
        return StorageError(
            f"{where}: {answer}{tried}; the service is down or overloaded: try later, or raise AWS_MAX_ATTEMPTS"
        )
    if "kind: Timeout" in str(error) or "timed out" in text:
        return StorageError(
            f"{where}: timed out{tried}; check the network to AWS_ENDPOINT_URL, or raise AWS_TIMEOUT (such as 300s)"
        )
    if was_cut_off(error) or "HTTP error" in text:
        reason = "S3 cannot be reached" if "Connect" in str(error) else "the connection was dropped"
        return StorageError(f"{where}: {reason}{tried}; check AWS_ENDPOINT_URL and the network to it")
    return StorageError(f"{where}: {text.splitlines()[0]}")


def was_cut_off(error: Exception) -> bool:
    """Return whether the response was truncated, which the client does not retry by itself."""
    text = str(error)
    return "response body" in text or ("Got invalid" in text and "response" in text)


def _section(path: str | Path, *names: str) -> dict[str, str]:
    """Return one section of an ini file: the first of these names that exists."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeError) as error:
        raise StorageError(f"{path} cannot be read as a file of AWS profiles: {error}") from error
    return next((dict(parser[name]) for name in names if name in parser), {})


def _boto3_provider(profile: str) -> Any:
    try:
        from boto3.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise StorageError(
            f"the AWS profile {profile} uses SSO or assumes a role, which needs boto3; run: "
            f"{install_package_command('boto3')}, or "
            f'eval "$(aws configure export-credentials --profile {profile} --format env)"'
        ) from error
    return Boto3CredentialProvider(Session(profile_name=profile))
