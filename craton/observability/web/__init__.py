"""Views of runs: the web page (`craton ui`), whose changes need a token, and the terminal (`craton top`).

Both read run directories, and Prometheus if there is one; neither needs a database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.web.terminal import TopView, frame, frame_json, show_top
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
