"""Reports as single HTML files that load and send nothing: page layout, style sheet, plots; text is escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.html_report.page import (
        Markup,
        Tile,
        absent_section,
        chip,
        page_html,
        plot_section,
        section,
        table,
        tiles,
        warning_list,
        with_code,
    )
    from craton.html_report.plots import (
        Figure,
        axis_name,
        axis_title,
        label,
        log_axis,
        log_range,
        plain_layout,
        vertical_line,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
