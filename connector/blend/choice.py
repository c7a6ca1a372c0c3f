"""Which tokens of a blended prompt are computed again. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvstore.model.layout import Span

FIRST_TOKENS = 2
"""Of each document: a document that is computed alone attends to its first tokens instead of to what stands before."""


def always_computed(num_tokens: int, spans: Sequence[Span]) -> torch.Tensor:
    """The tokens that are computed at any ratio: [num_tokens], bool.

    These are all tokens outside of documents, for which nothing is stored, and the first tokens of each document.

    Args:
        spans: The documents, by their tokens in the prompt.
    """
    always = torch.ones(num_tokens, dtype=torch.bool)
    for span in spans:
        always[min(span.stop, span.start + FIRST_TOKENS) : span.stop] = False
    return always


def num_chosen(num_tokens: int, spans: Sequence[Span], ratio: float) -> int:
    """How many tokens `choose_rows` chooses, of any differences."""
    document_tokens = sum(span.num_tokens for span in spans)
    firsts = sum(min(FIRST_TOKENS, span.num_tokens) for span in spans)
    return num_tokens - document_tokens + max(firsts, math.ceil(ratio * document_tokens))


def choose_rows(differences: torch.Tensor, spans: Sequence[Span], ratio: float) -> torch.Tensor:
    """The tokens to compute again, ascending.

    Args:
        differences: [num_tokens], how far each token's stored keys are from fresh ones; not looked at outside of
            documents.
        spans: The documents, ascending, without overlap.
        ratio: Share of all tokens of documents. Their first tokens count, and are chosen even if the ratio allows less.
    """
    always = always_computed(len(differences), spans)
    num_more = num_chosen(len(differences), spans, ratio) - int(always.sum())
    ranked = differences.to(torch.float32).masked_fill(always, -1.0)
    # a stable order: equal differences are chosen by position, on every rank alike
    more = torch.argsort(ranked, descending=True, stable=True)[:num_more]
    always[more] = True
    return always.nonzero().flatten()
