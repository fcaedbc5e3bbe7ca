"""YAML with line numbers, read into frozen models; units and names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.document.document import Document, Location, parse_document, read_document, reads_as_text
    from craton.job.document.names import Name, Variable, check_name, is_credential, is_name
    from craton.job.document.section import (
        KeyConflictError,
        Section,
        SectionError,
        allowed_keys,
        dotted,
        parse_section,
        section_problems,
    )
    from craton.job.document.units import (
        Bytes,
        BytesPerSecond,
        Count,
        Flops,
        Seconds,
        Size,
        TokenCount,
        Whole,
        parse_bytes,
        parse_count,
        parse_seconds,
        parse_share,
        parse_token_count,
        shown_value,
        whole_number,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
