"""Metrics, alerts, dashboards, diagnosis, healing and the web page; a run does not depend on any of them.

Each part is a package with its own public interface; importing this package loads none of them.
"""
