"""Turn a job into a draft: everything that would be written and started, without side effects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.draft.check import check_needs
    from craton.orchestration.draft.choose_backend import BACKENDS, backend_name
    from craton.orchestration.draft.code_archive import (
        check_code,
        code_folder,
        code_summary,
        find_code,
        keep_code,
        manifest_path,
    )
    from craton.orchestration.draft.draft import (
        COPY,
        IMAGE_PYTHON,
        JOB_FOLDER,
        STOP_AT,
        Draft,
        chaos_of,
        draft_nodes,
        draft_run,
        fork_server_command,
        gres_gpus,
        plan_text,
        python_of,
        rank_command,
        tier_names,
    )
    from craton.orchestration.draft.plan_job import Progress
    from craton.orchestration.draft.resolve import named_job, stop_step, with_chaos
    from craton.orchestration.draft.sizes import Size, nearest_sizes, plan_size, with_chosen_layout, with_fitting_layout
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
