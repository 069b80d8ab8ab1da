"""Real text without a download: the Python reference that ships with Python, as characters."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np


class Corpus(NamedTuple):
    """A text as numbers, in two parts that share no paragraph.

    Attributes:
      vocabulary: the distinct characters in order; a character's number is its place here.
      train: int32 characters to learn from.
      held_out: int32 characters to judge by.

    Examples:
      >>> from ampx.examples import text
      >>> corpus = text.load_corpus()
      >>> len(corpus.held_out) < len(corpus.train)
      True
    """

    vocabulary: str
    train: np.ndarray
    held_out: np.ndarray


def load_corpus(held_out_fraction: float = 0.1) -> Corpus:
    """The text of `pydoc_data.topics`, split into training and held-out text.

    Many paragraphs occur under several topics. Each is kept once: otherwise a twelfth of the
    held-out text would be text that the model has trained on.

    Args:
      held_out_fraction: share of the paragraphs, from the end, to hold out; between 0 and 1.

    Returns:
      A `Corpus`. The text, about 400,000 characters, differs between versions of Python.

    Raises:
      ValueError: if `held_out_fraction` is not strictly between 0 and 1.

    Examples:
      >>> from ampx.examples import text
      >>> corpus = text.load_corpus()
      >>> text.decode(corpus, corpus.train[:22])
      'The "assert" statement'
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"held_out_fraction must be between 0 and 1, got {held_out_fraction}")
    # A dict keeps the first of equal keys, in order.
    paragraphs = list(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
    split = round(len(paragraphs) * (1 - held_out_fraction))
    train, held_out = "\n\n".join(paragraphs[:split]), "\n\n".join(paragraphs[split:])
    vocabulary = "".join(sorted(set(train + held_out)))
    return Corpus(vocabulary, _encode(train, vocabulary), _encode(held_out, vocabulary))


def decode(corpus: Corpus, tokens: np.ndarray) -> str:
    """The string that the numbers stand for.

    Args:
      corpus: gives the vocabulary.
      tokens: integer array of one dimension.

    Returns:
      The string.

    Examples:
      >>> from ampx.examples import text
      >>> text.decode(text.Corpus("abc", None, None), [2, 0, 1])
      'cab'
    """
    return "".join(corpus.vocabulary[token] for token in tokens)


def random_windows(
    tokens: np.ndarray, rng: np.random.Generator, count: int, length: int
) -> np.ndarray:
    """Windows from random places, for training.

    Args:
      tokens: a text as numbers.
      rng: draws the places; the same seed gives the same windows.
      count: number of windows.
      length: characters in each.

    Returns:
      Array of shape (count, length).

    Examples:
      >>> import numpy as np
      >>> from ampx.examples import text
      >>> text.random_windows(np.arange(100), np.random.default_rng(0), 2, 3)
      array([[83, 84, 85],
             [62, 63, 64]])
    """
    # (count, 1) + (length,): one fancy index reads all windows.
    starts = rng.integers(0, len(tokens) - length + 1, count)
    return tokens[starts[:, None] + np.arange(length)]


def all_windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Windows that cover a text from its beginning, for evaluation.

    Each begins with the character that the one before ended with: a window of n characters asks
    for n - 1 predictions, and so every character but the first is predicted once.

    Args:
      tokens: a text as numbers.
      length: characters in each window. What is left at the end is dropped.

    Returns:
      Array of shape (windows, length).

    Examples:
      >>> import numpy as np
      >>> from ampx.examples import text
      >>> text.all_windows(np.arange(8), 3)
      array([[0, 1, 2],
             [2, 3, 4],
             [4, 5, 6]])
    """
    # One less than the length from start to start: neighbours share a character.
    starts = np.arange(0, len(tokens) - length + 1, length - 1)
    return tokens[starts[:, None] + np.arange(length)]


def unigram_entropy(corpus: Corpus) -> float:
    """Held-out loss of a model that knows only how frequent each character is: the bar to clear.

    Args:
      corpus: frequencies are counted in its training text.

    Returns:
      Nats per character.

    Examples:
      >>> from ampx.examples import text
      >>> 3.0 < text.unigram_entropy(text.load_corpus()) < 3.5
      True
    """
    # One more of each character than counted: one that only the held-out text has would otherwise
    # have probability zero, and the loss would be infinite.
    counts = np.bincount(corpus.train, minlength=len(corpus.vocabulary)) + 1.0
    return float(-np.mean(np.log(counts / counts.sum())[corpus.held_out]))


def _encode(string: str, vocabulary: str) -> np.ndarray:
    number_of = {character: number for number, character in enumerate(vocabulary)}
    return np.array([number_of[character] for character in string], np.int32)
