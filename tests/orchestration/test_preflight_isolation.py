"""The line of `craton doctor` about isolation."""

from __future__ import annotations

from craton.ml.verifiers import Isolation, IsolationReport
from craton.orchestration.preflight import diagnose
from craton.orchestration.preflight.software import check_isolation


def test_what_is_missing_and_what_to_do() -> None:
    reasons = {Isolation.BUBBLEWRAP: "not installed", Isolation.NAMESPACES: "unshare: Operation not permitted"}
    (finding,) = check_isolation(IsolationReport(None, reasons, 7))
    assert (finding.what, finding.severity) == ("isolation", "note")
    assert "bubblewrap: not installed; namespaces: unshare: Operation not permitted" in finding.evidence
    assert "apt-get install bubblewrap" in finding.remedy
    (finding,) = check_isolation(IsolationReport(Isolation.NAMESPACES, reasons, 7))
    assert finding.severity == "ok"
    assert "namespaces of its own (Landlock 7)" in finding.evidence


def test_doctor_tries_this_machine() -> None:
    (finding,) = (finding for finding in diagnose().findings if finding.what == "isolation")
    assert finding.severity in ("ok", "note")
