"""Scores of an answer in words: F1, ROUGE-L and classification, each in [0, 1], as LongBench uses them.

LongBench: Bai et al., 2023, arXiv 2308.14508, section 3.3.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = {"a", "an", "the"}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """Words in lower case without punctuation and articles (the normal form of SQuAD, arXiv 1606.05250)."""
    return [word for word in text.lower().translate(_NO_PUNCTUATION).split() if word not in _ARTICLES]


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of `answer_words`, repeated words counted."""
    predicted, wanted = answer_words(prediction), answer_words(answer)
    return _harmonic_mean((Counter(predicted) & Counter(wanted)).total(), len(predicted), len(wanted))


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L with beta 1 (Lin, 2004, section 3): F1 of the longest common subsequence of words.

    Words are runs of letters and digits in lower case, the texts one sequence each.
    """
    predicted, wanted = (re.findall(r"[^\W_]+", text.lower()) for text in (prediction, answer))
    return _harmonic_mean(longest_common_subsequence(predicted, wanted), len(predicted), len(wanted))


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest sequence that both contain in order, gaps allowed."""
    best = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0  # best[j - 1] before this word
        for j, other in enumerate(second, start=1):
            above = best[j]
            best[j] = diagonal + 1 if word == other else max(above, best[j - 1])
            diagonal = above
    return best[-1]


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of class names in the prediction if the answer is among them, else 0.

    A name that is a part of the answer's own name doesn't count: it can't but stand there too.
    """
    named = [name for name in classes if name in prediction and (name == answer or name not in answer)]
    return 1.0 / len(named) if answer in named else 0.0


def _harmonic_mean(common: int, predicted: int, wanted: int) -> float:
    return 2 * common / (predicted + wanted) if common else 0.0
