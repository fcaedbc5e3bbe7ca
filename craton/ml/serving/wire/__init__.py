"""Messages between front end and engine as bytes: JSON and raw columns, checked on arrival, no pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.wire.message_bytes import (
        Message,
        MessageLine,
        decode,
        encode,
        pack_sampling,
        unpack_sampling,
    )
    from craton.ml.serving.wire.packing import (
        MAX_MESSAGE_BYTES,
        Check,
        WireError,
        expect,
        integers,
        is_anything,
        is_flag,
        is_integer,
        is_real,
        is_text,
        list_of,
        optional,
        pack,
        reals,
        receive_bytes,
        unpack,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
