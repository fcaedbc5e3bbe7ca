"""Names that Kubernetes accepts, and checks that refuse others.

A run may be called `Llama_8B.v2`; an object may not. A changed name gets a short hash, so that two runs never share an
object. Names of existing objects (queues, claims, …) are checked, not changed.
"""

from __future__ import annotations

import hashlib
import re

from craton.orchestration.errors import StartError

# The longest derived name is that of a member's pod, NAME-slot999-999-1023-xxxxx: a label has up to 63 characters.
MAX_LETTERS = 40
HASH_LETTERS = 8
MAX_LABEL = 63

_LABEL_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # DNS-1035, which services need: begins with a letter
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_PATH = re.compile(r"/[^\0:]*")  # a colon is not allowed in a mount path


def object_name(run: str) -> str:
    """Return the name of a run's objects."""
    if _LABEL_NAME.fullmatch(run) and len(run) <= MAX_LETTERS:
        return run
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".strip("-")
    return f"{plain[: MAX_LETTERS - HASH_LETTERS - 1].rstrip('-')}-{_hash(run)}"


def label_value(text: str) -> str:
    """Return a label value for any text: the text itself if possible, else what is possible of it and a hash."""
    if _LABEL_VALUE.fullmatch(text) and len(text) <= MAX_LABEL:
        return text
    plain = re.sub(r"[^A-Za-z0-9._-]+", ".", text).strip("-._")
    return f"{plain[: MAX_LABEL - HASH_LETTERS - 1].rstrip('-._')}-{_hash(text)}".strip("-")


def check_name(value: str, key: str, where: str = "") -> str:
    """Check the name of an existing object."""
    if not _SUBDOMAIN.fullmatch(value) or len(value) > 253:
        raise StartError(
            f"{where}{key} is {value!r}, not a valid Kubernetes name; use lower-case letters, digits, '-' and '.'"
        )
    return value


def check_label_value(value: str, key: str, where: str = "") -> str:
    """Check a name that becomes a label value, such as a queue."""
    if not value or not _LABEL_VALUE.fullmatch(value) or len(value) > MAX_LABEL:
        raise StartError(
            f"{where}{key} is {value!r}, not a valid label value: use up to 63 letters, digits, '.', '_' and '-'"
        )
    return value


def check_label_key(value: str, key: str) -> str:
    """Check a label key: `topology.k8s.aws/network-node-layer-3`, `kubernetes.io/hostname`, `rack`."""
    prefix, separator, name = value.rpartition("/")
    is_prefix = not separator or (_SUBDOMAIN.fullmatch(prefix) is not None and len(prefix) <= 253)
    if not is_prefix or not name or not _LABEL_VALUE.fullmatch(name) or len(name) > MAX_LABEL:
        raise StartError(
            f"the cluster file's {key} is {value!r}, not a valid label or taint key of a node; `kubectl get nodes "
            "--show-labels` lists the labels"
        )
    return value


def check_image(value: str, where: str = "") -> str:
    if not _IMAGE.fullmatch(value):
        raise StartError(f"{where}image is {value!r}, not a valid image name; write e.g. registry/team/train:1")
    return value


def check_path(value: str, key: str) -> str:
    """Check the mount path of a volume."""
    if not _PATH.fullmatch(value) or ".." in value.split("/"):
        raise StartError(f"the cluster file's {key} is {value!r}; a volume needs an absolute path without ':' and '..'")
    return value.rstrip("/") or "/"


def literal(value: str) -> str:
    """Escape a value for a container: Kubernetes expands `$(NAME)` and reads `$$` as a dollar sign."""
    return value.replace("$", "$$")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]
