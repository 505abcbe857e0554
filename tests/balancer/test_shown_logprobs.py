from collections.abc import Sequence

from balancer.shown_logprobs import ShownLogprobs
from common.ids import TokenId
from common.messages import Logprobs, TokenLogprob


def taken(*pieces: str | bytes) -> ShownLogprobs:
    shown = ShownLogprobs()
    for n, piece in enumerate(pieces):
        data = piece.encode() if isinstance(piece, str) else piece
        shown.take(Logprobs(TokenLogprob(TokenId(n), -1.0, data), ()))
    return shown


def numbers(told: Sequence[Logprobs]) -> list[int]:
    return [each.chosen.token for each in told]


def test_tokens_are_told_with_their_text() -> None:
    shown = taken("The", " sky", " is")

    assert numbers(shown.shown("The")) == [0]
    assert numbers(shown.shown("")) == []
    assert numbers(shown.shown(" sky is")) == [1, 2]


def test_a_stop_text_and_what_follows_are_not_told() -> None:
    shown = taken("Alph", "abet", ":", " 0")

    assert numbers(shown.shown("Alphab")) == [0, 1]  # the stop text is "et: 0"


def test_a_token_that_is_shown_in_two_parts_is_told_once() -> None:
    shown = taken("abcdef", "g")

    assert numbers(shown.shown("ab")) == [0]
    assert numbers(shown.shown("cdefg")) == [1]


def test_marks_and_white_space_that_are_hidden_are_passed_over() -> None:
    shown = taken("<", "think", ">", "\n\n  so", "</think>", "yes")

    assert numbers(shown.shown("so")) == [3]
    assert numbers(shown.shown("yes")) == [5]


def test_the_parts_of_a_character_are_told_with_it() -> None:
    first, second = "ñ".encode()[:1], "ñ".encode()[1:]
    shown = taken("a", first, second, "b")

    assert numbers(shown.shown("a")) == [0]
    assert numbers(shown.shown("ñb")) == [1, 2, 3]


def test_nothing_is_told_twice_and_nothing_without_text() -> None:
    shown = taken("a")

    assert numbers(shown.shown("a")) == [0]
    assert numbers(shown.shown("a")) == []
