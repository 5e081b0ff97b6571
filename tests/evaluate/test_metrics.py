"""Scores of answers, worked out by hand."""

from __future__ import annotations

import pytest

from questkv.evaluate.metrics import classification, f1, longest_common_subsequence, rouge_l


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),  # articles, case and punctuation don't count
        ("in the city of Paris, France", "Paris", 2 * 0.2 * 1 / 1.2),  # in city of paris france: 1 of 5, 1 of 1
        ("red red blue", "red blue blue", 2 / 3),  # red once and blue once of three each
        ("yes", "no", 0.0),
        ("", "Paris", 0.0),
        ("the", "the", 0.0),  # nothing is left of either
    ],
)
def test_f1(prediction: str, answer: str, score: float) -> None:
    assert f1(prediction, answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        # Lin (2004), section 3.1: reference S1 and candidates S2, S3; LCS 3 and 2 of four words.
        ("police kill the gunman", "police killed the gunman", 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        ("A b, C!", "a B c", 1.0),
        ("a x b y c", "a b c", 2 * (3 / 5) * 1 / (3 / 5 + 1)),
        ("", "a b", 0.0),
    ],
)
def test_rouge_l(prediction: str, answer: str, score: float) -> None:
    assert rouge_l(prediction, answer) == pytest.approx(score)


def test_the_longest_common_subsequence_may_have_gaps() -> None:
    assert longest_common_subsequence("ABCBDAB", "BDCABA") == 4
    assert longest_common_subsequence("", "AB") == 0
    assert longest_common_subsequence("AAAA", "AA") == 2


CLASSES = ["Date", "City", "Other location", "Location", "Number"]


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("City", "City", 1.0),
        ("City or Date", "City", 0.5),
        ("Date", "City", 0.0),
        ("I don't know", "City", 0.0),
        ("Type: Other location", "Other location", 1.0),
        ("a Location in a City", "Location", 0.5),
    ],
)
def test_classification(prediction: str, answer: str, score: float) -> None:
    assert classification(prediction, answer, CLASSES) == score


def test_a_class_inside_the_answers_name_does_not_count() -> None:
    assert classification("Location name", "Location name", ["Location", "Location name"]) == 1.0
