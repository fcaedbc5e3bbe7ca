"""The HTTP application: its endpoints, and every error in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from craton.ml.serving.server.access import AccessCheck
from craton.ml.serving.server.admin import admin_routes
from craton.ml.serving.server.chat import chat
from craton.ml.serving.server.completions import complete
from craton.ml.serving.server.errors import ApiError, BadRequestError, ClientGoneError
from craton.ml.serving.server.forks import abort_answers, fork_answer
from craton.ml.serving.server.gate import Gate
from craton.ml.serving.server.http_service import TOO_LONG, HttpService
from craton.ml.serving.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ForkRequest,
    TokenizeRequest,
)
from craton.ml.serving.server.strategies import StrategyOffer, answer_chat, answer_prompt, wanted_strategy
from craton.version import VERSION

CLIENT_GONE = 499  # nginx's, for logs only


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


_STATUSES = (400, 401, 403, 404, 409, 413, 429, 500, 503, 504)
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in _STATUSES}

_GENERATED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


def make_app(service: HttpService, offer: StrategyOffer) -> FastAPI:
    """Return the app for one engine; it reads the engine's messages while it runs. `offer`: strategies for requests."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.link.start()
        yield
        service.link.close()

    app = FastAPI(title="Craton", version=VERSION, lifespan=lifespan, responses=_ERRORS)
    admin = admin_routes(service) if service.settings.access.admin_key is not None else APIRouter()
    admin_paths = [route.path for route in admin.routes if isinstance(route, APIRoute)]
    app.add_middleware(
        Gate,
        access=AccessCheck(service.settings.access, admin_paths),
        limits=service.body_limits,
        check_taken=service.check_taken,
    )
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    _add_generation(app, service, offer)
    _add_information(app, service)
    app.include_router(admin)
    return app


def _add_generation(app: FastAPI, service: HttpService, offer: StrategyOffer) -> None:
    @app.post("/v1/chat/completions", responses=_GENERATED)
    async def chat_completions(http: Request, request: ChatRequest) -> Response:
        if (strategy := wanted_strategy(offer, request)) is not None:
            return await answer_chat(service, offer, http, request, strategy)
        return await chat(service, http, request)

    @app.post("/v1/completions", responses=_GENERATED)
    async def completions(http: Request, request: CompletionRequest) -> Response:
        if (strategy := wanted_strategy(offer, request)) is not None:
            return await answer_prompt(service, offer, http, request, strategy)
        return await complete(service, http, request)

    @app.post("/v1/fork", responses=_GENERATED)
    async def fork(http: Request, request: ForkRequest) -> Response:
        """Start branches of a running completion; they share its KV cache and go on from its present tokens."""
        return await fork_answer(service, http, request)

    @app.post("/v1/abort")
    async def abort(request: AbortRequest) -> dict[str, Any]:
        """End one choice of a running request, or all of them."""
        return {"id": request.id, "aborted": abort_answers(service, request)}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        ready = service.link.working()
        request.ignored()
        service.adapter(request.model)
        if request.messages is not None:
            text = await service.render(
                request.messages,
                request.tools,
                request.add_generation_prompt,
                request.chat_template_kwargs,
                request.continue_final_message,
            )
            tokens = await service.encode(text, with_special_tokens=False, must_fit=False)
        else:
            tokens = await service.encode(request.prompt or "", request.add_special_tokens, must_fit=False)
        body = {"count": len(tokens), "max_model_len": ready.max_length, "tokens": tokens}
        if request.return_token_strs:
            vocabulary = service.texts("return_token_strs")
            body["token_strs"] = [vocabulary.token_text(token) for token in tokens]
        return body

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, str]:
        length = service.link.working().max_length
        request.ignored()
        if len(request.tokens) > length:
            raise BadRequestError(
                f"got {len(request.tokens)} tokens; the model's context is {length} tokens", "tokens", TOO_LONG
            )
        service.adapter(request.model)
        vocabulary = service.texts("tokens")
        service.check_tokens(request.tokens, "tokens")
        return {"prompt": vocabulary.decode(request.tokens, keep_special=True)}


def _add_information(app: FastAPI, service: HttpService) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        ready = service.link.working()
        is_adapter = name != service.name
        of = {"root": name if is_adapter else ready.model, "parent": service.name if is_adapter else None}
        named = {"id": name, "object": "model", "created": started, "owned_by": "craton"}
        state = {"max_model_len": ready.max_length, "weights_version": service.link.stats.weights_version}
        return {**named, **of, **state}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = (service.name, *service.link.working().adapters)
        return {"object": "list", "data": [card(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe one model. Model names may contain slashes."""
        service.adapter(name)
        return card(name)

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        """Report whether requests are accepted now: for readiness probes and load balancers."""
        state = service.readiness()
        return JSONResponse(state.body(), 200 if state.is_ready else 503)

    @app.get("/live")
    async def live() -> Response:
        """Report 503 if a restart would help: for liveness probes. A server that loads, drains, sleeps or is paused is
        alive."""
        state = service.readiness()
        return JSONResponse(state.body(), 503 if state.status in ("failed", "silent") else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": app.version}


def _error_response(error: ApiError, status: int | None = None) -> Response:
    return Response(error.encoded(), status or error.status, error.headers(), "application/json")


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _invalid(_: Request, error: Exception) -> Response:
    """Report the first validation error of a body, and the number of further ones."""
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    if first["type"] == "json_invalid":
        message = f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    return _error_response(BadRequestError(message, where or None, "invalid_body"))


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = BadRequestError(str(error.detail))
    response = _error_response(shown, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
