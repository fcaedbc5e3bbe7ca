"""A plan for people: findings, explanations, terminal, HTML, JSON and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.report.explain import PARTS, bottleneck, sensitivities, why_lost
    from craton.planning.report.findings import sharing_text
    from craton.planning.report.html import plan_html
    from craton.planning.report.json_document import load_to_json, plan_to_json, serving_to_json, strategies_to_json
    from craton.planning.report.load_findings import load_verdict
    from craton.planning.report.load_page import load_html
    from craton.planning.report.load_terminal import render_load
    from craton.planning.report.serving_terminal import render_serving
    from craton.planning.report.strategy_page import strategies_html
    from craton.planning.report.strategy_tables import render_strategies
    from craton.planning.report.terminal import render_front, render_plan
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
