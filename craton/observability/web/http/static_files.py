"""Style sheets and scripts of the pages, served from memory under addresses that change with their content.

All are in one folder whose name is a digest of all of them: scripts import each other by relative addresses, and a
browser must not mix cached files of different versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from craton.observability.web.rendering import FOLDER

MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


async def static_file(request: Request) -> Response:
    found = _files().get(request.path_params["file"])
    if found is None:
        return JSONResponse({"error": "no such file"}, status_code=404)
    text, media_type = found
    is_asked_for = request.path_params["version"] == _version()
    kept = "public, max-age=31536000, immutable" if is_asked_for else "no-cache"  # other versions must not be cached
    return Response(text, media_type=media_type, headers={"cache-control": kept})


@cache
def _files() -> Mapping[str, tuple[str, str]]:
    """Return name → text and media type of all static files."""
    result = {"base.css": (files("craton.html_report").joinpath("page.css").read_text(encoding="utf-8"), "text/css")}
    for path in sorted((FOLDER / "static").iterdir()):
        if path.suffix in MEDIA_TYPES:
            result[path.name] = (path.read_text(encoding="utf-8"), MEDIA_TYPES[path.suffix])
    return result


def address_of_file(name: str) -> str:
    """Return the address of a file, which changes when any file does: browsers cache it for a year."""
    assert name in _files(), name
    return f"/static/{_version()}/{name}"


@cache
def _version() -> str:
    return digest("\0".join(f"{name}\0{text}" for name, (text, _) in sorted(_files().items())))


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
