"""Data: text to token shards, and shards, chats or a user's function to samples in an order that is a pure function of
(seed, global sample index). Nothing here needs torch."""

from craton.ml.data.conversations import ChatSource
from craton.ml.data.documents import check_text
from craton.ml.data.errors import DataError, DiskFullError
from craton.ml.data.function import FunctionSource
from craton.ml.data.loader import Loader
from craton.ml.data.preparing import default_cache, model_tokenizer, open_source, prepare, tokenizer_folder
from craton.ml.data.sample import IGNORED, Sample, Source, collate
from craton.ml.data.shards import Index, Shards, TokenizerMark, is_shard_folder
from craton.ml.data.tokenizer import copy_tokenizer, end_of_document, find_tokenizer, load_tokenizer, mark_of
from craton.ml.data.tokenizing import Tokenized, tokenize, usable_cores
from craton.ml.data.tokens import Mixture, TokenSource

__all__ = [
    "IGNORED",
    "ChatSource",
    "DataError",
    "DiskFullError",
    "FunctionSource",
    "Index",
    "Loader",
    "Mixture",
    "Sample",
    "Shards",
    "Source",
    "TokenSource",
    "Tokenized",
    "TokenizerMark",
    "check_text",
    "collate",
    "copy_tokenizer",
    "default_cache",
    "end_of_document",
    "find_tokenizer",
    "is_shard_folder",
    "load_tokenizer",
    "mark_of",
    "model_tokenizer",
    "open_source",
    "prepare",
    "tokenize",
    "tokenizer_folder",
    "usable_cores",
]
