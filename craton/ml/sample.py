"""Generate text from a trained model: `python -m craton.ml.sample RUN_OR_FOLDER --prompt "def "`.

A quick check of what was learnt. Every token runs the whole text through the model again, without a KV cache, so
results cannot differ from training; serving has its own engine. The same seed gives the same text on the same device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from craton.errors import CratonError
from craton.ml.functions import user_code
from craton.ml.models import Decoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class SampleError(CratonError):
    """The prompt or a setting cannot be used."""


def sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int = 80,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    end: int | None = None,
) -> list[str]:
    """Return the continuation of each prompt. Temperature 0 takes the most likely token; top_k 0 allows all tokens."""
    rows = [encode(tokenizer, prompt) for prompt in prompts]
    texts: list[list[int]] = [[] for _ in rows]
    for tokens in generate(model, rows, max_tokens, temperature, top_k, seed, end):
        for text, token in zip(texts, tokens, strict=True):
            if token is not None:
                text.append(token)
    return [tokenizer.decode(text) for text in texts]


@torch.no_grad()
def generate(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    max_tokens: int = 80,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of every row, until `max_tokens`; None for a row that has reached `end`."""
    _check(model, rows, max_tokens, temperature, top_k)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    texts = [list(row) for row in rows]
    open_rows = [True] * len(rows)
    training = model.training
    model.eval()
    try:
        for _ in range(max_tokens):
            logits = _next_logits(model, texts, device)  # [rows, vocabulary]
            chosen = choose(logits, temperature, top_k, generator).tolist()
            open_rows = [is_open and token != end for is_open, token in zip(open_rows, chosen, strict=True)]
            if not any(open_rows):
                return
            for text, token in zip(texts, chosen, strict=True):
                text.append(token)
            yield [token if is_open else None for token, is_open in zip(chosen, open_rows, strict=True)]
    finally:
        model.train(training)


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """Draw one token per row from softmax(logits / temperature) over the `top_k` most likely ones."""
    if temperature == 0:
        return logits.argmax(-1)
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode the prompt as the beginning of a document."""
    tokens: list[int] = tokenizer.encode(prompt).ids
    if not tokens:
        raise SampleError(f"the prompt {prompt!r} has no tokens; give at least one character")
    return tokens


def _next_logits(model: nn.Module, texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    # Rows are padded on the right, which causal attention never sees.
    longest = max(len(text) for text in texts)
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    positions = torch.arange(longest, device=device).expand(tokens.shape)
    with user_code(type(model).forward, type(model).__name__):
        hidden = model(tokens, positions, None)  # [rows, sequence, hidden]
    last = hidden[torch.arange(len(texts)), [len(text) - 1 for text in texts]]
    logits: Tensor = last @ _head(model).T.to(last.dtype)
    return logits.float().cpu()


def _check(model: nn.Module, rows: Sequence[Sequence[int]], max_tokens: int, temperature: float, top_k: int) -> None:
    for name, value in (("max_tokens", max_tokens), ("temperature", temperature), ("top_k", top_k)):
        if not 0 <= value < float("inf"):
            raise SampleError(f"{name} is {value}; it must be 0 or more")
    vocabulary = _head(model).shape[0]
    outside = max((token for row in rows for token in row), default=0)
    if outside >= vocabulary:
        raise SampleError(
            f"the tokenizer gives token id {outside}, but the model's vocabulary is {vocabulary}; use the tokenizer "
            "that the model was trained with"
        )


def _head(model: nn.Module) -> Tensor:
    if isinstance(model, Decoder) and not model.config.has_token_head:
        raise SampleError("the model is a reward model: it scores texts and cannot generate any")
    weight = model.head_weight  # [vocabulary, hidden]
    assert isinstance(weight, Tensor)
    return weight


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit code 2 on a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m craton.ml.sample", description="Generate text from a trained model."
    )
    parser.add_argument("model", metavar="RUN_OR_FOLDER", help="run (its latest checkpoint) or Hugging Face folder")
    parser.add_argument("--prompt", action="append", help="beginning of the text; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="sampling temperature; 0: the most likely token [default: 0.8]"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from the K most likely tokens; 0: all [default: 0]"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="checkpoint step of a run [default: latest]")
    parser.add_argument("--tokenizer", help="tokenizer folder or Hub id [default: that of the run or folder]")
    parser.add_argument(
        "--chat", action="store_true", help="render each prompt as a user message with the chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of streaming text"
    )
    options = parser.parse_args(arguments)
    try:
        _write(options)
    except (CratonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"error": str(error), "problems": [str(error)]}))
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _write(options: argparse.Namespace) -> None:
    from craton.ml.data import end_of_document, find_tokenizer, load_tokenizer
    from craton.ml.export import open_model

    opened = open_model(options.model, options.step)
    folder = find_tokenizer(options.tokenizer) if options.tokenizer else opened.tokenizer_folder()
    tokenizer = load_tokenizer(folder)
    end = end_of_document(folder, tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = opened.model(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    answers = []
    if options.chat and not options.prompt:
        raise SampleError("--chat needs at least one --prompt: the user message")
    for prompt in options.prompt or [""]:
        if options.chat:
            row, end = chat_row(folder, prompt, end)
        else:
            row = encode(tokenizer, prompt) if prompt else [_beginning(end)]
        begin = "" if options.chat else prompt  # for a chat, only the answer is printed
        began = time.perf_counter()
        steps = generate(model, [row], options.max_tokens, options.temperature, options.top_k, options.seed, end)
        generated: list[int] = []
        shown = "" if options.json else _show("", begin)
        for (token,) in steps:
            assert token is not None
            generated.append(token)
            if not options.json:
                shown = _show(
                    shown, begin + tokenizer.decode(generated).rstrip("\ufffd")
                )  # the last character may still lack bytes
        text = tokenizer.decode(generated)
        if not options.json:
            _show(shown, begin + text + "\n")
        seconds = time.perf_counter() - began
        answers.append({"prompt": prompt, "text": text, "tokens": len(generated), "seconds": seconds})
    if options.json:
        print(json.dumps({"model": str(options.model), "step": opened.step, "samples": answers}))


def chat_row(folder: Path, message: str, end: int | None) -> tuple[list[int], int | None]:
    """Render a user message as in training, up to where the assistant's turn begins. Also return the token that ends
    the assistant's turn, which is `end` if the template has none."""
    from transformers import PreTrainedTokenizerFast

    from craton.ml.data import token_after_answer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise SampleError(
            f"--chat: the tokenizer in {folder} has no chat template; put a chat_template.jinja beside its "
            "tokenizer.json, or run without --chat"
        )
    asked = [{"role": "user", "content": message}]
    begin = str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    row: list[int] = tokenizer(begin, add_special_tokens=False)["input_ids"]
    turn = token_after_answer(tokenizer)
    return row, end if turn is None else turn


def _show(shown: str, text: str) -> str:
    """Print the new part of the text; return what has been printed so far."""
    if not text.startswith(shown):
        return shown
    print(text[len(shown) :], end="", flush=True)
    return text


def _beginning(end: int | None) -> int:
    if end is None:
        raise SampleError("the tokenizer has no end-of-text token, so a text cannot start empty; give a --prompt")
    return end


if __name__ == "__main__":
    sys.exit(main())
