"""Questions over shuffled documents whose answer needs two or three of them: associative recall across documents.

There are three kinds of documents, of sentences of two words with other words between them. A code book says that a
first code means a second code; another one says that a second code means a value; a list says that a name has a code.
The question is a name, the answer is the value. What a list's code means stands in other documents, so a list that is
computed alone cannot know it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST, DOCUMENT, QUESTION = 1, 2, 3
_CODES, _NAMES, _OTHERS = 16, 24, 8
_FIRST_CODE = 8
_SECOND_CODE = _FIRST_CODE + _CODES
_VALUE = _SECOND_CODE + _CODES
_NAME = _VALUE + _CODES
_OTHER = _NAME + _NAMES
VOCABULARY = _OTHER + _OTHERS

_SENTENCES = 4
"""Of a document."""
NO_LABEL = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of one shape.

    Attributes:
        tokens: [prompts, num_tokens].
        labels: As `tokens`: what the model is to answer behind a token, or `NO_LABEL`.
        document_tokens: Tokens of each document; they stand one behind the other, behind the first token.
        num_documents: In a prompt.
    """

    tokens: np.ndarray
    labels: np.ndarray
    document_tokens: int
    num_documents: int


def draw(
    random: np.random.Generator, prompts: int, *, codes: int = 8, names: int = 12, questions: int = 4, others: int = 6
) -> Batch:
    """Draw prompts.

    Args:
        random: Where from.
        prompts: How many.
        codes: Of each kind, a multiple of 4.
        names: In lists, a multiple of 4.
        questions: Behind the documents.
        others: Words behind each sentence.
    """
    first = _choose(random, prompts, _CODES, codes) + _FIRST_CODE
    second = _choose(random, prompts, _CODES, codes) + _SECOND_CODE
    value = random.integers(0, _CODES, (prompts, codes)) + _VALUE
    turned = _choose(random, prompts, codes, codes)
    meanings = _documents(random, _take(second, turned), _take(value, turned), None, others)
    books = _documents(random, first, second, value, others)
    name = _choose(random, prompts, _NAMES, names) + _NAME
    which = random.integers(0, codes, (prompts, names))
    is_first = random.random((prompts, names)) < 0.5
    code = np.where(is_first, _take(first, which), _take(second, which))
    answer = _take(value, which)
    lists = _documents(random, name, code, answer, others)
    asked = _choose(random, prompts, names, questions)
    question = np.stack((np.full_like(asked, QUESTION), _take(name, asked), _take(answer, asked)), 2)
    labels = np.full_like(question, NO_LABEL)
    labels[:, :, 1] = _take(answer, asked)
    parts = [_shuffled(random, *one) for one in (meanings, books, lists)]
    start = np.full((prompts, 1), FIRST)
    return Batch(
        np.concatenate((start, *(tokens for tokens, _ in parts), question.reshape(prompts, -1)), 1),
        np.concatenate((np.full_like(start, NO_LABEL), *(one for _, one in parts), labels.reshape(prompts, -1)), 1),
        meanings[0].shape[2],
        (2 * codes + names) // _SENTENCES,
    )


def _choose(random: np.random.Generator, prompts: int, of: int, count: int) -> np.ndarray:
    """For each prompt different numbers below `of`: [prompts, count]."""
    return random.random((prompts, of)).argsort(1)[:, :count]


def _take(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, at, 1)


def _documents(
    random: np.random.Generator, left: np.ndarray, right: np.ndarray, label: np.ndarray | None, others: int
) -> tuple[np.ndarray, np.ndarray]:
    """Documents of sentences and, behind the second word of each, what it means: [prompts, documents, tokens]."""
    prompts, sentences = left.shape
    noise = random.integers(0, _OTHERS, (prompts, sentences, others)) + _OTHER
    tokens = np.concatenate((left[:, :, None], right[:, :, None], noise), 2)
    labels = np.full_like(tokens, NO_LABEL)
    if label is not None:
        labels[:, :, 1] = label
    documents = sentences // _SENTENCES
    heads = np.full((prompts, documents, 1), DOCUMENT)
    return (
        np.concatenate((heads, tokens.reshape(prompts, documents, -1)), 2),
        np.concatenate((np.full_like(heads, NO_LABEL), labels.reshape(prompts, documents, -1)), 2),
    )


def _shuffled(random: np.random.Generator, tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Documents of one kind in another order for each prompt: [prompts, tokens of all]."""
    prompts, documents, _ = tokens.shape
    order = _choose(random, prompts, documents, documents)[:, :, None]
    both = (np.take_along_axis(one, order, 1).reshape(prompts, -1) for one in (tokens, labels))
    first, second = both
    return first, second
