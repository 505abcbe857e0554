from collections.abc import Sequence

import pytest

from agent.llguidance_library import MAX_BYTES, MAX_ITEMS_IN_ROW, Guide, GuideError, Tokenizer
from common.ids import TokenId

END = 256


def no_tokens(_text: bytes) -> Sequence[TokenId]:
    return []


TOKENIZER = Tokenizer(
    [*(bytes([byte]) for byte in range(256)), b"", b"a" * 100],
    no_tokens,
    end=TokenId(END),
    slices=[],
)
LONG = TokenId(257)


def guide(grammar: str) -> Guide:
    return Guide(TOKENIZER, f'%llguidance {{"no_forcing": true}}\n{grammar}')


def go(guide: Guide, text: str) -> Guide:
    for byte in text.encode():
        guide.accept(TokenId(byte))
    return guide


def test_an_answer_is_followed() -> None:
    following = guide('start: "a" ("b" | "a")+')

    assert [token for token, yes in enumerate(following.allowed()) if yes] == [ord("a"), LONG]
    go(following, "a")
    assert (following.allows(TokenId(ord("b"))), following.allows(TokenId(ord("c")))) == (
        True,
        False,
    )
    assert not following.may_end()
    assert go(following, "b").may_end()


def test_a_grammar_that_is_none_is_refused() -> None:
    with pytest.raises(GuideError, match="unknown name"):
        guide("start: NOBODY")


def test_where_nothing_can_follow_it_says_so() -> None:
    with pytest.raises(GuideError, match=r"^nothing can follow$"):
        go(guide('start: "a" dead\ndead: dead "b"'), "a").allowed()


def test_what_is_not_allowed_cannot_be_accepted() -> None:
    with pytest.raises(GuideError, match="doesn't satisfy the grammar"):
        go(guide('start: "a"'), "b")


def tower(height: int) -> str:
    """A ``b`` ends all of its floors, at each ``a`` before it."""
    floors = [f't{n}: t{n + 1} | "{n}"' for n in range(height)]
    return "\n".join(['start: "a" t0', *floors, f't{height}: start | "b"'])


def test_a_step_that_takes_too_long_is_cancelled_and_others_go_on() -> None:
    other = guide('start: "a" start | "b"')
    hostile = guide(tower(400))
    for _ in range(40):
        hostile.accept(LONG)

    for _ in range(2):  # and it stays so
        with pytest.raises(GuideError, match="too ambiguous: one step takes too long"):
            hostile.allowed()
    assert go(other, "aa").allows(TokenId(ord("b")))


def test_what_leaves_too_much_possible_is_too_ambiguous() -> None:
    ambiguous = guide('start: start start | "a"')

    with pytest.raises(GuideError, match="too ambiguous"):
        go(ambiguous, "a" * MAX_ITEMS_IN_ROW)


def test_an_answer_may_not_be_too_long() -> None:
    endless = guide('start: "a"*')
    for _ in range(MAX_BYTES // 100):
        endless.accept(LONG)

    with pytest.raises(GuideError, match=f"the answer is longer than {MAX_BYTES} bytes"):
        endless.accept(LONG)
