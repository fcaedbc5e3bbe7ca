"""Confined processes: no network, no secrets, no files but libraries, limits on everything; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.verifiers.sandbox.confined import ConfinedProcess, launch
    from craton.ml.verifiers.sandbox.confinement import NUM_USERS, Confinement, Isolation, sandbox_user
    from craton.ml.verifiers.sandbox.guard import (
        adopt_orphans,
        follow_parent,
        limit_further_memory,
        run_in_own_processes,
    )
    from craton.ml.verifiers.sandbox.isolation import (
        INSTALL_ISOLATION,
        IsolationReport,
        find_isolation,
        isolation_of,
        probe_isolation,
        require_isolation,
        try_isolation,
    )
    from craton.ml.verifiers.sandbox.kernel import die_with_parent
    from craton.ml.verifiers.sandbox.limits import OUTPUT_BYTES, SandboxLimits
    from craton.ml.verifiers.sandbox.namespaces import NOT_STARTED
    from craton.ml.verifiers.sandbox.processes import children, kill
    from craton.ml.verifiers.sandbox.readable import own_package, package_folders
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
