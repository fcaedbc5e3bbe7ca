"""Inference clients: one interface to an engine in this process, our servers and any OpenAI endpoint; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.clients.answer import Answer, AnswerDelta, InferenceRequest
    from craton.ml.serving.clients.bounds import Retries, Timeouts
    from craton.ml.serving.clients.capabilities import Capabilities, rollout_capabilities
    from craton.ml.serving.clients.client import InferenceClient, complete, complete_all, complete_blocking
    from craton.ml.serving.clients.engine_client import EngineClient
    from craton.ml.serving.clients.engine_texts import EngineTexts
    from craton.ml.serving.clients.errors import (
        AnswerTimeoutError,
        BrokenStreamError,
        ClientClosedError,
        EndpointUnavailableError,
        InferenceError,
        MissingCapabilityError,
        ProtocolError,
        RequestRefusedError,
        ServerFailedError,
    )
    from craton.ml.serving.clients.http_replies import error_message, model_cards, unreachable_reason
    from craton.ml.serving.clients.openai_client import OpenAIClient, connect
    from craton.ml.serving.clients.server_client import ServerClient
    from craton.ml.serving.clients.synchronous import generate
    from craton.ml.serving.clients.teacher import TeacherEndpoint
    from craton.ml.serving.clients.token_client import TokenClient
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
