"""What a rank records: shared memory page, recorder, ledger, stacks, steady clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.telemetry.rank.ledger import LedgerClock, LedgerReader, spread
    from craton.telemetry.rank.recorder import Recorder
    from craton.telemetry.rank.samples import SampleRecorder, read_samples
    from craton.telemetry.rank.shared_memory import (
        BESIDE,
        FORGET_SHARE,
        LEDGER_KINDS,
        PRODUCTIVE_KINDS,
        RankPage,
        going_on,
        monotonic_of,
        own_page,
    )
    from craton.telemetry.rank.stacks import (
        MAX_STACK_BYTES,
        STACK_SIGNAL,
        TOOL,
        Stacks,
        answer_stack_requests,
        dump_stacks,
        is_answering,
        make_stack_file,
        read_stacks,
    )
    from craton.telemetry.rank.steady_clock import JUMP_SECONDS, STEADY, monotonic_clock_id, wall_offset
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
