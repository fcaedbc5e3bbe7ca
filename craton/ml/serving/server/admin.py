"""Admin endpoints: each sends one control to the engine and returns its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from craton.ml.serving.server.errors import ApiError, BadRequestError, ClientGoneError, ConflictError
from craton.ml.serving.server.http_service import HttpService
from craton.ml.serving.server.protocol import LoadAdapterRequest, UnloadAdapterRequest, UpdateWeightsRequest


def admin_routes(service: HttpService) -> APIRouter:
    routes = APIRouter(tags=["admin"])
    link = service.link

    async def control(
        name: str, arguments: Mapping[str, Any] | None = None, error: type[ApiError] = ConflictError
    ) -> Any:
        answer = await link.control(name, arguments)
        if answer.error:
            raise error(answer.error, code=f"{name}_refused")
        return answer.result

    @routes.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort") -> dict[str, Any]:
        """Stop running steps. Running requests are aborted, finish first (wait), or continue after /resume (keep)."""
        result = await control("pause", {"mode": mode})
        link.note_state("paused")
        return {"status": "paused", "result": result}

    @routes.post("/resume")
    async def resume() -> dict[str, Any]:
        result = await control("resume")
        link.note_state("running")
        return {"status": "running", "result": result}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": link.stats.state == "paused"}

    @routes.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=1, le=2)] = 1) -> dict[str, Any]:
        """Free the device memory. Level 1 keeps the weights in host memory, level 2 discards them."""
        result = await control("sleep", {"level": level})
        link.note_state("asleep")
        return {"status": "asleep", "result": result}

    @routes.post("/wake_up")
    async def wake_up(tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None) -> dict[str, Any]:
        """Allocate the device memory again: all of it, or the tags. `missing` names what is still needed to serve."""
        result = await control("wake", {"tags": tags} if tags else None)
        missing = result["missing"]
        link.note_state(result["state"], missing.get("weights", "") if result["state"] != "asleep" else None)
        return {"status": service.readiness().status, "missing": missing, "result": result}

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": link.stats.state == "asleep"}

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        return {"result": await control("reset_prefix_cache")}

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: LoadAdapterRequest) -> dict[str, Any]:
        name = request.lora_name
        loaded = link.working().adapters
        if name == service.name or name in loaded:
            raise BadRequestError(f"a model {name!r} already exists; use another name", "lora_name")
        result = await control("load_adapter", {"name": name, "folder": request.lora_path}, BadRequestError)
        link.note_adapters([*link.working().adapters, name])
        return {"result": result}

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: UnloadAdapterRequest) -> dict[str, Any]:
        name = request.lora_name
        if name not in link.working().adapters:
            loaded = ", ".join(link.working().adapters) or "none"
            raise BadRequestError(f"adapter {name!r} is not loaded; loaded: {loaded}", "lora_name")
        result = await control("unload_adapter", {"name": name}, BadRequestError)
        link.note_adapters(adapter for adapter in link.working().adapters if adapter != name)
        return {"result": result}

    @routes.post("/update_weights")
    async def update_weights(request: UpdateWeightsRequest, connection: Request) -> dict[str, Any]:
        """Update the weights. A client that asks for weights and is gone before it sends them holds up no other."""
        arguments: dict[str, Any] = {"recompute": request.recompute}
        if request.folder is not None:
            arguments |= {"folder": request.folder, "version": request.version}
        else:
            arguments |= {"address": request.address, "wait_seconds": request.wait_seconds}
        result = await _while_connected(connection, control("update_weights", arguments, BadRequestError))
        link.note_state(link.stats.state, "")
        return {"result": result}

    @routes.get("/weights_version")
    async def weights_version() -> dict[str, Any]:
        return {"weights_version": await control("weights_version")}

    return routes


async def _while_connected(connection: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of some work; cancel it if the client disconnects."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(connection))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _until_gone(connection: Request) -> None:
    while (await connection.receive())["type"] != "http.disconnect":
        pass
