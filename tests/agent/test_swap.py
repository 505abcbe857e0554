"""From one model to the next, step by step; then what must hold whatever happens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent.swap import (
    FIRST_DELAY,
    LOADS_IN_TURN,
    LONGEST_DELAY,
    LONGEST_DRAIN,
    PAUSE_IN_TURN,
    Effect,
    Find,
    GiveBack,
    LimitDrain,
    Load,
    ModelSwap,
    Retry,
    Setup,
    StopFinding,
    Target,
    Unload,
    UseTemplate,
)
from common.models import (
    AgentDesiredState,
    AgentIssue,
    Application,
    EngineChoices,
    IssueKind,
    LocalModel,
    ModelReference,
    NoModel,
)

A, B = LocalModel("/a.gguf"), LocalModel("/b.gguf")
BROKEN = AgentIssue(IssueKind.MODEL_CANNOT_BE_LOADED, "/b.gguf", "it is broken")
LINK, OTHER_LINK = "ws://one", "ws://two"
MISSING = AgentIssue(IssueKind.MODEL_FILE_DOES_NOT_EXIST, "/b.gguf", "it is not here")


def state(model: ModelReference = A, template: str | None = None) -> AgentDesiredState:
    return AgentDesiredState(model=model, chat_template=template)


def target(model: ModelReference = A, template: str | None = None) -> Target:
    return Target(model, NoModel(), EngineChoices(), template, embeddings_only=False)


def setup(model: LocalModel = A) -> Setup:
    return Setup(target(model), model.path)


@pytest.fixture
def swap() -> ModelSwap:
    return ModelSwap(own=EngineChoices(), pinned=None)


def serve(swap: ModelSwap, model: LocalModel = A) -> None:
    swap.want(state(model))
    swap.found(setup(model))
    swap.loaded()
    assert swap.application is Application.APPLIED


def get_turn(swap: ModelSwap) -> list[Effect]:
    """Up to where the next model is to be loaded."""
    swap.want(state(B))
    swap.found(setup(B))
    swap.turn(1, LINK)
    return swap.idle()


def test_the_first_model_needs_no_turn(swap: ModelSwap) -> None:
    assert swap.application is Application.FRESH
    assert swap.want(state()) == [Find(target())]
    assert swap.found(setup()) == [Load(setup())]
    assert not swap.is_swapping
    assert swap.loaded() == []
    assert swap.application is Application.APPLIED


def test_a_model_that_serves_is_let_go_in_turn_when_nothing_runs(swap: ModelSwap) -> None:
    serve(swap)

    assert swap.want(state(B)) == [Find(target(B))]
    assert swap.found(setup(B)) == []
    assert swap.idle() == []
    assert (swap.awaits_turn, swap.is_swapping) == (True, False)
    assert swap.turn(3, LINK) == [LimitDrain(LONGEST_DRAIN)]
    assert (swap.awaits_turn, swap.is_swapping) == (False, True)
    assert swap.drained_long_enough() == [GiveBack()]
    assert swap.idle() == [Load(setup(B))]
    assert swap.drained_long_enough() == []
    assert swap.is_swapping
    assert swap.loaded() == []
    assert (swap.is_swapping, swap.turn_taken(LINK)) == (False, 3)
    assert swap.application is Application.APPLIED


def test_what_is_wanted_already_changes_nothing(swap: ModelSwap) -> None:
    serve(swap)

    assert swap.want(state()) == []
    assert swap.application is Application.APPLIED


def test_another_template_needs_no_other_model(swap: ModelSwap) -> None:
    serve(swap)

    assert swap.want(state(A, "x")) == [UseTemplate("x", embeddings_only=False)]
    assert swap.template_used(()) == []
    assert swap.application is Application.APPLIED


def test_a_template_that_is_refused_is_told(swap: ModelSwap) -> None:
    serve(swap)
    swap.want(state(A, "x"))

    assert swap.template_refused(BROKEN) == []
    assert (swap.application, swap.issues) == (Application.STUCK, (BROKEN,))
    assert swap.want(state(A)) == [UseTemplate(None, embeddings_only=False)]
    assert swap.issues == ()


def test_no_model_is_wanted(swap: ModelSwap) -> None:
    serve(swap)

    assert swap.want(state(NoModel())) == []
    assert swap.awaits_turn
    swap.turn(1, LINK)
    assert swap.idle() == [Unload()]
    assert swap.unloaded() == []
    assert (swap.application, swap.turn_taken(LINK)) == (Application.APPLIED, 1)


def test_nothing_to_unload_is_applied_at_once(swap: ModelSwap) -> None:
    assert swap.want(state(NoModel())) == []
    assert swap.application is Application.APPLIED


def test_a_newer_wish_takes_the_place_of_one_that_is_looked_for(swap: ModelSwap) -> None:
    swap.want(state(A))

    assert swap.want(state(B)) == [StopFinding(), Find(target(B))]
    assert swap.found(setup(A)) == []
    assert swap.not_found(target(A), MISSING, is_final=True) == []
    assert swap.found(setup(B)) == [Load(setup(B))]


def test_a_newer_wish_is_heard_when_the_load_is_over(swap: ModelSwap) -> None:
    serve(swap)
    get_turn(swap)

    assert swap.want(state(A)) == []
    assert swap.loaded() == [Find(target(A))]
    assert swap.turn_taken(LINK) == 1


def test_who_wants_the_old_one_again_before_it_is_gone_keeps_it(swap: ModelSwap) -> None:
    serve(swap)
    swap.want(state(B))
    swap.found(setup(B))
    swap.turn(1, LINK)

    assert swap.want(state(A)) == []
    assert (swap.is_swapping, swap.turn_taken(LINK)) == (False, 1)
    assert swap.application is Application.APPLIED


def test_a_turn_without_use_is_passed_on(swap: ModelSwap) -> None:
    serve(swap)

    assert swap.turn(4, LINK) == []
    assert (swap.turn_taken(LINK), swap.is_swapping) == (4, False)


def test_turns_are_of_one_link(swap: ModelSwap) -> None:
    serve(swap)
    get_turn(swap)

    swap.link_lost(LINK)
    swap.loaded()

    assert swap.turn_taken(LINK) == 0


def test_each_balancer_counts_turns_for_itself(swap: ModelSwap) -> None:
    serve(swap)
    swap.turn(7, OTHER_LINK)
    get_turn(swap)
    assert swap.turn(8, OTHER_LINK) == []  # there is one already
    swap.loaded()

    assert (swap.turn_taken(LINK), swap.turn_taken(OTHER_LINK)) == (1, 8)


def test_another_links_loss_forgets_no_turn(swap: ModelSwap) -> None:
    serve(swap)
    get_turn(swap)

    swap.link_lost(OTHER_LINK)
    swap.loaded()

    assert swap.turn_taken(LINK) == 1


def test_a_model_that_cannot_be_loaded_leaves_the_old_one(swap: ModelSwap) -> None:
    serve(swap)
    assert get_turn(swap) == [Load(setup(B))]
    for _ in range(LOADS_IN_TURN - 1):
        assert swap.not_loaded(BROKEN) == [Retry(PAUSE_IN_TURN)]
        assert swap.retry() == [Load(setup(B))]

    assert swap.not_loaded(BROKEN) == [Load(setup(A))]
    assert swap.is_swapping
    assert swap.application is Application.RETRYING  # nobody should think that it is over
    assert swap.loaded() == []

    assert (swap.is_swapping, swap.turn_taken(LINK)) == (False, 1)
    assert (swap.application, swap.issues) == (Application.STUCK, (BROKEN,))
    assert swap.want(state(B)) == [Find(target(B))]  # said again: tried again


def test_what_is_not_wanted_any_more_is_not_tried_again(swap: ModelSwap) -> None:
    serve(swap)
    get_turn(swap)
    swap.want(state(LocalModel("/c.gguf")))

    assert swap.not_loaded(BROKEN) == [Load(setup(A))]
    assert swap.loaded() == [Find(target(LocalModel("/c.gguf")))]
    assert swap.issues == ()


def test_a_newer_wish_in_the_pause_brings_the_old_model_back_first(swap: ModelSwap) -> None:
    serve(swap)
    get_turn(swap)
    swap.not_loaded(BROKEN)

    assert swap.want(state(LocalModel("/c.gguf"))) == []
    assert swap.is_swapping
    assert swap.retry() == [Load(setup(A))]


def test_memory_that_was_short_for_a_moment_does_no_harm(swap: ModelSwap) -> None:
    serve(swap)
    get_turn(swap)

    swap.not_loaded(BROKEN)
    swap.retry()
    swap.loaded()

    assert (swap.application, swap.issues) == (Application.APPLIED, ())


def test_an_old_one_that_cannot_be_loaded_again_either_is_not_missed(swap: ModelSwap) -> None:
    serve(swap)
    get_turn(swap)
    swap.not_loaded(BROKEN)
    swap.retry()
    swap.not_loaded(BROKEN)

    assert swap.not_loaded(BROKEN) == [Retry(FIRST_DELAY)]
    assert (swap.is_swapping, swap.turn_taken(LINK)) == (False, 1)
    assert swap.application is Application.RETRYING
    assert swap.retry() == [Find(target(B))]


def test_without_another_model_it_is_tried_again_ever_slower(swap: ModelSwap) -> None:
    swap.want(state())
    delays: list[float] = []
    for _ in range(9):
        swap.found(setup())
        (retry,) = swap.not_loaded(BROKEN)
        assert isinstance(retry, Retry)
        delays.append(retry.after)
        assert swap.retry() == [Find(target())]

    assert delays[:3] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    assert delays[-1] == LONGEST_DELAY


def test_files_that_can_never_be_had_are_not_looked_for_again(swap: ModelSwap) -> None:
    serve(swap)
    swap.want(state(B))

    assert swap.not_found(target(B), MISSING, is_final=True) == []
    assert (swap.application, swap.issues) == (Application.STUCK, (MISSING,))
    assert swap.retry() == []


def test_files_that_may_come_are_looked_for_again(swap: ModelSwap) -> None:
    serve(swap)
    swap.want(state(B))

    assert swap.not_found(target(B), MISSING, is_final=False) == [Retry(FIRST_DELAY)]
    assert swap.application is Application.RETRYING
    assert swap.retry() == [Find(target(B))]


def test_a_pinned_model_stays_whatever_the_others_run() -> None:
    swap = ModelSwap(own=EngineChoices(slots=2), pinned=A)

    (find,) = swap.want(AgentDesiredState(model=B, choices=EngineChoices(slots=9, threads=3)))

    assert isinstance(find, Find)
    assert find.target.model == A
    assert find.target.choices == EngineChoices(slots=2, threads=3)


def test_overrides_go_before_what_the_agent_was_told() -> None:
    swap = ModelSwap(own=EngineChoices(slots=2), pinned=None)

    swap.want(AgentDesiredState(model=A, overrides=EngineChoices(slots=7)))

    assert swap.choices == EngineChoices(slots=7)


def test_shortcomings_are_of_what_is_loaded(swap: ModelSwap) -> None:
    swap.want(state())
    swap.found(setup())
    swap.loaded((MISSING,))
    assert (swap.issues, swap.application) == ((MISSING,), Application.APPLIED)

    get_turn(swap)
    swap.loaded()

    assert swap.issues == ()


class Histories(RuleBasedStateMachine):
    """Random wishes and outcomes, against a plain model of what is loaded."""

    @initialize()
    def start(self) -> None:
        self.swap = ModelSwap(own=EngineChoices(), pinned=None)
        self.loaded: Setup | None = None
        self.finding: Target | None = None
        self.loading: Setup | None = None
        self.retry: float | None = None
        self.turns = 0
        self.open_turn: int | None = None
        self.runs = False
        self.drains = False

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StopFinding():
                    assert self.finding is not None
                    self.finding = None
                case Find(wanted):
                    assert self.finding is None
                    self.finding = wanted
                case Load(setup):
                    self.let_go()
                    self.loading = setup
                case Unload():
                    self.let_go()
                    self.do(self.swap.unloaded())
                case UseTemplate():
                    assert self.loaded is not None
                    self.do(self.swap.template_used(()))
                case LimitDrain():
                    self.drains = True
                case GiveBack():
                    assert self.swap.is_swapping
                    self.runs = False
                case Retry(after):
                    self.retry = after
        if self.open_turn is not None and self.swap.turn_taken(LINK) >= self.open_turn:
            self.open_turn = None

    def let_go(self) -> None:
        assert self.loading is None, "two at once"
        if self.loaded is not None:
            assert self.open_turn is not None, "let go without a turn"
            assert not self.runs, "let go under what runs"
        self.loaded = None

    @rule(model=st.sampled_from([A, B, NoModel()]), template=st.sampled_from([None, "x"]))
    def want(self, model: ModelReference, template: str | None) -> None:
        self.wanted = model
        self.do(self.swap.want(state(model, template)))

    @precondition(lambda self: self.finding is not None)
    @rule(found=st.booleans(), is_final=st.booleans())
    def end_finding(self, found: bool, is_final: bool) -> None:
        assert self.finding is not None
        wanted, self.finding = self.finding, None
        if found:
            self.do(self.swap.found(Setup(wanted, "path")))
        else:
            self.do(self.swap.not_found(wanted, MISSING, is_final=is_final))

    @precondition(lambda self: self.loading is not None)
    @rule(works=st.booleans())
    def end_loading(self, works: bool) -> None:
        setup, self.loading = self.loading, None
        if works:
            self.loaded = setup
            self.do(self.swap.loaded())
        else:
            self.do(self.swap.not_loaded(BROKEN))

    @precondition(lambda self: self.open_turn is None)
    @rule()
    def give_turn(self) -> None:
        self.turns += 1
        self.open_turn = self.turns
        self.do(self.swap.turn(self.turns, LINK))

    @precondition(lambda self: self.loaded is not None and not self.swap.is_swapping)
    @rule()
    def begin_to_run(self) -> None:
        self.runs = True

    @rule()
    def end_what_runs(self) -> None:
        self.runs = False
        self.do(self.swap.idle())

    @precondition(lambda self: self.drains)
    @rule()
    def end_the_drain(self) -> None:
        self.drains = False
        self.do(self.swap.drained_long_enough())

    @precondition(lambda self: self.retry is not None)
    @rule()
    def try_again(self) -> None:
        self.retry = None
        self.do(self.swap.retry())

    @invariant()
    def what_serves_is_told(self) -> None:
        if self.swap.application is Application.APPLIED:
            serves = NoModel() if self.loaded is None else self.loaded.target.model
            assert serves == self.wanted
            assert self.swap.issues == ()

    @invariant()
    def something_is_under_way_unless_it_is_at_rest(self) -> None:
        at_rest = self.swap.application in {Application.APPLIED, Application.STUCK}
        waits = self.swap.awaits_turn or (self.swap.is_swapping and self.runs)
        draining = self.swap.is_swapping and self.loaded is not None
        nothing_yet = self.swap.application is Application.FRESH and not hasattr(self, "wanted")
        assert (
            at_rest
            or waits
            or draining
            or nothing_yet
            or self.finding is not None
            or self.loading is not None
            or self.retry is not None
        )


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
