"""Keys and values of a prompt, layer by layer: all of them fresh, or those of documents reused and some of them fresh.

The idea of CacheBlend (EuroSys 2025): a document's keys and values differ from those that it has behind other documents
in few of its tokens. The first layers are computed for all tokens. The tokens whose keys differ most there are computed
in the other layers too; for the rest the document's own keys and values are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from connector.blend.choice import choose_rows, num_chosen
from connector.blend.rotation import Angles, rerotate
from kvstore.model.layout import Span

FULL_LAYERS = 2
"""Layers that are computed for all tokens. Keys and values of the layer behind them are fresh for all tokens too."""

FIRST_POSITION = 1
"""A document is computed alone behind the prompt's first token, so its first token has this position. Its keys were
rotated for it, and those of the other tokens for the positions that follow."""

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Exchange:
    """A sum over an engine's ranks, or a collection of what they have: each rank waits in it for all others.

    Attributes:
        kind: What is summed or collected: hidden states, differences of keys, or the logits of one token.
        num_tokens: Of how many tokens; all ranks have as many.
    """

    kind: Literal["hidden", "differences", "logits"]
    num_tokens: int = 1


class LayeredModel(Protocol):
    """A decoder whose layers can be called one by one. Tokens are rows of two-dimensional tensors.

    Where ranks share the model, heads are those of this rank, and hidden states are the same on all: `embed` sums them
    over the ranks once, and `finish` twice.
    """

    @property
    def num_layers(self) -> int: ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden states in front of the first layer: [num_tokens, hidden_size]."""

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys, rotated, and values of a layer: each [num_tokens, heads, head_dim]."""

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The hidden states behind a layer.

        Args:
            hidden: In front of it.
            attended: What its attention found: [num_tokens, heads, head_dim].
        """

    def angles(self, positions: torch.Tensor) -> Angles:
        """How keys at these positions are rotated."""

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal attention of the last tokens of a prompt over all of it: [num_queries, heads, head_dim]."""

    def attention_scale(self, layer: int) -> float:
        """What the products of queries and keys are multiplied with."""

    def sum_over_ranks(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, equal bit for bit on all of them."""


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Keys and values of some tokens, by layer.

    Attributes:
        keys: For each layer [num_tokens, heads, head_dim].
        values: As `keys`.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def rows(self, start: int, stop: int) -> LayerStates:
        """Those of some tokens in a row; shares their memory."""
        return LayerStates([one[start:stop] for one in self.keys], [one[start:stop] for one in self.values])


@dataclass(frozen=True, slots=True)
class Blended:
    """What blending made of a prompt.

    Attributes:
        states: Keys and values of all its tokens.
        rows: The tokens that were computed in all layers, ascending.
        hidden: Of `rows`, behind the last layer; `None` if it was not asked for.
    """

    states: LayerStates
    rows: torch.Tensor
    hidden: torch.Tensor | None


def behind(first_token: int, tokens: torch.Tensor) -> torch.Tensor:
    """The first token of a prompt, and behind it a document's: what is computed to store the document.

    Many models attend to a prompt's first token from everywhere. Without it a document's own first tokens would take
    that place, and differ most from what they are in a prompt.
    """
    return torch.cat((torch.tensor([first_token], dtype=tokens.dtype), tokens))


def document_of(made: Blended) -> LayerStates:
    """Keys and values of a document of which, with `behind`, all tokens were computed."""
    return made.states.rows(FIRST_POSITION, len(made.rows))


def blend_by_layer(
    model: LayeredModel,
    tokens: torch.Tensor,
    documents: Sequence[tuple[Span, LayerStates]],
    *,
    ratio: float | None,
    rotates: bool = True,
    wants_hidden: bool = False,
) -> Iterator[Blended | None]:
    """Keys and values of a prompt, of which documents were computed before: yields behind each layer, `None` until the
    last one.

    Args:
        model: Its layers.
        tokens: The whole prompt: [num_tokens].
        documents: Where documents stand, ascending, without overlap, and their keys and values as `document_of` has
            them. None: all is computed.
        ratio: Share of the documents' tokens that are computed again. `None`: none of them, not in the first layers
            either, for comparison.
        rotates: False: keys stay as they were rotated, for comparison.
        wants_hidden: Also compute the hidden states behind the last layer.
    """
    num_tokens = len(tokens)
    positions = torch.arange(num_tokens)
    spans = [span for span, _ in documents]
    reused = _place(model, positions, documents, rotates=rotates)
    rows = positions
    if ratio is None:
        outside = torch.ones(num_tokens, dtype=torch.bool)
        for span in spans:
            outside[span.start : span.stop] = False
        rows = outside.nonzero().flatten()
    hidden = model.embed(tokens[rows])
    states = LayerStates([], [])
    for layer in range(model.num_layers):
        queries, keys, values = model.project(layer, hidden, positions[rows])
        is_last = layer == model.num_layers - 1
        if ratio is not None and documents and layer == min(FULL_LAYERS, model.num_layers - 1):
            # over all heads, so that all ranks choose the same tokens, and those that one rank would
            differences = model.sum_over_ranks(_differences(reused.keys[layer], keys))
            chosen = choose_rows(differences, spans, ratio)
            rows, hidden, queries = chosen, hidden[chosen], queries[chosen]
        elif len(keys) < num_tokens:
            keys = reused.keys[layer].index_copy(0, rows, keys)
            values = reused.values[layer].index_copy(0, rows, values)
        states.keys.append(keys)
        states.values.append(values)
        if not is_last or wants_hidden:
            if len(rows) == num_tokens:  # the model's own attention takes tokens in a row
                attended = model.attend(layer, queries, keys, values)
            else:
                attended = attend(queries, keys, values, rows, scale=model.attention_scale(layer))
            hidden = model.finish(layer, hidden, attended)
        yield Blended(states, rows, hidden if wants_hidden else None) if is_last else None


