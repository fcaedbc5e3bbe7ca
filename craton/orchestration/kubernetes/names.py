"""Names as Kubernetes wants them, and a refusal of those that it would not take.

A run may be called `Llama_8B.v2`; an object may not. What has to be changed gets a few letters of a hash, so that two
runs never share an object. Names of things that exist already (queues, claims, …) are not changed but checked.
"""

from __future__ import annotations

import hashlib
import re

from craton.orchestration.errors import StartError

# The longest name made of it is that of a pod of a JobSet, NAME-node-0-1023-xxxxx, and must fit a label's 63 letters.
MAX_LETTERS = 40
HASH_LETTERS = 8

_LABEL_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # DNS-1035, which services need: begins with a letter
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_PATH = re.compile(r"/[^\0:]*")  # a colon is not allowed in a mount path


def object_name(run: str) -> str:
    """What the objects of a run are called."""
    if _LABEL_NAME.fullmatch(run) and len(run) <= MAX_LETTERS:
        return run
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".strip("-")
    return f"{plain[: MAX_LETTERS - HASH_LETTERS - 1].rstrip('-')}-{_hash(run)}"


def check_name(value: str, key: str, where: str = "") -> str:
    """The name of an object that exists already."""
    if not _SUBDOMAIN.fullmatch(value) or len(value) > 253:
        raise StartError(
            f"{where}{key} is {value!r}, as no object of Kubernetes is called; use small letters, digits, '-' and '.'"
        )
    return value


def check_label_value(value: str, key: str, where: str = "") -> str:
    """A name that is written into a label, as queues are."""
    if not value or not _LABEL_VALUE.fullmatch(value) or len(value) > 63:
        raise StartError(
            f"{where}{key} is {value!r}: a label takes up to 63 letters, digits, '.', '_' and '-', and this becomes one"
        )
    return value


def check_label_key(value: str, key: str) -> str:
    """`topology.k8s.aws/network-node-layer-3`, `kubernetes.io/hostname`, `rack`."""
    prefix, separator, name = value.rpartition("/")
    is_prefix = not separator or (_SUBDOMAIN.fullmatch(prefix) is not None and len(prefix) <= 253)
    if not is_prefix or not name or not _LABEL_VALUE.fullmatch(name) or len(name) > 63:
        raise StartError(
            f"the cluster file's {key} is {value!r}, which cannot be a label or a taint of a node; `kubectl get nodes "
            "--show-labels` shows what there is"
        )
    return value


def check_image(value: str, where: str = "") -> str:
    if not _IMAGE.fullmatch(value):
        raise StartError(
            f"{where}image is {value!r}, which is no image that Kubernetes can pull; write e.g. registry/team/train:1"
        )
    return value


def check_path(value: str, key: str) -> str:
    """Where a volume is mounted."""
    if not _PATH.fullmatch(value) or ".." in value.split("/"):
        raise StartError(f"the cluster file's {key} is {value!r}; a volume needs an absolute path without ':' and '..'")
    return value.rstrip("/") or "/"


def literal(value: str) -> str:
    """The text as a container sees it: in what Kubernetes passes on, `$(NAME)` is replaced, and `$$` is a dollar."""
    return value.replace("$", "$$")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]
