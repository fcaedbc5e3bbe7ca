"""Text of prompts and answers, torch-free: chat templates, vocabulary, detokenization, log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.text.answer import Addition, AnswerReader, TokenScore
    from craton.ml.serving.text.logprobs import (
        chat_logprobs,
        completion_logprobs,
        echoed_logprobs,
        prompt_logprobs,
    )
    from craton.ml.serving.text.templates import ChatTemplate, ChatTemplateError, load_template
    from craton.ml.serving.text.thinking import BEGIN, END, ThinkingCounter
    from craton.ml.serving.text.vocabulary import Detokenizer, TextTooLongError, TokenNumbers, Vocabulary
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
