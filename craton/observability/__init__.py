"""What a run and its nodes show, what it means, and what to do; no run needs it to run.

Exporters, rules, dashboards, diagnosis, healing, the page: each part is a package of its own with its own face; nothing
is loaded from here.
"""