def extend(
    model: LayeredModel, states: LayerStates, tokens: torch.Tensor, start: int, *, wants_hidden: bool = False
) -> torch.Tensor | None:
    """Compute tokens of a prompt behind those whose keys and values are there, and add theirs.

    Args:
        model: Its layers.
        states: Keys and values of the whole prompt's length; those before `start` are read, those of `tokens` written.
        tokens: [num_tokens].
        start: The position of the first of them.
        wants_hidden: Also compute the hidden states behind the last layer, and return them.
    """
    stop = start + len(tokens)
    rows = torch.arange(start, stop)
    hidden = model.embed(tokens)
    for layer in range(model.num_layers):
        queries, keys, values = model.project(layer, hidden, rows)
        states.keys[layer][start:stop] = keys
        states.values[layer][start:stop] = values
        if layer < model.num_layers - 1 or wants_hidden:
            seen = states.keys[layer][:stop], states.values[layer][:stop]
            attended = model.attend(layer, queries, *seen)
            hidden = model.finish(layer, hidden, attended)
    return hidden if wants_hidden else None


def exchanges_of_blend(num_layers: int, num_tokens: int, spans: Sequence[Span], ratio: float) -> list[list[Exchange]]:
    """What `blend_by_layer` exchanges between ranks in each layer, in order, if it wants no hidden states."""
    rows = num_tokens
    found: list[list[Exchange]] = [[] for _ in range(num_layers)]
    found[0].append(Exchange("hidden", rows))
    for layer, exchanges in enumerate(found):
        if spans and layer == min(FULL_LAYERS, num_layers - 1):
            exchanges.append(Exchange("differences", num_tokens))
            rows = num_chosen(num_tokens, spans, ratio)
        if layer < num_layers - 1:
            exchanges.extend([Exchange("hidden", rows)] * 2)
    return found


def exchanges_of_extend(num_layers: int, num_tokens: int, *, wants_hidden: bool) -> list[Exchange]:
    """What `extend` exchanges between ranks."""
    return [Exchange("hidden", num_tokens)] * (1 + 2 * (num_layers if wants_hidden else num_layers - 1))


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Causal attention of some tokens of a prompt over all of it: [num_rows, heads, head_dim].

    Args:
        queries: [num_rows, heads, head_dim].
        keys: [num_tokens, key heads, head_dim]; `values` too.
        rows: Which tokens ask, ascending: [num_rows].
    """
    shared = queries.shape[1] // keys.shape[1]
    # keys and values with as many heads as queries: [1, heads, num_tokens, head_dim]
    all_keys, all_values = (one.repeat_interleave(shared, 1).transpose(0, 1)[None] for one in (keys, values))
    parts = []
    columns = torch.arange(len(keys))
    for start in range(0, len(rows), _ROWS_AT_ONCE):  # tokens behind the last of these rows are not looked at
        part = rows[start : start + _ROWS_AT_ONCE]
        stop = int(part[-1]) + 1
        asked = queries[start : start + _ROWS_AT_ONCE].transpose(0, 1)[None]
        mask = columns[:stop][None, :] <= part[:, None]
        seen_keys, seen_values = all_keys[:, :, :stop], all_values[:, :, :stop]
        found = scaled_dot_product_attention(asked, seen_keys, seen_values, attn_mask=mask, scale=scale)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def _place(
    model: LayeredModel, positions: torch.Tensor, documents: Sequence[tuple[Span, LayerStates]], *, rotates: bool
) -> LayerStates:
    """The documents' keys and values at their places in the prompt; zeros elsewhere, which nothing reads."""
    placed = LayerStates([], [])
    if not documents:
        return placed
    moves = [
        (
            span,
            states,
            model.angles(torch.arange(FIRST_POSITION, FIRST_POSITION + span.num_tokens)),
            model.angles(positions[span.start : span.stop]),
        )
        for span, states in documents
    ]
    for layer in range(model.num_layers):
        first = documents[0][1]
        keys = first.keys[layer].new_zeros((len(positions), *first.keys[layer].shape[1:]))
        values = first.values[layer].new_zeros((len(positions), *first.values[layer].shape[1:]))
        for span, states, seen, wanted in moves:
            moved = rerotate(states.keys[layer], seen, wanted) if rotates else states.keys[layer]
            keys[span.start : span.stop] = moved
            values[span.start : span.stop] = states.values[layer]
        placed.keys.append(keys)
        placed.values.append(values)
    return placed


def _differences(stored: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """How far keys differ, by token: [num_tokens], the sum of squares over heads."""
    return (stored.to(torch.float32) - fresh.to(torch.float32)).square().sum((1, 2))
