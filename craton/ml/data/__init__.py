"""Text to token shards to samples, in an order that is a pure function of (seed, sample index); torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.data.chat import end_of_turn, token_after_answer
    from craton.ml.data.conversations import best_fit
    from craton.ml.data.documents import check_text
    from craton.ml.data.errors import DataError
    from craton.ml.data.loader import Loader
    from craton.ml.data.order import key_of, permute
    from craton.ml.data.pairs import PairedSource
    from craton.ml.data.preparing import (
        check_other_model,
        has_data,
        open_pairs,
        open_prompts,
        open_source,
        prepare,
        prepared_folders,
        tokenizer_folder,
        tokenizer_of_run,
    )
    from craton.ml.data.prompts import Prompt, PromptEncoder, PromptSource
    from craton.ml.data.sample import Sample, Source, collate
    from craton.ml.data.shards import Shards, is_shard_folder
    from craton.ml.data.tokenizer import end_of_document, find_tokenizer, load_tokenizer
    from craton.ml.data.tokenizing import Tokenized, tokenize
    from craton.ml.data.tokens import Mixture
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
