"""The pool of verifiers: samples in, verdicts out. No sample can stop it, harm the machine or take more than its limit.

The pool itself is a thread that waits for a supervisor process (`supervisor.py`), which starts, limits and replaces the
workers. A supervisor that is killed is started again, and its samples are verified once more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from craton.extras import require_extra
from craton.ml.verifiers.answers import UnreadableReferenceError
from craton.ml.verifiers.environment import Turn
from craton.ml.verifiers.errors import VerifierError
from craton.ml.verifiers.members import python_command
from craton.ml.verifiers.programs import program_request, program_value
from craton.ml.verifiers.sandbox import Isolation, require_isolation
from craton.ml.verifiers.terms import TermCall, calls_of, groups_of, reward_of
from craton.ml.verifiers.verdict import Verdict, VerifierSample
from craton.ml.verifiers.wire import Inbox, framed

if TYPE_CHECKING:
    from craton.job.sections.posttraining import RewardTerm, VerifySection
